// Features of pictures and clips by the hash of their contents, least recently used go first. What a running
// request holds stays alive with it and may exceed the limit.
#pragma once
#include <array>
#include <list>
#include <map>
#include <memory>

#include "engine/engine_model.h"

namespace m3 {

using MediaHash = std::array<uint8_t, 32>;
MediaHash hash_media(const MediaInput& media);  // kind, grid and patch rows

class MediaCache {
 public:
  explicit MediaCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  std::shared_ptr<const MediaFeatures> find(const MediaHash& hash);  // null: not there
  void add(const MediaHash& hash, std::shared_ptr<const MediaFeatures> features);
  int64_t bytes() const { return bytes_; }

 private:
  using Entry = std::pair<MediaHash, std::shared_ptr<const MediaFeatures>>;
  int64_t max_bytes_, bytes_ = 0;
  std::list<Entry> entries_;  // newest first
  std::map<MediaHash, std::list<Entry>::iterator> by_hash_;
};

}  // namespace m3
