#include "server/file_store.h"

#include <fmt/core.h>

#include <atomic>
#include <chrono>
#include <random>

#include "base/file.h"
#include "server/field_reader.h"

namespace m3 {

namespace {

int64_t unix_seconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

FileStore::FileStore(std::filesystem::path folder, FileStoreLimits limits)
    : folder_(std::move(folder)), limits_(limits) {
  std::filesystem::create_directories(folder_);
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    if (entry.path().filename().string().starts_with("file-"))
      std::filesystem::remove(entry.path());
  }
}

void FileStore::drop_old() {
  const int64_t oldest = unix_seconds() - limits_.max_age_seconds;
  for (auto it = files_.begin(); it != files_.end();) {
    if (it->second.created >= oldest) {
      ++it;
      continue;
    }
    std::filesystem::remove(path_of(it->first));
    total_bytes_ -= it->second.bytes;
    it = files_.erase(it);
  }
}

StoredFile FileStore::add(std::string name, std::string purpose, std::string_view bytes) {
  static std::atomic<uint64_t> next = std::random_device{}();
  const std::lock_guard lock(mutex_);
  drop_old();
  const auto size = static_cast<int64_t>(bytes.size());
  if (static_cast<int64_t>(files_.size()) >= limits_.max_files ||
      total_bytes_ + size > limits_.max_total_bytes) {
    throw ApiError(
        413,
        fmt::format(
            "{} files with {} bytes are stored, at most {} and {} bytes may be; delete some",
            files_.size(), total_bytes_, limits_.max_files, limits_.max_total_bytes),
        "file");
  }
  StoredFile file{fmt::format("file-{:016x}", ++next), std::move(name), std::move(purpose), size,
                  unix_seconds()};
  write_file_atomic(path_of(file.id), bytes);
  total_bytes_ += size;
  files_[file.id] = file;
  return file;
}

std::optional<StoredFile> FileStore::find(const std::string& id) {
  const std::lock_guard lock(mutex_);
  drop_old();
  const auto it = files_.find(id);
  return it == files_.end() ? std::nullopt : std::optional(it->second);
}

std::vector<StoredFile> FileStore::list() {
  const std::lock_guard lock(mutex_);
  drop_old();
  std::vector<StoredFile> list;
  for (const auto& [id, file] : files_) list.push_back(file);
  return list;
}

bool FileStore::remove(const std::string& id) {
  const std::lock_guard lock(mutex_);
  const auto it = files_.find(id);
  if (it == files_.end()) return false;
  std::filesystem::remove(path_of(id));
  total_bytes_ -= it->second.bytes;
  files_.erase(it);
  return true;
}

std::optional<std::string> FileStore::read(const std::string& id) {
  if (!find(id)) return std::nullopt;
  return read_file(path_of(id));
}

std::string read_local_media(const std::string& url, const std::string& folder,
                             const std::string& where) {
  constexpr std::string_view kScheme = "file://";
  if (folder.empty()) {
    refuse_field(
        where,
        "file:// URLs are off; start the server with --media-path FOLDER to allow files below it");
  }
  std::error_code problem;
  const auto root = std::filesystem::canonical(folder, problem);
  const auto path = problem ? std::filesystem::path()
                            : std::filesystem::canonical(url.substr(kScheme.size()), problem);
  const bool inside =
      !problem &&
      std::mismatch(root.begin(), root.end(), path.begin(), path.end()).first == root.end();
  if (!inside || !std::filesystem::is_regular_file(path))
    refuse_field(where, "is no file below the server's --media-path");
  return read_file(path);
}

std::vector<FormPart> read_form(std::string_view content_type, std::string_view body) {
  const auto bad = [](std::string_view what) {
    throw ApiError(400, fmt::format("multipart/form-data: {}", what));
  };
  const size_t at = content_type.find("boundary=");
  if (!content_type.starts_with("multipart/form-data") || at == content_type.npos)
    bad("want that content type, with a boundary");
  std::string_view boundary = content_type.substr(at + 9);
  boundary = boundary.substr(0, boundary.find(';'));
  if (boundary.size() >= 2 && boundary.front() == '"')
    boundary = boundary.substr(1, boundary.size() - 2);
  if (boundary.empty() || boundary.size() > 70) bad("the boundary has a wrong length");
  const std::string mark = fmt::format("--{}", boundary), separator = "\r\n" + mark;
  if (!body.starts_with(mark)) bad("the body does not begin with the boundary");
  std::vector<FormPart> parts;
  size_t from = mark.size();
  while (!body.substr(from).starts_with("--")) {
    const size_t head_end = body.find("\r\n\r\n", from), end = body.find(separator, from);
    if (head_end == body.npos || end == body.npos || end < head_end + 2) bad("a part is cut");
    const std::string_view head = body.substr(from, head_end - from);
    const auto attribute = [&](std::string_view name) {
      const size_t begin = head.find(fmt::format(" {}=\"", name));
      if (begin == head.npos) return std::string();
      const size_t first = begin + name.size() + 3;
      return std::string(head.substr(first, head.find('"', first) - first));
    };
    const size_t data = head_end + 4;
    parts.push_back({attribute("name"), attribute("filename"),
                     data <= end ? body.substr(data, end - data) : ""});
    if (parts.size() > 64) bad("more than 64 parts");
    from = end + separator.size();
  }
  return parts;
}

}  // namespace m3
