// Films: frames in presentation order through FFmpeg. Without it (M3_VIDEO=OFF or absent at configure
// time) the constructor throws and names the option and the package.
//
// Rules (model.md §13): frames count as shown (edit lists applied); the rate is the container's
// average frame rate; the display matrix is applied; colours follow the stream's tags (BT.601 limited
// range where there are none) with accurate rounding. A film loads only if every frame that it shows
// decodes: damage, a cut file, a change of size and limits throw m3::Error (text without a file name).
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "media/image.h"
#include "media/limits.h"

namespace m3 {

// Streams one film; holds one frame at a time. `bytes` must outlive the reader (a MappedFile serves).
// Not thread-safe; several readers may run at once.
class VideoReader {
 public:
  explicit VideoReader(std::span<const std::byte> bytes, const MediaLimits& limits = {});
  ~VideoReader();
  VideoReader(VideoReader&&) noexcept;

  int height() const;  // as displayed
  int width() const;
  double fps() const;
  // Decodes the next frame; false after the last one. Only then is the whole film known to be sound.
  bool next();
  Image image() const;  // the frame of the last next(), as displayed

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

bool video_supported();  // built with FFmpeg

}  // namespace m3
