#include "train/data/shard_set.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.h"
#include "base/sha256.h"
#include "train/data/tar.h"

namespace m3::data {

ShardSet::ShardSet(const std::filesystem::path& folder, Split split, const ReadOptions& options)
    : manifest_(Manifest::load(folder)), options_(options) {
  for (const ShardInfo& info : manifest_.shards) {
    if (info.split != split) continue;
    auto shard = std::make_unique<Shard>();
    shard->info = info;
    shard->path = folder / info.file;
    const std::string name = shard->path.string();
    std::error_code error;
    const auto size = std::filesystem::file_size(shard->path, error);
    M3_CHECK(!error, "{}: the shard is missing: {}", name, error.message());
    M3_CHECK(static_cast<int64_t>(size) == info.bytes, "{}: {} bytes, the manifest says {}", name, size, info.bytes);
    const std::filesystem::path index = index_path(folder, info);
    const std::string found = sha256_file(index);
    M3_CHECK(found == info.index_sha256, "{}: SHA-256 {}, the manifest says {}", index.string(), found, info.index_sha256);
    shard->entries = read_index(index);
    M3_CHECK(static_cast<int64_t>(shard->entries.size()) == info.documents, "{}: {} documents, the manifest says {}",
             index.string(), shard->entries.size(), info.documents);
    const bool fits = shard->entries.empty() || shard->entries.back().offset + shard->entries.back().length <= info.bytes;
    M3_CHECK(fits, "{}: the index reaches beyond the shard", index.string());
    shard->fd = ::open(shard->path.c_str(), O_RDONLY | O_CLOEXEC);
    M3_CHECK(shard->fd >= 0, "{}: cannot open: {}", name, std::strerror(errno));
    for (uint32_t i = 0; i < shard->entries.size(); ++i) places_.push_back({static_cast<uint32_t>(shards_.size()), i});
    shards_.push_back(std::move(shard));
  }
}

ShardSet::~ShardSet() {
  for (const auto& shard : shards_) {
    if (shard->fd >= 0) ::close(shard->fd);
  }
}

const IndexEntry& ShardSet::entry(int64_t idx) const {
  const Place place = places_.at(idx);
  return shards_[place.shard]->entries[place.entry];
}

void ShardSet::check_hash(const Shard& shard) const {
  if (!options_.verify) return;
  std::call_once(shard.hashed, [&] { shard.found_sha256 = sha256_file(shard.path); });
  M3_CHECK(shard.found_sha256 == shard.info.sha256, "{}: damaged shard: SHA-256 {}, the manifest says {}; make it again",
           shard.path.string(), shard.found_sha256, shard.info.sha256);
}

Document ShardSet::read(int64_t idx) const {
  const Place place = places_.at(idx);
  const Shard& shard = *shards_[place.shard];
  const IndexEntry& entry = shard.entries[place.entry];
  check_hash(shard);
  std::string bytes(entry.length, '\0');
  for (int64_t done = 0; done < entry.length;) {
    const ssize_t got = ::pread(shard.fd, bytes.data() + done, entry.length - done, entry.offset + done);
    if (got < 0 && errno == EINTR) continue;
    M3_CHECK(got > 0, "{}: reading document {} stopped: {}", shard.path.string(), entry.key,
             got < 0 ? std::strerror(errno) : "end of file");
    done += got;
  }
  try {
    return from_members(read_tar(bytes, entry.offset));
  } catch (const Error& error) {
    M3_FAIL("{}: document {}: {}", shard.path.string(), entry.key, error.what());
  }
}

}  // namespace m3::data
