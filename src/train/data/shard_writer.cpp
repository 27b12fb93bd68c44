#include "train/data/shard_writer.h"

#include "base/check.h"
#include "train/data/tar.h"

namespace m3::data {
namespace {

std::vector<MediaSize> media_sizes(const Document& document) {
  std::vector<MediaSize> sizes;
  for (const Segment& segment : document.segments) {
    if (segment.kind == Segment::Kind::kText) continue;
    const bool video = segment.kind == Segment::Kind::kVideo;
    sizes.push_back({segment.pictures[0].height, segment.pictures[0].width,
                     video ? static_cast<int>(segment.pictures.size()) : 0});
  }
  return sizes;
}

}  // namespace

void ShardWriter::Shard::write(std::string_view bytes) {
  file.write(bytes);
  hash.update(bytes);
}

ShardWriter::ShardWriter(std::filesystem::path folder, WriterOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  M3_CHECK(!std::filesystem::exists(folder_ / "manifest.json"), "{}: holds a data set already; choose an empty folder",
           folder_.string());
  std::filesystem::create_directories(folder_);
  manifest_.tool = options_.tool;
  manifest_.rule = options_.rule;
}

ShardWriter::~ShardWriter() = default;

void ShardWriter::add(const Document& document) {
  add_to(split_of(document.item.empty() ? document.id : document.item, options_.rule), document);
}

void ShardWriter::add_to(Split split, const Document& document) {
  const int at = static_cast<int>(split);
  if (open_[at] == nullptr) {
    const std::string name = fmt::format("{}-{:06}.tar", split_name(split), num_shards_[at]++);
    open_[at] = std::make_unique<Shard>(folder_ / name);
  }
  Shard& shard = *open_[at];
  IndexEntry entry{fmt::format("{:06}", num_documents_[at]++), static_cast<int64_t>(shard.file.size_bytes()), 0, 0,
                   media_sizes(document)};
  for (const Segment& segment : document.segments) entry.text_bytes += static_cast<int64_t>(segment.text.size());
  for (const Member& member : to_members(document, entry.key)) {
    shard.write(tar_header(member.name, member.bytes.size()));
    shard.write(member.bytes);
    shard.write(std::string(tar_padding(member.bytes.size()), '\0'));
  }
  entry.length = static_cast<int64_t>(shard.file.size_bytes()) - entry.offset;
  shard.entries.push_back(std::move(entry));
  manifest_.counts[split_name(split)][document.source].add(document);
  if (static_cast<int64_t>(shard.file.size_bytes()) > options_.shard_bytes) close(split);
}

void ShardWriter::close(Split split) {
  std::unique_ptr<Shard> shard = std::move(open_[static_cast<int>(split)]);
  shard->write(tar_end());
  ShardInfo info;
  info.file = shard->name;
  info.split = split;
  info.bytes = static_cast<int64_t>(shard->file.size_bytes());
  info.documents = static_cast<int64_t>(shard->entries.size());
  info.sha256 = shard->hash.hex();
  const std::string index = write_index(shard->entries);
  info.index_sha256 = sha256_hex(index);
  shard->file.commit();
  write_file_atomic(index_path(folder_, info), index);
  manifest_.shards.push_back(std::move(info));
}

Manifest ShardWriter::finish() {
  for (Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    if (open_[static_cast<int>(split)] != nullptr) close(split);
  }
  write_file_atomic(folder_ / "manifest.json", manifest_.to_json());
  return manifest_;
}

}  // namespace m3::data
