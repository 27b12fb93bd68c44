// A training document: text, pictures and clips in their order (training.md §4, §5), and its form as a JSON
// member of a shard followed by its media members.
//
//   000042.json   {"id": "...", "source": "...", "licence": "...", "lang": "en", "item": "...",
//                  "segments": [{"type": "text", "text": "...", "weight": 0, "markers": true},
//                               {"type": "image", "file": "000042.1.png", "w": 640, "h": 480},
//                               {"type": "video", "files": ["000042.2.000.png", ...], "w": 84, "h": 84,
//                                "fps": 8.0, "frames": [0, 2, 4]}]}
//
// Two fields of text carry the masking rules: `weight` of its tokens as targets (absent: 1; 0: input only) and
// `markers`: the text holds protocol markers, which become added tokens (absent: they are ordinary text).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "media/image.h"
#include "text/json_value.h"

namespace m3::data {

// A picture as a file's bytes (`type` png, jpg, webp or gif), as pixels, or both.
struct Picture {
  std::string bytes, type;
  Image pixels;
  int height = 0, width = 0;  // as shown

  static Picture of(Image pixels);
  static Picture of_file(std::string bytes, const MediaLimits& limits = {});  // decodes to know the size; drops the pixels
  Image decode(const MediaLimits& limits = {}) const;
};

struct Segment {
  enum class Kind { kText, kImage, kVideo };
  Kind kind = Kind::kText;

  std::string text;      // kText
  float weight = 1;
  bool markers = false;

  std::vector<Picture> pictures;  // one for kImage; the kept frames, all of one size, for kVideo
  double fps = 0;                 // kVideo: rate of the source, 0: unknown, no timestamps
  std::vector<int64_t> frames;    // kVideo: numbers of the kept frames in the source

  static Segment of_text(std::string text, float weight = 1, bool markers = false);
  static Segment of_image(Picture picture);
  static Segment of_video(std::vector<Picture> pictures, double fps, std::vector<int64_t> frames);
};

struct Document {
  std::string id, source, licence, lang;
  std::string item;  // identity for splits: all documents of one item lie in one split (empty: the id)
  std::vector<Segment> segments;
};

struct DocumentCounts {
  int64_t documents = 0, text_bytes = 0, images = 0, videos = 0, frames = 0;
  void add(const Document& document);
  void add(const DocumentCounts& other);
  bool operator==(const DocumentCounts&) const = default;
};

// A member of a shard: its name, and its bytes.
struct Member {
  std::string name, bytes;
};

// `key` is the members' common name. Pictures that are pixels only are written as PNG.
std::vector<Member> to_members(const Document& document, const std::string& key);

// The inverse; pictures stay encoded. Throws Error naming the member and what is wrong: a missing or extra
// member, JSON of another form, an empty document.
Document from_members(const std::vector<Member>& members);

}  // namespace m3::data
