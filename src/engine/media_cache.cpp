#include "engine/media_cache.h"

#include "base/sha256.h"

namespace m3 {

MediaHash hash_media(const MediaInput& media) {
  Sha256 sha;
  const std::array<int64_t, 4> head = {media.is_video, media.grid.t, media.grid.h, media.grid.w};
  sha.update(std::as_bytes(std::span(head)));
  sha.update(std::as_bytes(std::span(*media.patches_NP)));
  return sha.digest();
}

std::shared_ptr<const MediaFeatures> MediaCache::find(const MediaHash& hash) {
  const auto found = by_hash_.find(hash);
  if (found == by_hash_.end()) return nullptr;
  entries_.splice(entries_.begin(), entries_, found->second);
  return found->second->second;
}

void MediaCache::add(const MediaHash& hash, std::shared_ptr<const MediaFeatures> features) {
  const int64_t bytes = features->bytes();
  if (bytes > max_bytes_ || by_hash_.contains(hash)) return;
  while (bytes_ + bytes > max_bytes_) {
    bytes_ -= entries_.back().second->bytes();
    by_hash_.erase(entries_.back().first);
    entries_.pop_back();
  }
  entries_.emplace_front(hash, std::move(features));
  by_hash_[hash] = entries_.begin();
  bytes_ += bytes;
}

}  // namespace m3
