#include "train/ingest/dedup.h"

#include <algorithm>
#include <bit>

#include "media/resize.h"

namespace m3::ingest {
namespace {

// SplitMix64's finaliser: a good mix of 64 bits.
uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// FNV-1a of each word.
std::vector<uint64_t> word_hashes(std::string_view text) {
  constexpr uint64_t kStart = 0xCBF29CE484222325ull, kPrime = 0x100000001B3ull;
  std::vector<uint64_t> words;
  uint64_t hash = kStart;
  bool inside = false;
  for (unsigned char c : text) {
    const bool part = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c >= 0x80;
    if (part) {
      hash = (hash ^ (c >= 'A' && c <= 'Z' ? c + 32 : c)) * kPrime;
      inside = true;
    } else if (inside) {
      words.push_back(hash);
      hash = kStart;
      inside = false;
    }
  }
  if (inside) words.push_back(hash);
  return words;
}

constexpr size_t kShingleWords = 5;

}  // namespace

std::vector<uint64_t> TextDedup::shingles(std::string_view text) {
  const std::vector<uint64_t> words = word_hashes(text);
  std::vector<uint64_t> out;
  for (size_t i = 0; i + kShingleWords <= words.size(); ++i) {
    uint64_t hash = 0;
    for (size_t k = 0; k < kShingleWords; ++k) hash = mix(hash ^ words[i + k]) + k;
    out.push_back(hash);
  }
  if (out.empty()) {  // a short text is one run
    uint64_t hash = 1;
    for (uint64_t word : words) hash = mix(hash ^ word);
    out.push_back(hash);
  }
  return out;
}

TextDedup::Signature TextDedup::sign(const std::vector<uint64_t>& shingles) {
  Signature signature;
  signature.fill(UINT32_MAX);
  for (uint64_t shingle : shingles) {
    for (int h = 0; h < kHashes; ++h) {
      signature[h] = std::min(signature[h], static_cast<uint32_t>(mix(shingle + 0x9E3779B97F4A7C15ull * (h + 1))));
    }
  }
  return signature;
}

TextDedup::Verdict TextDedup::add(std::string_view text) {
  uint64_t all = 0;
  for (uint64_t word : word_hashes(text)) all = mix(all ^ word) + 1;
  if (!exact_.insert(all).second) return Verdict::kExact;

  const Signature signature = sign(shingles(text));
  std::array<uint64_t, kBands> keys;
  for (int band = 0; band < kBands; ++band) {
    uint64_t key = static_cast<uint64_t>(band) + 1;
    for (int row = 0; row < kRows; ++row) key = mix(key ^ signature[band * kRows + row]);
    keys[band] = key;
    const auto found = bands_.find(key);
    if (found == bands_.end()) continue;
    for (uint32_t candidate : found->second) {
      int equal = 0;
      for (int h = 0; h < kHashes; ++h) equal += signatures_[candidate][h] == signature[h];
      if (equal >= near_share_ * kHashes) return Verdict::kNear;
    }
  }
  for (uint64_t key : keys) bands_[key].push_back(static_cast<uint32_t>(signatures_.size()));
  signatures_.push_back(signature);
  return Verdict::kNew;
}

uint64_t perceptual_hash(const Image& image) {
  const Image small = resize_bicubic(image, {8, 9});
  uint64_t hash = 0;
  for (int y = 0; y < 8; ++y) {
    const auto level = [&](int x) {
      const uint8_t* p = small.row(y) + 3 * x;
      return 299 * p[0] + 587 * p[1] + 114 * p[2];  // BT.601 luma
    };
    for (int x = 0; x < 8; ++x) hash = hash << 1 | (level(x) > level(x + 1));
  }
  return hash;
}

std::optional<uint32_t> PictureIndex::find_or_add(uint64_t hash, uint32_t number) {
  for (const auto& [other, first] : entries_) {
    if (std::popcount(hash ^ other) <= max_distance_) return first;
  }
  entries_.emplace_back(hash, number);
  return {};
}

}  // namespace m3::ingest
