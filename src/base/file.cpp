#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace m3 {
namespace {

// A file descriptor that closes itself.
struct Fd {
  int fd;
  explicit Fd(int fd) : fd(fd) {}
  ~Fd() {
    if (fd >= 0) ::close(fd);
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;
};

uint64_t regular_file_size(int fd, const std::filesystem::path& path) {
  struct stat info = {};
  M3_CHECK(::fstat(fd, &info) == 0, "{}: cannot read its size: {}", path.string(), std::strerror(errno));
  M3_CHECK(S_ISREG(info.st_mode), "{}: not a regular file", path.string());
  return static_cast<uint64_t>(info.st_size);
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) : path_(path) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a named pipe must not hang
  M3_CHECK(file.fd >= 0, "{}: cannot open: {}", path.string(), std::strerror(errno));
  size_ = regular_file_size(file.fd, path);
  if (size_ == 0) return;
  void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.fd, 0);
  M3_CHECK(map != MAP_FAILED, "{}: cannot map {} bytes: {}", path.string(), size_, std::strerror(errno));
  data_ = static_cast<const std::byte*>(map);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void MappedFile::release() const {
  if (data_ != nullptr) ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
}

std::string read_file(const std::filesystem::path& path, uint64_t max_bytes) {
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a named pipe must not hang
  M3_CHECK(file.fd >= 0, "{}: cannot open: {}", path.string(), std::strerror(errno));
  const uint64_t size = regular_file_size(file.fd, path);
  M3_CHECK(size <= max_bytes, "{}: {} bytes, more than the limit of {}", path.string(), size, max_bytes);
  std::string content(size, '\0');
  uint64_t done = 0;
  while (done < size) {
    const ssize_t got = ::read(file.fd, content.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    M3_CHECK(got > 0, "{}: read stopped at byte {} of {}: {}", path.string(), done, size,
             got < 0 ? std::strerror(errno) : "end of file");
    done += static_cast<uint64_t>(got);
  }
  char more = 0;  // files of /proc say 0 bytes and hold some
  M3_CHECK(::read(file.fd, &more, 1) == 0, "{}: holds more than the {} bytes of its size; copy it first", path.string(),
           size);
  return content;
}

AtomicFile::AtomicFile(std::filesystem::path path, Readers readers)
    : path_(std::move(path)), temporary_(path_.string() + ".tmp") {
  struct stat info = {};
  // A device or a folder must not be replaced by a file.
  M3_CHECK(::stat(path_.c_str(), &info) != 0 || S_ISREG(info.st_mode), "{}: not a regular file; give a file name",
           path_.string());
  const mode_t mode = readers == Readers::kOwner ? 0600 : 0644;
  fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  M3_CHECK(fd_ >= 0, "{}: cannot create: {}", temporary_, std::strerror(errno));
}

AtomicFile::~AtomicFile() {
  if (fd_ < 0) return;
  ::close(fd_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd_, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    M3_CHECK(put > 0, "{}: write stopped after {} bytes: {}; {} is unchanged", temporary_, size_,
             std::strerror(errno), path_.string());
    bytes.remove_prefix(static_cast<size_t>(put));
    size_ += static_cast<uint64_t>(put);
  }
}

void AtomicFile::commit() {
  M3_CHECK(::fsync(fd_) == 0, "{}: cannot sync: {}; {} is unchanged", temporary_, std::strerror(errno),
           path_.string());
  M3_CHECK(::rename(temporary_.c_str(), path_.c_str()) == 0, "{}: cannot rename {} to it: {}",
           path_.string(), temporary_, std::strerror(errno));
  ::close(std::exchange(fd_, -1));
}

void write_file_atomic(const std::filesystem::path& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

}  // namespace m3
