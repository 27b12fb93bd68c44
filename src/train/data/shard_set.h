// Reads one split of a data folder. Document i is found by its index line and read by one pread.
#pragma once
#include <atomic>
#include <filesystem>
#include <mutex>

#include "train/data/manifest.h"

namespace m3::data {

struct ReadOptions {
  // Compare each shard's SHA-256 with the manifest before its first document is read.
  bool verify = true;
};

// All const functions may be called from any thread. The constructor reads the manifest and all indexes and
// refuses, by name, a missing shard, a size, an index hash or a count that differs.
class ShardSet {
 public:
  ShardSet(const std::filesystem::path& folder, Split split, const ReadOptions& options = {});
  ~ShardSet();
  ShardSet(const ShardSet&) = delete;
  ShardSet& operator=(const ShardSet&) = delete;

  int64_t num_documents() const { return static_cast<int64_t>(places_.size()); }
  const IndexEntry& entry(int64_t idx) const;
  // Throws Error naming shard and key: a damaged shard, a damaged member.
  Document read(int64_t idx) const;
  const Manifest& manifest() const { return manifest_; }

 private:
  struct Shard {
    ShardInfo info;
    std::filesystem::path path;
    int fd = -1;
    std::vector<IndexEntry> entries;
    mutable std::once_flag hashed;
    mutable std::string found_sha256;
  };
  struct Place {
    uint32_t shard, entry;
  };
  void check_hash(const Shard& shard) const;

  Manifest manifest_;
  ReadOptions options_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::vector<Place> places_;
};

}  // namespace m3::data
