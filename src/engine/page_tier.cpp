#include "engine/page_tier.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/log.h"

namespace m3 {

namespace {

// pread or pwrite of all bytes; false: errno tells, 0 stands for the end of the file.
template <typename Call, typename Pointer>
bool transfer(Call call, int fd, Pointer data, int64_t bytes, int64_t offset) {
  while (bytes > 0) {
    errno = 0;
    const ssize_t done = call(fd, data, static_cast<size_t>(bytes), offset);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return false;
    data += done;
    bytes -= done;
    offset += done;
  }
  return true;
}

}  // namespace

// Four chains at a time, since a product waits for the one before. A changed word changes its chain for certain: both
// steps are one-to-one.
uint64_t page_checksum(uint64_t seed, std::span<const uint64_t> words) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;
  uint64_t chains[4] = {seed, 1, 2, 3};
  for (size_t i = 0; i < words.size(); ++i) chains[i % 4] = ((chains[i % 4] >> 32 | chains[i % 4] << 32) ^ words[i]) * kOdd;
  uint64_t sum = 0;
  for (const uint64_t chain : chains) sum = ((sum >> 29 | sum << 35) ^ chain) * kOdd;
  return sum;
}

FilePageTier::FilePageTier(EngineModel& model, const std::filesystem::path& folder, int64_t max_bytes)
    : model_(model), folder_(folder.string()), page_bytes_(model.sizes().page_bytes) {
  const int64_t slots = std::min<int64_t>(max_bytes / page_bytes_, std::numeric_limits<int32_t>::max());
  M3_CHECK(slots > 0, "{} bytes for pages that make room, one page has {}", max_bytes, page_bytes_);
  buffer_.resize((page_bytes_ + 7) / 8);
  checksums_.resize(slots);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  std::string name = (folder / "m3-pages-XXXXXX").string();
  fd_ = ::mkostemp(name.data(), O_CLOEXEC);
  M3_CHECK(fd_ >= 0, "{}: cannot create a file for pages that make room: {}", folder_, std::strerror(errno));
  ::unlink(name.c_str());
}

FilePageTier::~FilePageTier() { ::close(fd_); }

bool FilePageTier::store(int32_t page, int32_t slot) {
  auto* bytes = reinterpret_cast<std::byte*>(buffer_.data());
  model_.read_page(page, {bytes, static_cast<size_t>(page_bytes_)});
  if (!transfer(::pwrite, fd_, bytes, page_bytes_, slot * page_bytes_)) {
    warn("written");
    return false;
  }
  checksums_[slot] = page_checksum(slot, buffer_);
  return true;
}

bool FilePageTier::load(int32_t slot, int32_t page) {
  auto* bytes = reinterpret_cast<std::byte*>(buffer_.data());
  errno = 0;
  if (!transfer(::pread, fd_, bytes, page_bytes_, slot * page_bytes_) || page_checksum(slot, buffer_) != checksums_[slot]) {
    warn("read back");
    return false;
  }
  model_.write_page(page, {bytes, static_cast<size_t>(page_bytes_)});
  return true;
}

void FilePageTier::warn(const char* action) {
  if (warned_) return;
  warned_ = true;
  log_warn("{}: a page could not be {} ({}): it will be computed again, as others to which this happens without a word here",
           folder_, action, errno != 0 ? std::strerror(errno) : "damaged");
}

}  // namespace m3
