// PNG through libpng. The file's chunks are walked here first: lengths and checksums of the chunks that
// make the pixels (IHDR, PLTE, tRNS, IDAT) are checked, and only those reach libpng. So damage in a
// comment or after the picture does no harm, compressed text and profiles are never unpacked, and
// every message says where the damage is.
#include <png.h>
#include <zlib.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "media/decoders.h"

namespace m3 {
namespace media {
namespace {

constexpr size_t kSignatureBytes = 8, kHeaderBytes = 13;

struct Chunk {
  std::string_view type;
  Bytes whole;  // length, type, data, checksum
  Bytes data() const { return whole.subspan(8, whole.size() - 12); }
};

// What libpng shall see, in file order, and what is read here.
struct Chunks {
  std::vector<Bytes> stream;
  bool has_palette = false;
  int orientation = 1;
};

// The chunk at `at`. Only its frame is checked; its content may be cut where the file ends.
Chunk read_chunk(Bytes file, size_t at) {
  M3_CHECK(file.size() - at >= 12, "PNG: the file is truncated: it ends at byte {} inside a chunk header", file.size());
  const uint64_t length = big_endian_u32(file, at);
  const std::string_view type(reinterpret_cast<const char*>(file.data()) + at + 4, 4);
  const bool is_name = std::all_of(type.begin(), type.end(), [](unsigned char c) { return std::isalpha(c); });
  M3_CHECK(is_name, "PNG: damaged: no chunk name at byte {}", at + 4);
  M3_CHECK(length + 12 <= file.size() - at, "PNG: the file is truncated: chunk {} at byte {} needs {} bytes, {} are left",
           type, at, length + 12, file.size() - at);
  return {type, file.subspan(at, length + 12)};
}

bool crc_is_right(const Chunk& chunk) {
  const auto* start = reinterpret_cast<const Bytef*>(chunk.whole.data()) + 4;
  return crc32(0, start, static_cast<uInt>(chunk.whole.size() - 8)) == big_endian_u32(chunk.whole, chunk.whole.size() - 4);
}

void check_crc(const Chunk& chunk, size_t at) {
  M3_CHECK(crc_is_right(chunk), "PNG: chunk {} at byte {} is damaged (wrong CRC checksum)", chunk.type, at);
}

Chunks walk_chunks(Bytes file) {
  Chunks chunks;
  bool in_pixels = false;
  for (size_t at = kSignatureBytes;;) {
    // After the first run of IDAT chunks every pixel is there; what follows does not matter.
    if (in_pixels && file.size() - at < 12) break;
    const Chunk chunk = read_chunk(file, at);
    if (in_pixels && chunk.type != "IDAT") break;
    const bool critical = !(chunk.type[0] & 0x20);
    if (chunk.type == "IHDR" || chunk.type == "PLTE" || chunk.type == "IDAT" || chunk.type == "tRNS") {
      check_crc(chunk, at);
      chunks.stream.push_back(chunk.whole);
      chunks.has_palette |= chunk.type == "PLTE";
      in_pixels = chunk.type == "IDAT";
    } else if (chunk.type == "eXIf") {
      if (crc_is_right(chunk)) chunks.orientation = exif_orientation(chunk.data());
    } else {
      M3_CHECK(chunk.type != "IEND", "PNG: no image data before the end (chunk IDAT is missing): the file is damaged");
      M3_CHECK(!critical, "PNG: chunk {} at byte {} is not supported (or damaged)", chunk.type, at);
    }
    at += chunk.whole.size();
  }
  return chunks;
}

void check_header(Bytes file, const MediaLimits& limits) {
  const Chunk header = read_chunk(file, kSignatureBytes);
  M3_CHECK(header.type == "IHDR" && header.data().size() == kHeaderBytes, "PNG: damaged: the first chunk is {}, not IHDR",
           header.type);
  check_crc(header, kSignatureBytes);
  const Bytes data = header.data();
  check_size("PNG", big_endian_u32(data, 4), big_endian_u32(data, 0), limits);
  constexpr uint32_t kMaxSide = 0x7fffffff;
  M3_CHECK(big_endian_u32(data, 0) <= kMaxSide && big_endian_u32(data, 4) <= kMaxSide, "PNG: invalid size");
  const uint32_t colour_type = byte_at(data, 9);
  M3_CHECK(colour_type <= 6 && colour_type != 1 && colour_type != 5, "PNG: invalid colour type {} in the header", colour_type);
}

// libpng reports errors by longjmp; nothing with a destructor lives between setjmp and its calls.
struct Source {
  const std::vector<Bytes>* stream;
  size_t idx = 0, offset = 0;
  jmp_buf on_error;
  char message[128] = "";
};

[[noreturn]] void fail(png_structp png, png_const_charp text) {
  auto* source = static_cast<Source*>(png_get_error_ptr(png));
  std::strncpy(source->message, text, sizeof(source->message) - 1);
  longjmp(source->on_error, 1);
}

void ignore_warning(png_structp, png_const_charp) {}

void read_stream(png_structp png, png_bytep out, size_t count) {
  auto* source = static_cast<Source*>(png_get_io_ptr(png));
  while (count > 0) {
    if (source->idx == source->stream->size()) png_error(png, "the pixel data end early");
    const Bytes part = (*source->stream)[source->idx];
    const size_t take = std::min(count, part.size() - source->offset);
    std::memcpy(out, part.data() + source->offset, take);
    out += take;
    count -= take;
    source->offset += take;
    if (source->offset == part.size()) {
      ++source->idx;
      source->offset = 0;
    }
  }
}

// Up to the first pixel, with every transformation set; gives size and channels (1: palette indices).
struct Layout {
  int height = 0, width = 0, channels = 0;
};

bool read_info(png_structp png, png_infop info, Source* source, Layout* layout) {
  if (setjmp(source->on_error)) return false;
  png_set_sig_bytes(png, kSignatureBytes);
  png_set_read_fn(png, source, read_stream);
  png_set_user_limits(png, 0x7fffffff, 0x7fffffff);  // the size is checked already
  png_read_info(png, info);
  if (png_get_color_type(png, info) == PNG_COLOR_TYPE_PALETTE) {
    png_set_packing(png);  // one index a byte
  } else {
    png_set_expand(png);    // 1, 2, 4 bits to 8 bits, tRNS to alpha
    png_set_strip_16(png);  // the high byte
    png_set_gray_to_rgb(png);
  }
  png_set_interlace_handling(png);
  png_read_update_info(png, info);
  layout->height = static_cast<int>(png_get_image_height(png, info));
  layout->width = static_cast<int>(png_get_image_width(png, info));
  layout->channels = png_get_channels(png, info);
  return true;
}

bool read_pixels(png_structp png, Source* source, png_bytepp rows) {
  if (setjmp(source->on_error)) return false;
  png_read_image(png, rows);
  return true;
}

// Indices to colours, the palette's transparency composed over white.
std::vector<uint8_t> apply_palette(png_structp png, png_infop info, const std::vector<uint8_t>& indices) {
  png_colorp palette = nullptr;
  png_bytep alpha = nullptr;
  int size = 0, num_alpha = 0;
  png_get_PLTE(png, info, &palette, &size);
  png_get_tRNS(png, info, &alpha, &num_alpha, nullptr);
  std::vector<uint8_t> rgb(3 * indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    const int index = indices[i];
    M3_CHECK(index < size, "PNG: damaged: a pixel has colour {} of a palette of {}", index, size);
    const int coverage = index < num_alpha ? alpha[index] : 255;
    rgb[3 * i] = over_white(palette[index].red, coverage);
    rgb[3 * i + 1] = over_white(palette[index].green, coverage);
    rgb[3 * i + 2] = over_white(palette[index].blue, coverage);
  }
  return rgb;
}

// RGBA to RGB in place: pixel i is written behind every pixel still to be read.
void compose_over_white(std::vector<uint8_t>& pixels, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const int alpha = pixels[4 * i + 3];
    for (int c = 0; c < 3; ++c) pixels[3 * i + c] = over_white(pixels[4 * i + c], alpha);
  }
  pixels.resize(3 * count);
}

struct PngReader {
  png_structp png = nullptr;
  png_infop info = nullptr;
  explicit PngReader(Source* source) {
    png = png_create_read_struct(PNG_LIBPNG_VER_STRING, source, fail, ignore_warning);
    if (png != nullptr) info = png_create_info_struct(png);
  }
  ~PngReader() { png_destroy_read_struct(&png, &info, nullptr); }
};

}  // namespace

Decoded decode_png(Bytes file, const MediaLimits& limits) {
  check_header(file, limits);
  const Chunks chunks = walk_chunks(file);
  constexpr size_t kColourTypeAt = kSignatureBytes + 8 + 9;
  M3_CHECK(byte_at(file, kColourTypeAt) != 3 || chunks.has_palette, "PNG: the palette (chunk PLTE) is missing");

  Source source{.stream = &chunks.stream};
  PngReader reader(&source);
  M3_CHECK(reader.info != nullptr, "PNG: libpng could not be started (out of memory?)");
  Layout layout;
  M3_CHECK(read_info(reader.png, reader.info, &source, &layout), "PNG: invalid or damaged: {}", source.message);

  Decoded out{Image(), chunks.orientation};
  out.image.height = layout.height;
  out.image.width = layout.width;
  std::vector<uint8_t>& pixels = out.image.rgb_HW3;
  const size_t row_bytes = static_cast<size_t>(layout.width) * layout.channels;
  pixels.resize(row_bytes * layout.height);
  std::vector<png_bytep> rows(layout.height);
  for (int y = 0; y < layout.height; ++y) rows[y] = pixels.data() + y * row_bytes;
  M3_CHECK(read_pixels(reader.png, &source, rows.data()), "PNG: the pixel data are truncated or damaged: {}", source.message);
  switch (layout.channels) {
    case 1: pixels = apply_palette(reader.png, reader.info, pixels); break;
    case 3: break;
    case 4: compose_over_white(pixels, static_cast<size_t>(layout.height) * layout.width); break;
    default: M3_FAIL("PNG: {} channels are not supported", layout.channels);
  }
  return out;
}

}  // namespace media

