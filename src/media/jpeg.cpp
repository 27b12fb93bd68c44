// JPEG through libjpeg's classic interface, default settings (accurate DCT, fancy upsampling), as Pillow
// uses it. libjpeg goes on after damage with a warning and invented pixels: a warning about the pixel
// data is an error here.
#include <cstdio>  // jpeglib.h needs FILE

#include <jpeglib.h>

#include <jerror.h>

#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <string_view>

#include "base/check.h"
#include "media/decoders.h"

namespace m3::media {
namespace {

constexpr int kExifMarker = JPEG_APP0 + 1;
// A progressive file of a few kilobytes can repeat scans over a large picture for hours; encoders
// write about ten.
constexpr int kMaxScans = 200;

// libjpeg reports errors by longjmp; nothing with a destructor lives between setjmp and its calls.
struct Decompressor {
  jpeg_decompress_struct info = {};
  jpeg_error_mgr errors = {};
  jpeg_progress_mgr progress = {};
  jmp_buf on_error;
  char message[JMSG_LENGTH_MAX] = "";
  bool cut = false;  // the data end before the picture does

  Decompressor();
  ~Decompressor() { jpeg_destroy_decompress(&info); }
};

[[noreturn]] void fail(j_common_ptr info) {
  auto* self = static_cast<Decompressor*>(info->client_data);
  if (self->message[0] == '\0') info->err->format_message(info, self->message);
  longjmp(self->on_error, 1);
}

void on_message(j_common_ptr info, int level) {
  if (level >= 0) return;  // trace
  switch (info->err->msg_code) {
    case JWRN_JFIF_MAJOR:  // unknown version, unknown transform code: the pixels are as declared
    case JWRN_ADOBE_XFORM: return;
    case JWRN_JPEG_EOF:
    case JWRN_HIT_MARKER: static_cast<Decompressor*>(info->client_data)->cut = true; break;
    default: break;
  }
  fail(info);
}

void on_progress(j_common_ptr info) {
  if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number <= kMaxScans) return;
  auto* self = static_cast<Decompressor*>(info->client_data);
  std::snprintf(self->message, sizeof(self->message), "too many scans (limit %d)", kMaxScans);
  fail(info);
}

Decompressor::Decompressor() {
  info.err = jpeg_std_error(&errors);
  errors.error_exit = fail;
  errors.emit_message = on_message;
  errors.output_message = [](j_common_ptr) {};
  info.client_data = this;
}

bool read_header(Decompressor* d, Bytes file) {
  if (setjmp(d->on_error)) return false;
  jpeg_create_decompress(&d->info);
  jpeg_mem_src(&d->info, reinterpret_cast<const unsigned char*>(file.data()), file.size());
  jpeg_save_markers(&d->info, kExifMarker, 0xffff);
  jpeg_read_header(&d->info, TRUE);
  return true;
}

bool start(Decompressor* d) {
  if (setjmp(d->on_error)) return false;
  d->progress.progress_monitor = on_progress;
  d->info.progress = &d->progress;
  const J_COLOR_SPACE space = d->info.jpeg_color_space;
  d->info.out_color_space = space == JCS_CMYK || space == JCS_YCCK ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&d->info);
  return true;
}

bool read_row(Decompressor* d, uint8_t* row) {
  if (setjmp(d->on_error)) return false;
  return jpeg_read_scanlines(&d->info, &row, 1) == 1;
}

bool finish(Decompressor* d) {
  if (setjmp(d->on_error)) return false;
  jpeg_finish_decompress(&d->info);
  return true;
}

int orientation_of(const jpeg_decompress_struct& info) {
  constexpr std::string_view kPrefix("Exif\0\0", 6);
  for (const jpeg_marker_struct* marker = info.marker_list; marker != nullptr; marker = marker->next) {
    const Bytes data(reinterpret_cast<const std::byte*>(marker->data), marker->data_length);
    if (marker->marker != kExifMarker || data.size() < kPrefix.size()) continue;
    if (std::memcmp(data.data(), kPrefix.data(), kPrefix.size()) == 0) return exif_orientation(data.subspan(kPrefix.size()));
  }
  return 1;
}

// 255 - K - round(C (255 - K) / 255), not below 0; with Adobe's marker all four are stored inverted.
void cmyk_to_rgb(const uint8_t* cmyk, int width, bool inverted, uint8_t* rgb) {
  const int flip = inverted ? 0xff : 0;
  for (int x = 0; x < width; ++x, cmyk += 4, rgb += 3) {
    const int white = 255 - (cmyk[3] ^ flip);
    for (int c = 0; c < 3; ++c) rgb[c] = static_cast<uint8_t>(std::max(0, white - scale_255(cmyk[c] ^ flip, white)));
  }
}

[[noreturn]] void refuse(const Decompressor& d) {
  if (d.cut) M3_FAIL("JPEG: the file is truncated or damaged: {}", d.message);
  M3_FAIL("JPEG: {}", d.message);
}

}  // namespace

Decoded decode_jpeg(Bytes file, const MediaLimits& limits) {
  Decompressor d;
  if (!read_header(&d, file)) refuse(d);
  const int height = static_cast<int>(d.info.image_height), width = static_cast<int>(d.info.image_width);
  check_size("JPEG", height, width, limits);
  Decoded out{Image(), orientation_of(d.info)};
  if (!start(&d)) refuse(d);

  out.image = Image(height, width);
  const bool cmyk = d.info.out_color_space == JCS_CMYK;
  std::vector<uint8_t> cmyk_row(cmyk ? static_cast<size_t>(width) * 4 : 0);
  for (int y = 0; y < height; ++y) {
    if (!read_row(&d, cmyk ? cmyk_row.data() : out.image.row(y))) refuse(d);
    if (cmyk) cmyk_to_rgb(cmyk_row.data(), width, d.info.saw_Adobe_marker != 0, out.image.row(y));
  }
  if (!finish(&d)) refuse(d);
  return out;
}

}  // namespace m3::media
