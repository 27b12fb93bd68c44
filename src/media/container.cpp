#include "media/container.h"

#include <string_view>

#include "base/check.h"

namespace m3::media {
namespace {

std::string_view name_at(Bytes file, size_t at) { return {reinterpret_cast<const char*>(file.data()) + at, 4}; }

[[noreturn]] void cut(const char* format, std::string_view part, size_t at, uint64_t need, uint64_t left) {
  M3_FAIL("{}: the file is truncated: {} at byte {} needs {} bytes, {} are left", format, part, at, need, left);
}

// Top-level boxes: 32-bit size and name, size 1: a 64-bit size follows, size 0: up to the end.
void check_mp4(Bytes file) {
  size_t at = 0;
  while (file.size() - at >= 8) {
    uint64_t size = big_endian_u32(file, at);
    const std::string_view name = name_at(file, at + 4);
    const bool holds_film = name == "ftyp" || name == "moov" || name == "mdat" || name == "moof";
    if (!holds_film && name != "free" && name != "skip" && name != "wide" && name != "sidx" && name != "styp" &&
        name != "uuid" && name != "mfra" && name != "udta" && name != "meta") {
      return;  // bytes after the film
    }
    uint64_t header = 8;
    if (size == 1 && file.size() - at >= 16) {
      size = uint64_t{big_endian_u32(file, at + 8)} << 32 | big_endian_u32(file, at + 12);
      header = 16;
    }
    if (size == 0) return;
    M3_CHECK(size >= header, "MP4: damaged: box {} at byte {} has the invalid size {}", name, at, size);
    if (size > file.size() - at) {
      if (holds_film) cut("MP4", fmt::format("box {}", name), at, size, file.size() - at);
      return;
    }
    at += size;
  }
}

// An EBML number: the count of leading zero bits of the first byte tells its length. `keep_marker`: ids
// keep the marker bit, sizes do not. length 0: not readable.
struct EbmlNumber {
  uint64_t value = 0;
  size_t length = 0;
  bool unknown = false;  // a size of all ones: up to the end
};

EbmlNumber read_ebml(Bytes file, size_t at, bool keep_marker) {
  if (at >= file.size() || byte_at(file, at) == 0) return {};
  const size_t length = static_cast<size_t>(__builtin_clz(byte_at(file, at))) - 24 + 1;
  if (length > file.size() - at) return {};
  EbmlNumber number{.length = length};
  const uint64_t first_mask = keep_marker ? 0xff : (0xffu >> length);
  number.value = byte_at(file, at) & first_mask;
  for (size_t i = 1; i < length; ++i) number.value = number.value << 8 | byte_at(file, at + i);
  number.unknown = !keep_marker && number.value == (uint64_t{1} << (7 * length)) - 1;
  return number;
}

void check_matroska(Bytes file) {
  constexpr uint64_t kSegment = 0x18538067, kCluster = 0x1F43B675;
  size_t at = 0;
  while (at < file.size()) {
    const EbmlNumber id = read_ebml(file, at, true);
    if (id.length == 0 || id.length > 4) return;  // not an element: bytes after the film
    const EbmlNumber size = read_ebml(file, at + id.length, false);
    if (size.length == 0) cut("Matroska", "an element header", at, id.length + 1, file.size() - at);
    const size_t content = at + id.length + size.length;
    if (size.unknown) {
      at = content;  // a live recording: its parts follow
      continue;
    }
    if (size.value > file.size() - content) {
      const bool segment = id.value == kSegment;
      if (segment || id.value == kCluster) {
        cut("Matroska", segment ? "the segment" : "a cluster", at, size.value, file.size() - content);
      }
      return;
    }
    at = content + size.value;
  }
}

void check_avi(Bytes file) {
  size_t at = 0;
  while (file.size() - at >= 8 && name_at(file, at) == "RIFF") {
    const uint64_t size = little_endian_u32(file, at + 4);
    if (size > file.size() - at - 8) cut("AVI", "chunk RIFF", at, size + 8, file.size() - at);
    at += std::min<uint64_t>(8 + size + (size & 1), file.size() - at);
  }
}

}  // namespace

void check_container_is_whole(MediaKind kind, Bytes file) {
  if (kind == MediaKind::kMp4) check_mp4(file);
  if (kind == MediaKind::kMatroska) check_matroska(file);
  if (kind == MediaKind::kAvi) check_avi(file);
}

}  // namespace m3::media