namespace {

void append_bytes(png_structp png, png_bytep data, size_t count) {
  auto* out = static_cast<std::vector<std::byte>*>(png_get_io_ptr(png));
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  out->insert(out->end(), bytes, bytes + count);
}

bool write_png(png_structp png, png_infop info, const Image& image, std::vector<std::byte>* out) {
  if (setjmp(png_jmpbuf(png))) return false;
  png_set_write_fn(png, out, append_bytes, nullptr);
  png_set_IHDR(png, info, image.width, image.height, 8, PNG_COLOR_TYPE_RGB, PNG_INTERLACE_NONE, PNG_COMPRESSION_TYPE_DEFAULT,
               PNG_FILTER_TYPE_DEFAULT);
  png_write_info(png, info);
  for (int y = 0; y < image.height; ++y) png_write_row(png, image.row(y));
  png_write_end(png, info);
  return true;
}

}  // namespace

std::vector<std::byte> encode_png(const Image& image) {
  M3_CHECK(image.height > 0 && image.width > 0, "a picture of {} x {} pixels cannot be written as PNG", image.height,
           image.width);
  std::vector<std::byte> out;
  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png != nullptr ? png_create_info_struct(png) : nullptr;
  const bool written = info != nullptr && write_png(png, info, image, &out);
  png_destroy_write_struct(&png, &info);
  M3_CHECK(written, "writing a PNG of {} x {} pixels failed", image.height, image.width);
  return out;
}

}  // namespace m3
