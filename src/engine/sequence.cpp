#include "engine/sequence.h"

#include <algorithm>
#include <cstring>

namespace m3 {

Engine::Sequence::Media* Engine::Sequence::missing_media() {
  for (Media& item : media) {
    if (item.features == nullptr && item.last_position >= num_cached) return &item;
  }
  return nullptr;
}

namespace {

// The finaliser of splitmix64: every bit of the input reaches every bit of the output.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

std::vector<PageCache::Key> sequence_keys(std::span<const int32_t> prompt, const PlaceholderMap& placeholders,
                                          std::span<const Engine::Sequence::Media> media) {
  std::vector<PageCache::Key> keys(prompt.begin(), prompt.end());
  for (size_t i = 0; i < placeholders.positions.size(); ++i) {
    const int64_t row = placeholders.order[i];
    const auto item = std::ranges::find_if(media, [&](const auto& m) { return row < m.first_row + m.num_rows; });
    uint64_t content;
    std::memcpy(&content, item->hash.data(), sizeof content);
    keys[placeholders.positions[i]] = mix(content + mix(row - item->first_row + 1)) | uint64_t{1} << 63;
  }
  return keys;
}

}  // namespace m3
