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
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
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
  Fd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
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
  return content;
}

void write_file_atomic(const std::filesystem::path& path, std::string_view content) {
  const std::string temporary = path.string() + ".tmp";
  {
    Fd file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    M3_CHECK(file.fd >= 0, "{}: cannot create: {}", temporary, std::strerror(errno));
    size_t done = 0;
    while (done < content.size()) {
      const ssize_t put = ::write(file.fd, content.data() + done, content.size() - done);
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) {
        const int reason = errno;
        ::unlink(temporary.c_str());
        M3_FAIL("{}: write stopped at byte {} of {}: {}; {} is unchanged", temporary, done,
                content.size(), std::strerror(reason), path.string());
      }
      done += static_cast<size_t>(put);
    }
    if (::fsync(file.fd) != 0) {
      const int reason = errno;
      ::unlink(temporary.c_str());
      M3_FAIL("{}: cannot sync: {}; {} is unchanged", temporary, std::strerror(reason), path.string());
    }
  }
  M3_CHECK(::rename(temporary.c_str(), path.c_str()) == 0, "{}: cannot rename {} to it: {}",
           path.string(), temporary, std::strerror(errno));
}

}  // namespace m3
