// Uploaded pictures and films by id (/v1/files), and files of a folder that requests may name.
// Thread-safe.
#pragma once
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace m3 {

struct StoredFile {
  std::string id, name, purpose;
  int64_t bytes = 0;
  int64_t created = 0;  // Unix seconds
};

struct FileStoreLimits {
  int64_t max_files = 1000;
  int64_t max_total_bytes = int64_t{8} << 30;
  int64_t max_age_seconds = 24 * 3600;
};

class FileStore {
 public:
  // Creates the folder; ids of files from before are not known again: they are removed.
  FileStore(std::filesystem::path folder, FileStoreLimits limits = {});

  // Throws ApiError 400 (413) when a limit would be passed.
  StoredFile add(std::string name, std::string purpose, std::string_view bytes);
  std::optional<StoredFile> find(const std::string& id);
  std::vector<StoredFile> list();
  bool remove(const std::string& id);
  std::optional<std::string> read(const std::string& id);

 private:
  std::filesystem::path path_of(const std::string& id) const { return folder_ / id; }
  void drop_old();  // with the lock held

  const std::filesystem::path folder_;
  const FileStoreLimits limits_;
  std::mutex mutex_;  // guards what follows
  std::map<std::string, StoredFile> files_;
  int64_t total_bytes_ = 0;
};

// The bytes of a file:// URL below `folder` after resolving links; ApiError 400 otherwise.
std::string read_local_media(const std::string& url, const std::string& folder,
                             const std::string& where);

struct FormPart {
  std::string name, filename;
  std::string_view data;  // into the body
};
// A multipart/form-data body; ApiError 400 if it is none.
std::vector<FormPart> read_form(std::string_view content_type, std::string_view body);

}  // namespace m3
