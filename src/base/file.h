// Files: read-only memory maps, whole reads with a size limit, atomic writes.
// Every failure throws Error naming the path and the system's reason.
#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace m3 {

// Read-only map of a whole file; movable, unmapped on destruction. An empty file maps to an empty
// span. Pages become resident when touched; release() gives them back to the page cache.
class MappedFile {
 public:
  MappedFile() = default;
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  const std::filesystem::path& path() const { return path_; }
  void release() const;

 private:
  std::filesystem::path path_;
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// The file's content; refuses files larger than max_bytes before reading.
std::string read_file(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 32);

// A file that appears under its name only when complete: bytes go to path + ".tmp"; commit() syncs and
// renames it over path. Without commit, and on any failure (a full disk), the old file is untouched and
// the temporary one removed.
class AtomicFile {
 public:
  enum class Readers { kAll, kOwner };  // kOwner: mode 0600

  explicit AtomicFile(std::filesystem::path path, Readers readers = Readers::kAll);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(std::string_view bytes);
  void commit();
  uint64_t size_bytes() const { return size_; }

 private:
  std::filesystem::path path_;
  std::string temporary_;
  int fd_ = -1;
  uint64_t size_ = 0;
};

void write_file_atomic(const std::filesystem::path& path, std::string_view content);

}  // namespace m3
