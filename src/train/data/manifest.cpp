#include "train/data/manifest.h"

#include <charconv>

#include "base/check.h"
#include "base/file.h"
#include "base/sha256.h"

namespace m3::data {
namespace {

constexpr int kVersion = 1;

std::vector<std::string_view> cut(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == text.npos) return parts;
    text.remove_prefix(end + 1);
  }
}

int64_t to_count(std::string_view text, const std::string& where) {
  int64_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  M3_CHECK(error == std::errc() && end == text.data() + text.size() && value >= 0, "{}: \"{}\" is no count", where, text);
  return value;
}

MediaSize read_media(std::string_view text, const std::string& where) {
  const bool video = !text.empty() && text[0] == 'v';
  M3_CHECK(video || (!text.empty() && text[0] == 'i'), "{}: unknown media \"{}\"", where, text);
  const std::vector<std::string_view> sides = cut(text.substr(1), 'x');
  M3_CHECK(sides.size() == (video ? 3u : 2u), "{}: unknown media \"{}\"", where, text);
  MediaSize size;
  size.height = static_cast<int>(to_count(sides[0], where));
  size.width = static_cast<int>(to_count(sides[1], where));
  size.frames = video ? static_cast<int>(to_count(sides[2], where)) : 0;
  return size;
}

JsonValue counts_json(const DocumentCounts& counts) {
  JsonValue out = JsonValue::object();
  out.append_member("documents", JsonValue::integer(counts.documents));
  out.append_member("text_bytes", JsonValue::integer(counts.text_bytes));
  out.append_member("images", JsonValue::integer(counts.images));
  out.append_member("videos", JsonValue::integer(counts.videos));
  out.append_member("frames", JsonValue::integer(counts.frames));
  return out;
}

// The value at `name`, or an error that names the file.
const JsonValue& need(const JsonValue& object, const char* name, const std::string& file) {
  const JsonValue* value = object.find(name);
  M3_CHECK(value != nullptr, "{}: field \"{}\" is missing", file, name);
  return *value;
}
std::string need_text(const JsonValue& object, const char* name, const std::string& file) {
  const JsonValue& value = need(object, name, file);
  M3_CHECK(value.is_string(), "{}: field \"{}\" must be text", file, name);
  return value.text();
}
double need_number(const JsonValue& object, const char* name, const std::string& file) {
  const JsonValue& value = need(object, name, file);
  M3_CHECK(value.is_number(), "{}: field \"{}\" must be a number", file, name);
  return value.as_double();
}
int64_t need_count(const JsonValue& object, const char* name, const std::string& file) {
  const JsonValue& value = need(object, name, file);
  M3_CHECK(value.is_integer(), "{}: field \"{}\" must be a count", file, name);
  return to_count(value.text(), fmt::format("{}: {}", file, name));
}

DocumentCounts read_counts(const JsonValue& value, const std::string& file) {
  return {need_count(value, "documents", file), need_count(value, "text_bytes", file), need_count(value, "images", file),
          need_count(value, "videos", file), need_count(value, "frames", file)};
}

Split read_split(const std::string& name, const std::string& file) {
  for (Split split : {Split::kTrain, Split::kValid, Split::kTest}) {
    if (name == split_name(split)) return split;
  }
  M3_FAIL("{}: unknown split \"{}\"", file, name);
}

ShardInfo read_shard(const JsonValue& value, const std::string& file) {
  ShardInfo shard;
  shard.file = need_text(value, "file", file);
  const bool plain = shard.file.find('/') == std::string::npos && shard.file.ends_with(".tar");
  M3_CHECK(plain, "{}: a shard must be the name of a .tar file beside it, got \"{}\"", file, shard.file);
  shard.split = read_split(need_text(value, "split", file), file);
  shard.bytes = need_count(value, "bytes", file);
  shard.documents = need_count(value, "documents", file);
  shard.sha256 = need_text(value, "sha256", file);
  shard.index_sha256 = need_text(value, "index_sha256", file);
  return shard;
}

}  // namespace

std::string write_index(const std::vector<IndexEntry>& entries) {
  std::string out;
  for (const IndexEntry& entry : entries) {
    std::string media;
    for (const MediaSize& size : entry.media) {
      if (!media.empty()) media += ',';
      media += size.frames > 0 ? fmt::format("v{}x{}x{}", size.height, size.width, size.frames)
                               : fmt::format("i{}x{}", size.height, size.width);
    }
    out += fmt::format("{}\t{}\t{}\t{}\t{}\n", entry.key, entry.offset, entry.length, entry.text_bytes, media.empty() ? "-" : media);
  }
  return out;
}

