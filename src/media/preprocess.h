// From a file's bytes to what the model takes: patch rows, grid and times.
#pragma once
#include <filesystem>
#include <string>
#include <vector>

#include "media/limits.h"
#include "media/patches.h"
#include "media/resize.h"

namespace m3 {

struct MediaRows {
  Grid grid;
  std::vector<float> rows;           // [grid.num_rows(), 1176]
  int source_height = 0, source_width = 0;
  // Films only; seconds[i] belongs to temporal step i ("%.1f"). Empty where the rate is unknown.
  double source_fps = 0;
  int64_t source_frames = 0;
  std::vector<int64_t> indices;      // kept frames
  std::vector<std::string> seconds;
};

struct ImageOptions {
  PixelBounds bounds = kImageBounds;
  MediaLimits limits;
};

struct VideoOptions {
  double target_fps = 1.0;
  PixelBounds bounds = kVideoBounds;
  MediaLimits limits;
};

MediaRows preprocess_image(const Image& image, PixelBounds bounds = kImageBounds);
MediaRows preprocess_image(std::span<const std::byte> bytes, const ImageOptions& options = {});

// Decodes as a stream; only the kept frames, already resized, stay in memory.
MediaRows preprocess_video(std::span<const std::byte> bytes, const VideoOptions& options = {});

// Frames that are there already (training clips): all are kept. fps 0: unknown, no seconds.
// `indices` are the frames' numbers in their source (empty: 0, 1, 2, ...).
MediaRows preprocess_frames(std::vector<Image> frames, double fps = 0, std::vector<int64_t> indices = {},
                            const VideoOptions& options = {});

// The same for files: the path stands in front of every message.
MediaRows preprocess_image_file(const std::filesystem::path& path, const ImageOptions& options = {});
MediaRows preprocess_video_file(const std::filesystem::path& path, const VideoOptions& options = {});

}  // namespace m3
