#include "media/sniff.h"

#include <cstdint>
#include <string_view>

namespace m3 {
namespace {

using namespace std::string_view_literals;

std::string_view as_text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// ISO base media files: the major brand, then the compatible ones, tell pictures from films.
MediaKind sniff_ftyp(std::string_view text) {
  const std::string_view brand = text.substr(8, 4);
  if (brand == "avif" || brand == "avis") return MediaKind::kAvif;
  for (std::string_view heif : {"heic"sv, "heix"sv, "hevc"sv, "heim"sv, "heis"sv, "mif1"sv, "msf1"sv}) {
    if (brand == heif) return text.substr(0, 64).find("avif") == text.npos ? MediaKind::kHeic : MediaKind::kAvif;
  }
  return MediaKind::kMp4;
}

bool looks_like_svg(std::string_view text) {
  std::string_view head = text.substr(0, 4096);
  if (head.starts_with("\xEF\xBB\xBF")) head.remove_prefix(3);
  const size_t first = head.find_first_not_of(" \t\r\n");
  if (first == head.npos || head[first] != '<') return false;
  return head.find("<svg") != head.npos;
}

bool looks_like_mpeg_ts(std::string_view text) {
  constexpr size_t kPacket = 188;
  if (text.size() < 3 * kPacket) return false;
  return text[0] == 0x47 && text[kPacket] == 0x47 && text[2 * kPacket] == 0x47;
}

}  // namespace

MediaKind sniff_media(std::span<const std::byte> bytes) {
  if (bytes.empty()) return MediaKind::kEmpty;
  const std::string_view text = as_text(bytes);
  const auto at = [&](size_t offset, std::string_view want) {
    return text.size() >= offset && text.substr(offset, want.size()) == want;
  };

  if (at(0, "\xFF\xD8\xFF"sv)) return MediaKind::kJpeg;
  if (at(0, "\x89PNG\r\n\x1A\n"sv)) return MediaKind::kPng;
  if (at(0, "RIFF"sv) && at(8, "WEBP"sv)) return MediaKind::kWebp;
  if (at(0, "GIF87a"sv) || at(0, "GIF89a"sv)) return MediaKind::kGif;

  if (at(4, "ftyp"sv)) return sniff_ftyp(text);
  for (std::string_view box : {"moov"sv, "mdat"sv, "wide"sv, "free"sv, "skip"sv}) {
    if (at(4, box)) return MediaKind::kMp4;  // QuickTime files may lack ftyp
  }
  if (at(0, "\x1A\x45\xDF\xA3"sv)) return MediaKind::kMatroska;
  if (at(0, "RIFF"sv) && at(8, "AVI "sv)) return MediaKind::kAvi;
  if (at(0, "\0\0\1\xBA"sv) || at(0, "\0\0\1\xB3"sv)) return MediaKind::kMpeg;
  if (at(0, "OggS"sv)) return MediaKind::kOgg;
  if (at(0, "FLV\1"sv)) return MediaKind::kFlv;
  if (looks_like_mpeg_ts(text)) return MediaKind::kMpegTs;

  if (at(0, "II*\0"sv) || at(0, "MM\0*"sv) || at(0, "II+\0"sv) || at(0, "MM\0+"sv)) return MediaKind::kTiff;
  if (at(0, "BM"sv) && at(6, "\0\0\0\0"sv)) return MediaKind::kBmp;
  if (at(0, "\0\0\1\0"sv)) return MediaKind::kIco;
  if (at(0, "%PDF-"sv)) return MediaKind::kPdf;
  if (at(0, "\xFF\x0A"sv) || at(0, "\0\0\0\x0CJXL "sv)) return MediaKind::kJxl;
  if (looks_like_svg(text)) return MediaKind::kSvg;
  return MediaKind::kUnknown;
}

const char* media_kind_name(MediaKind kind) {
  switch (kind) {
    case MediaKind::kEmpty: return "empty";
    case MediaKind::kUnknown: return "unknown";
    case MediaKind::kJpeg: return "JPEG";
    case MediaKind::kPng: return "PNG";
    case MediaKind::kWebp: return "WebP";
    case MediaKind::kGif: return "GIF";
    case MediaKind::kTiff: return "TIFF";
    case MediaKind::kBmp: return "BMP";
    case MediaKind::kSvg: return "SVG";
    case MediaKind::kAvif: return "AVIF";
    case MediaKind::kHeic: return "HEIC";
    case MediaKind::kIco: return "ICO";
    case MediaKind::kPdf: return "PDF";
    case MediaKind::kJxl: return "JPEG XL";
    case MediaKind::kMp4: return "MP4";
    case MediaKind::kMatroska: return "Matroska/WebM";
    case MediaKind::kAvi: return "AVI";
    case MediaKind::kMpeg: return "MPEG";
    case MediaKind::kMpegTs: return "MPEG-TS";
    case MediaKind::kOgg: return "Ogg";
    case MediaKind::kFlv: return "FLV";
  }
  return "?";
}

bool is_picture(MediaKind kind) {
  return kind == MediaKind::kJpeg || kind == MediaKind::kPng || kind == MediaKind::kWebp || kind == MediaKind::kGif;
}

bool is_film(MediaKind kind) { return kind >= MediaKind::kMp4; }

}  // namespace m3
