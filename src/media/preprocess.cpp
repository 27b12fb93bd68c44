#include "media/preprocess.h"

#include <numeric>

#include "base/check.h"
#include "base/file.h"
#include "media/sampling.h"
#include "media/video.h"

namespace m3 {
namespace {

// Resized frames to rows.
MediaRows rows_of(std::span<const Image> frames) {
  MediaRows out;
  out.grid = patch_grid(static_cast<int64_t>(frames.size()), frames[0].height, frames[0].width);
  out.rows.resize(out.grid.num_rows() * kPatchValues);
  write_patch_rows(frames, out.rows);
  return out;
}

// Kept frames of one film, resized as they come.
class KeptFrames {
 public:
  KeptFrames(int height, int width, const VideoOptions& options)
      : options_(options), size_(smart_resize(height, width, options.bounds)) {}

  void add(const Image& image) {
    const MediaLimits& limits = options_.limits;
    M3_CHECK(static_cast<int64_t>(frames_.size()) < limits.max_sampled_frames,
             "the video has too many frames to keep at {} frames a second: the limit is {}; ask for a lower rate or cut it",
             options_.target_fps, limits.max_sampled_frames);
    frames_.push_back(resize_bicubic(image, size_));
    const int64_t pixels = static_cast<int64_t>(size_.height) * size_.width * static_cast<int64_t>(frames_.size());
    M3_CHECK(pixels <= limits.max_video_pixels,
             "the video has too many pixels: {} frames of {} x {} are kept, the limit is {} pixels in all; ask for a lower "
             "rate or cut it", frames_.size(), size_.height, size_.width, limits.max_video_pixels);
  }
  std::vector<Image>& frames() { return frames_; }

 private:
  const VideoOptions& options_;
  ImageSize size_;
  std::vector<Image> frames_;
};

}  // namespace

MediaRows preprocess_image(const Image& image, PixelBounds bounds) {
  const Image resized = resize_bicubic(image, smart_resize(image.height, image.width, bounds));
  MediaRows out = rows_of({&resized, 1});
  out.source_height = image.height;
  out.source_width = image.width;
  return out;
}

MediaRows preprocess_image(std::span<const std::byte> bytes, const ImageOptions& options) {
  return preprocess_image(decode_image(bytes, options.limits), options.bounds);
}

MediaRows preprocess_video(std::span<const std::byte> bytes, const VideoOptions& options) {
  VideoReader reader(bytes, options.limits);
  KeptFrames kept(reader.height(), reader.width(), options);
  std::vector<int64_t> indices;
  int64_t num_frames = 0, wanted = 0;
  for (; reader.next(); ++num_frames) {
    if (num_frames != wanted) continue;
    kept.add(reader.image());
    indices.push_back(wanted);
    wanted = next_sampled_frame(wanted, reader.fps(), options.target_fps);
  }
  MediaRows out = rows_of(kept.frames());
  out.source_height = reader.height();
  out.source_width = reader.width();
  out.source_fps = reader.fps();
  out.source_frames = num_frames;
  out.seconds = step_seconds(indices, out.source_fps);
  out.indices = std::move(indices);
  return out;
}

MediaRows preprocess_frames(std::vector<Image> frames, double fps, std::vector<int64_t> indices, const VideoOptions& options) {
  M3_CHECK(!frames.empty(), "a video of no frames");
  const int height = frames[0].height, width = frames[0].width;
  if (indices.empty()) {
    indices.resize(frames.size());
    std::iota(indices.begin(), indices.end(), 0);
  }
  M3_CHECK(indices.size() == frames.size(), "{} frame numbers for {} frames", indices.size(), frames.size());
  KeptFrames kept(height, width, options);
  for (size_t i = 0; i < frames.size(); ++i) {
    M3_CHECK(frames[i].height == height && frames[i].width == width, "frame {} has {} x {} pixels, frame 0 {} x {}", i,
             frames[i].height, frames[i].width, height, width);
    kept.add(frames[i]);
    frames[i] = Image();
  }
  MediaRows out = rows_of(kept.frames());
  out.source_height = height;
  out.source_width = width;
  out.source_fps = fps;
  out.source_frames = static_cast<int64_t>(indices.size());
  if (fps > 0) out.seconds = step_seconds(indices, fps);
  out.indices = std::move(indices);
  return out;
}

MediaRows preprocess_image_file(const std::filesystem::path& path, const ImageOptions& options) {
  const MappedFile file(path);
  try {
    return preprocess_image(file.bytes(), options);
  } catch (const Error& error) {
    M3_FAIL("{}: {}", path.string(), error.what());
  }
}

MediaRows preprocess_video_file(const std::filesystem::path& path, const VideoOptions& options) {
  const MappedFile file(path);
  try {
    return preprocess_video(file.bytes(), options);
  } catch (const Error& error) {
    M3_FAIL("{}: {}", path.string(), error.what());
  }
}

}  // namespace m3
