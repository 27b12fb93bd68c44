// The first frame of a GIF (GIF89a specification, CompuServe 1990). Later frames are not looked at.
#include <algorithm>
#include <array>

#include "base/check.h"
#include "media/decoders.h"

namespace m3::media {
namespace {

class Reader {
 public:
  explicit Reader(Bytes file) : file_(file) {}
  uint32_t u8() {
    need(1);
    return byte_at(file_, at_++);
  }
  uint32_t u16() {
    need(2);
    at_ += 2;
    return little_endian_u16(file_, at_ - 2);
  }
  Bytes take(size_t count) {
    need(count);
    at_ += count;
    return file_.subspan(at_ - count, count);
  }
  // Data sub-blocks: a length, that many bytes, until a length of 0.
  void skip_blocks() {
    while (const uint32_t length = u8()) take(length);
  }
  size_t at() const { return at_; }

 private:
  void need(size_t count) const {
    M3_CHECK(file_.size() - at_ >= count, "GIF: the file is truncated: it ends at byte {} before the first picture does",
             file_.size());
  }
  Bytes file_;
  size_t at_ = 0;
};

// Codes of 2 to 12 bits, least significant bit first, from the data sub-blocks.
class CodeReader {
 public:
  explicit CodeReader(Reader& reader) : reader_(reader) {}
  uint32_t next(int width) {
    while (num_bits_ < width) {
      bits_ |= next_byte() << num_bits_;
      num_bits_ += 8;
    }
    const uint32_t code = bits_ & ((1u << width) - 1);
    bits_ >>= width;
    num_bits_ -= width;
    return code;
  }

 private:
  uint32_t next_byte() {
    if (at_ == block_.size()) {
      const uint32_t length = reader_.u8();
      M3_CHECK(length > 0, "GIF: the pixel data end early: the file is truncated or damaged");
      block_ = reader_.take(length);
      at_ = 0;
    }
    return byte_at(block_, at_++);
  }
  Reader& reader_;
  Bytes block_;
  size_t at_ = 0;
  uint32_t bits_ = 0;
  int num_bits_ = 0;
};

constexpr int kMaxCodeBits = 12, kTableSize = 1 << kMaxCodeBits;

// LZW with a growing code width; fills all of `pixels` or throws.
void decompress(Reader& reader, std::span<uint8_t> pixels) {
  const int min_bits = static_cast<int>(reader.u8());
  M3_CHECK(min_bits >= 1 && min_bits <= 8, "GIF: damaged: code size {} (1 to 8 are possible)", min_bits);
  const uint32_t clear = 1u << min_bits, end = clear + 1;
  // An entry is the string of `prefix` and one byte more.
  std::array<uint16_t, kTableSize> prefix;
  std::array<uint8_t, kTableSize> last, first;
  std::array<uint16_t, kTableSize> length;
  for (uint32_t c = 0; c < clear; ++c) {
    first[c] = last[c] = static_cast<uint8_t>(c);
    length[c] = 1;
  }

  CodeReader codes(reader);
  uint32_t next = end + 1, previous = clear;  // `clear`: no previous code
  int width = min_bits + 1;
  size_t done = 0;
  while (done < pixels.size()) {
    const uint32_t code = codes.next(width);
    if (code == clear) {
      next = end + 1;
      width = min_bits + 1;
      previous = clear;
      continue;
    }
    M3_CHECK(code != end, "GIF: the pixel data end early ({} of {} pixels): the file is truncated or damaged", done,
             pixels.size());
    const bool is_new = code == next && previous != clear;  // the string about to be entered
    M3_CHECK(is_new || (code < next && code != end), "GIF: damaged: code {} at byte {} is not defined yet", code, reader.at());
    if (previous != clear && next < kTableSize) {
      prefix[next] = static_cast<uint16_t>(previous);
      first[next] = first[previous];
      last[next] = is_new ? first[previous] : first[code];
      length[next] = static_cast<uint16_t>(length[previous] + 1);
      ++next;
      if (next == (1u << width) && width < kMaxCodeBits) ++width;
    }
    // Written from its end; what reaches beyond the picture is dropped.
    uint32_t at = code;
    for (size_t k = length[code]; k-- > 0;) {
      if (done + k < pixels.size()) pixels[done + k] = last[at];
      if (k > 0) at = prefix[at];
    }
    done = std::min(done + length[code], pixels.size());
    previous = code;
  }
}

struct Palette {
  std::array<std::array<uint8_t, 3>, 256> rgb;
  size_t size = 0;

