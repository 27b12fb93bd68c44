// What a file is, by its first bytes.
#pragma once
#include <cstddef>
#include <span>

namespace m3 {

enum class MediaKind {
  kEmpty, kUnknown,
  kJpeg, kPng, kWebp, kGif,                           // pictures that we read
  kTiff, kBmp, kSvg, kAvif, kHeic, kIco, kPdf, kJxl,  // refused by name
  kMp4, kMatroska, kAvi, kMpeg, kMpegTs, kOgg, kFlv,  // films (MP4 includes MOV, Matroska includes WebM)
};

MediaKind sniff_media(std::span<const std::byte> bytes);
const char* media_kind_name(MediaKind kind);  // "JPEG", "MP4", ...
bool is_picture(MediaKind kind);              // one that decode_image reads
bool is_film(MediaKind kind);                 // one that VideoReader reads

}  // namespace m3
