// manifest.json and the index beside each shard (training.md §5). A data folder holds
//
//   manifest.json     shards with size, SHA-256 and count; counts by split and source; the split rule
//   train-000000.tar  members of documents (document.h)
//   train-000000.idx  one line a document: key, offset, length, text bytes, media (tab-separated)
//
// Media are written as h x w, and h x w x frames for clips: "i480x640,v84x84x8", "-" for none: so lengths in
// tokens are known without decoding, and a document is read by one pread.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "train/data/document.h"
#include "train/data/split.h"

namespace m3::data {

struct MediaSize {
  int height = 0, width = 0;
  int frames = 0;  // 0: a picture
  bool operator==(const MediaSize&) const = default;
};

struct IndexEntry {
  std::string key;
  int64_t offset = 0, length = 0, text_bytes = 0;
  std::vector<MediaSize> media;
};

std::string write_index(const std::vector<IndexEntry>& entries);
// Throws Error naming file and line; entries must follow one another without holes.
std::vector<IndexEntry> read_index(const std::filesystem::path& path);

struct ShardInfo {
  std::string file;  // "train-000000.tar"; the index is beside it
  Split split = Split::kTrain;
  int64_t bytes = 0, documents = 0;
  std::string sha256, index_sha256;
};

struct Manifest {
  std::string tool;  // version of the program that wrote it
  SplitRule rule;
  std::vector<ShardInfo> shards;
  std::map<std::string, std::map<std::string, DocumentCounts>> counts;  // split, source
  std::map<std::string, int64_t> dropped;  // documents left out, by reason

  std::string to_json() const;
  static Manifest load(const std::filesystem::path& folder);  // throws Error naming the file and the field
};

std::filesystem::path index_path(const std::filesystem::path& folder, const ShardInfo& shard);

}  // namespace m3::data
