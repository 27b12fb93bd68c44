// Writes a data folder: documents to shards of their split, an index beside each shard, the manifest last.
// A folder without a manifest is unfinished and no reader takes it.
#pragma once
#include <array>
#include <filesystem>
#include <memory>

#include "base/file.h"
#include "base/sha256.h"
#include "train/data/manifest.h"

namespace m3::data {

struct WriterOptions {
  SplitRule rule;
  int64_t shard_bytes = int64_t{256} << 20;  // a shard is closed once it is longer
  std::string tool = "m3";
};

// One thread at a time. On a failure (a full disk) the exception names the file; complete shards stay, the
// manifest does not appear.
class ShardWriter {
 public:
  // Makes the folder; refuses one that holds a manifest already.
  ShardWriter(std::filesystem::path folder, WriterOptions options);
  ~ShardWriter();

  void add(const Document& document);                // to the split of its item
  void add_to(Split split, const Document& document);
  void note_dropped(const std::string& reason) { ++manifest_.dropped[reason]; }
  Manifest finish();

 private:
  struct Shard {
    AtomicFile file;
    std::string name;
    Sha256 hash;
    std::vector<IndexEntry> entries;
    explicit Shard(const std::filesystem::path& path) : file(path), name(path.filename().string()) {}
    void write(std::string_view bytes);
  };
  void close(Split split);

  std::filesystem::path folder_;
  WriterOptions options_;
  Manifest manifest_;
  std::array<std::unique_ptr<Shard>, 3> open_;
  std::array<int, 3> num_shards_ = {};
  std::array<int64_t, 3> num_documents_ = {};
};

}  // namespace m3::data
