// The one EXIF field that matters here: orientation (TIFF tag 0x0112 of the first directory).
#include "media/decoders.h"

namespace m3::media {

int exif_orientation(Bytes tiff) {
  if (tiff.size() < 8) return 1;
  const bool little = byte_at(tiff, 0) == 'I' && byte_at(tiff, 1) == 'I';
  if (!little && !(byte_at(tiff, 0) == 'M' && byte_at(tiff, 1) == 'M')) return 1;
  const auto u16 = [&](size_t at) {
    return little ? little_endian_u16(tiff, at) : byte_at(tiff, at) << 8 | byte_at(tiff, at + 1);
  };
  const auto u32 = [&](size_t at) { return little ? little_endian_u32(tiff, at) : big_endian_u32(tiff, at); };
  if (u16(2) != 42) return 1;

  const size_t directory = u32(4);
  if (directory > tiff.size() - 2) return 1;
  const size_t count = u16(directory);
  constexpr size_t kEntryBytes = 12;
  constexpr uint32_t kOrientation = 0x0112, kShort = 3;
  for (size_t i = 0; i < count; ++i) {
    const size_t entry = directory + 2 + i * kEntryBytes;
    if (entry + kEntryBytes > tiff.size()) return 1;
    if (u16(entry) != kOrientation) continue;
    const uint32_t value = u16(entry + 8);
    return u16(entry + 2) == kShort && value >= 1 && value <= 8 ? static_cast<int>(value) : 1;
  }
  return 1;
}

}  // namespace m3::media