  void read(Reader& reader, uint32_t flags) {
    size = size_t{2} << (flags & 7);
    const Bytes data = reader.take(3 * size);
    for (size_t i = 0; i < 3 * size; ++i) rgb[i / 3][i % 3] = static_cast<uint8_t>(data[i]);
  }
};

constexpr uint32_t kHasPalette = 0x80, kInterlaced = 0x40;

// Skips extensions up to the first picture; notes the transparent index of its graphic control.
int find_picture(Reader& reader) {
  int transparent = -1;
  for (;;) {
    const uint32_t kind = reader.u8();
    if (kind == 0x2c) return transparent;
    M3_CHECK(kind != 0x3b, "GIF: no image in the file: it ends before the first frame");
    M3_CHECK(kind == 0x21, "GIF: damaged: unknown block {:#x} at byte {}", kind, reader.at() - 1);
    if (reader.u8() == 0xf9) {
      const Bytes control = reader.take(reader.u8());
      if (control.size() >= 4) transparent = byte_at(control, 0) & 1 ? static_cast<int>(byte_at(control, 3)) : -1;
    }
    reader.skip_blocks();
  }
}

// Row of the picture that is stored as the i-th one.
std::vector<int> row_order(int height, bool interlaced) {
  std::vector<int> order;
  order.reserve(height);
  if (!interlaced) {
    for (int y = 0; y < height; ++y) order.push_back(y);
  } else {
    struct Pass {
      int first, step;
    };
    for (const Pass pass : {Pass{0, 8}, Pass{4, 8}, Pass{2, 4}, Pass{1, 2}}) {
      for (int y = pass.first; y < height; y += pass.step) order.push_back(y);
    }
  }
  return order;
}

}  // namespace

Decoded decode_gif(Bytes file, const MediaLimits& limits) {
  Reader reader(file);
  reader.take(6);  // signature
  const int screen_width = static_cast<int>(reader.u16()), screen_height = static_cast<int>(reader.u16());
  const uint32_t screen_flags = reader.u8();
  reader.take(2);  // background, pixel aspect: unused
  check_size("GIF", screen_height, screen_width, limits);
  Palette palette;
  if (screen_flags & kHasPalette) palette.read(reader, screen_flags);

  const int transparent = find_picture(reader);
  const int left = static_cast<int>(reader.u16()), top = static_cast<int>(reader.u16());
  const int width = static_cast<int>(reader.u16()), height = static_cast<int>(reader.u16());
  const uint32_t flags = reader.u8();
  if (flags & kHasPalette) palette.read(reader, flags);
  check_size("GIF", height, width, limits);
  // A frame that reaches over the screen widens it, as in Pillow.
  const int full_height = std::max(screen_height, top + height), full_width = std::max(screen_width, left + width);
  check_size("GIF", full_height, full_width, limits);
  if (palette.size == 0) {  // no palette at all: shades of grey
    palette.size = 256;
    for (int i = 0; i < 256; ++i) palette.rgb[i].fill(static_cast<uint8_t>(i));
  }
  if (transparent >= 0) {
    palette.size = std::max<size_t>(palette.size, transparent + 1);
    palette.rgb[transparent].fill(255);
  }

  std::vector<uint8_t> pixels(static_cast<size_t>(height) * width);
  decompress(reader, pixels);
  const uint8_t highest = *std::max_element(pixels.begin(), pixels.end());
  M3_CHECK(highest < palette.size, "GIF: damaged: a pixel has colour {} of a palette of {}", highest, palette.size);

  // What the frame leaves free is transparent, or colour 0 where nothing is.
  Decoded out{Image(full_height, full_width)};
  if (full_height != height || full_width != width) {
    const auto ground = palette.rgb[transparent >= 0 ? transparent : 0];
    for (size_t i = 0; i < out.image.rgb_HW3.size(); ++i) out.image.rgb_HW3[i] = ground[i % 3];
  }
  const std::vector<int> order = row_order(height, flags & kInterlaced);
  for (int i = 0; i < height; ++i) {
    const uint8_t* in = pixels.data() + static_cast<size_t>(i) * width;
    uint8_t* row = out.image.row(top + order[i]) + 3 * left;
    for (int x = 0; x < width; ++x) std::copy_n(palette.rgb[in[x]].data(), 3, row + 3 * x);
  }
  return out;
}

}  // namespace m3::media