std::vector<IndexEntry> read_index(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  std::vector<IndexEntry> entries;
  int64_t expected = 0;
  M3_CHECK(text.empty() || text.back() == '\n', "{}: the last line is cut", path.string());
  for (std::string_view line : cut(text, '\n')) {
    if (line.empty()) continue;
    const std::string where = fmt::format("{}: line {}", path.string(), entries.size() + 1);
    const std::vector<std::string_view> fields = cut(line, '\t');
    M3_CHECK(fields.size() == 5, "{}: want 5 fields, got {}", where, fields.size());
    IndexEntry entry{std::string(fields[0]), to_count(fields[1], where), to_count(fields[2], where), to_count(fields[3], where), {}};
    M3_CHECK(entry.offset == expected && entry.length > 0, "{}: offset {} where {} belongs", where, entry.offset, expected);
    if (fields[4] != "-") {
      for (std::string_view media : cut(fields[4], ',')) entry.media.push_back(read_media(media, where));
    }
    expected += entry.length;
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string Manifest::to_json() const {
  JsonValue root = JsonValue::object();
  root.append_member("format", JsonValue::string("m3-data"));
  root.append_member("version", JsonValue::integer(kVersion));
  root.append_member("tool", JsonValue::string(tool));
  JsonValue split = JsonValue::object();
  split.append_member("rule", JsonValue::string("first 53 bits of SHA-256(\"seed:item\"); below `test`: test, then `valid`"));
  split.append_member("seed", JsonValue::string(std::to_string(rule.seed)));
  split.append_member("valid", JsonValue::number(rule.valid));
  split.append_member("test", JsonValue::number(rule.test));
  root.append_member("split", std::move(split));
  JsonValue list = JsonValue::array();
  for (const ShardInfo& shard : shards) {
    JsonValue entry = JsonValue::object();
    entry.append_member("file", JsonValue::string(shard.file));
    entry.append_member("split", JsonValue::string(split_name(shard.split)));
    entry.append_member("bytes", JsonValue::integer(shard.bytes));
    entry.append_member("documents", JsonValue::integer(shard.documents));
    entry.append_member("sha256", JsonValue::string(shard.sha256));
    entry.append_member("index_sha256", JsonValue::string(shard.index_sha256));
    list.push_back(std::move(entry));
  }
  root.append_member("shards", std::move(list));
  JsonValue by_split = JsonValue::object();
  for (const auto& [name, sources] : counts) {
    JsonValue by_source = JsonValue::object();
    for (const auto& [source, count] : sources) by_source.append_member(source, counts_json(count));
    by_split.append_member(name, std::move(by_source));
  }
  root.append_member("counts", std::move(by_split));
  JsonValue reasons = JsonValue::object();
  for (const auto& [reason, count] : dropped) reasons.append_member(reason, JsonValue::integer(count));
  root.append_member("dropped", std::move(reasons));
  return root.dump() + "\n";
}

Manifest Manifest::load(const std::filesystem::path& folder) {
  const std::string file = (folder / "manifest.json").string();
  const JsonValue root = JsonValue::parse(read_file(file), file);
  const JsonValue* format = root.find("format");
  M3_CHECK(format != nullptr && format->is_string() && format->text() == "m3-data", "{}: not a manifest of m3 data", file);
  const int64_t version = need_count(root, "version", file);
  M3_CHECK(version == kVersion, "{}: version {}, this program reads {}", file, version, kVersion);
  Manifest out;
  out.tool = need_text(root, "tool", file);
  const JsonValue& split = need(root, "split", file);
  const std::string seed = need_text(split, "seed", file);
  const auto [end, error] = std::from_chars(seed.data(), seed.data() + seed.size(), out.rule.seed);
  M3_CHECK(error == std::errc() && end == seed.data() + seed.size(), "{}: split seed \"{}\"", file, seed);
  out.rule.valid = need_number(split, "valid", file);
  out.rule.test = need_number(split, "test", file);
  const JsonValue& shards = need(root, "shards", file);
  M3_CHECK(shards.is_array(), "{}: \"shards\" must be a list", file);
  for (const JsonValue& shard : shards.items()) out.shards.push_back(read_shard(shard, file));
  const JsonValue& counts = need(root, "counts", file);
  for (size_t i = 0; i < counts.keys().size(); ++i) {
    const JsonValue& sources = counts.items()[i];
    for (size_t k = 0; k < sources.keys().size(); ++k) {
      out.counts[counts.keys()[i]][sources.keys()[k]] = read_counts(sources.items()[k], file);
    }
  }
  const JsonValue& dropped = need(root, "dropped", file);
  for (const std::string& reason : dropped.keys()) out.dropped[reason] = need_count(dropped, reason.c_str(), file);
  return out;
}

std::filesystem::path index_path(const std::filesystem::path& folder, const ShardInfo& shard) {
  return std::filesystem::path(folder / shard.file).replace_extension(".idx");
}

}  // namespace m3::data
