#include "train/ingest/importer.h"

#include <algorithm>

#include "base/check.h"
#include "base/log.h"
#include "base/sha256.h"

namespace m3::ingest {

namespace fs = std::filesystem;

std::vector<fs::path> find_files(const fs::path& path, const std::vector<std::string>& extensions) {
  const auto wanted = [&](const fs::path& file) {
    std::string extension = file.extension().string();
    std::transform(extension.begin(), extension.end(), extension.begin(), [](unsigned char c) { return std::tolower(c); });
    return std::find(extensions.begin(), extensions.end(), extension) != extensions.end();
  };
  std::vector<fs::path> files;
  if (fs::is_regular_file(path)) {
    files.push_back(path);  // named by the user: whatever its extension
    return files;
  }
  M3_CHECK(fs::is_directory(path), "{}: no such file or folder", path.string());
  for (const auto& entry : fs::recursive_directory_iterator(path, fs::directory_options::skip_permission_denied)) {
    if (entry.is_regular_file() && wanted(entry.path())) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

Importer::Importer(data::ShardWriter& writer, ImportOptions options)
    : writer_(writer), options_(options), texts_(options.near_duplicates) {}

void Importer::add(data::Document document) {
  std::string text, all;
  bool has_media = false;
  for (const data::Segment& segment : document.segments) {
    text += segment.text;
    all += segment.text;
    for (const data::Picture& picture : segment.pictures) {
      has_media = true;
      all += sha256_hex(picture.bytes);
    }
  }
  if (has_media) {
    if (!with_media_.insert(sha256_u64(all)).second) return drop("duplicate");
    return writer_.add(document);
  }
  if (const std::string reason = reason_to_drop(text, options_.clean); !reason.empty()) return drop(reason);
  switch (texts_.add(text)) {
    case TextDedup::Verdict::kExact: return drop("duplicate");
    case TextDedup::Verdict::kNear: return drop("near duplicate");
    case TextDedup::Verdict::kNew: writer_.add(document);
  }
}

void Importer::add_text(const Source& source, const std::string& id, const std::string& text) {
  const std::vector<std::string> pieces = cut_text(text, options_.max_document_bytes);
  for (size_t i = 0; i < pieces.size(); ++i) {
    data::Document document;
    document.id = pieces.size() > 1 ? fmt::format("{}#{}", id, i) : id;
    document.source = source.name;
    document.licence = source.licence;
    document.lang = source.lang;
    document.item = id;
    document.segments.push_back(data::Segment::of_text(pieces[i], source.weight));
    add(std::move(document));
  }
}

void Importer::text(const Source& source) {
  for (const fs::path& file : find_files(source.path, {".txt", ".md", ".rst", ".tex", ".c", ".h", ".cpp", ".py"})) {
    const std::string id = fmt::format("{}:{}", source.name, fs::relative(file, source.path).string());
    add_text(source, id, clean_text(to_utf8(read_file(file))));
  }
}

std::optional<data::Picture> Importer::load_picture(const fs::path& path) {
  try {
    data::Picture picture = data::Picture::of_file(read_file(path, static_cast<uint64_t>(options_.limits.max_file_bytes)), options_.limits);
    if (std::min(picture.height, picture.width) < options_.min_picture_side) {
      drop("picture: too small");
      return {};
    }
    smart_resize(picture.height, picture.width, kImageBounds);  // refuses side ratios the model cannot take
    return picture;
  } catch (const Error& error) {
    log_debug("{}: {}", path.string(), error.what());
    drop("picture: cannot be read");
    return {};
  }
}

// Near copies of a picture share the item, and so the split, of the first one.
std::string Importer::item_of(const data::Picture& picture, const std::string& item) {
  const uint32_t number = static_cast<uint32_t>(picture_items_.size());
  if (const auto first = pictures_.find_or_add(perceptual_hash(picture.decode(options_.limits)), number)) return picture_items_[*first];
  picture_items_.push_back(item);
  return item;
}

}  // namespace m3::ingest
