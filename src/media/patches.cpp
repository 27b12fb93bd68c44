#include "media/patches.h"

#include <algorithm>
#include <array>

#include "base/check.h"
#include "base/threads.h"
#include "media/resize.h"

namespace m3 {
namespace {

constexpr int kChannelValues = kTemporalPatch * kPatchSize * kPatchSize;  // 392

// (v / 255 - mean) / std of every byte and channel, in fp32 in this order.
struct Normalised {
  std::array<std::array<float, 256>, 3> value;
  Normalised() {
    constexpr float kMean[3] = {0.48145466f, 0.4578275f, 0.40821073f};
    constexpr float kStd[3] = {0.26862954f, 0.26130258f, 0.27577711f};
    for (int c = 0; c < 3; ++c) {
      for (int v = 0; v < 256; ++v) value[c][v] = (static_cast<float>(v) / 255.0f - kMean[c]) / kStd[c];
    }
  }
};

// The patch whose corner is (y0, x0), of the two frames, to one row.
void write_row(const Normalised& table, const Image* const pair[kTemporalPatch], int y0, int x0, float* row) {
  for (int frame = 0; frame < kTemporalPatch; ++frame) {
    for (int y = 0; y < kPatchSize; ++y) {
      const uint8_t* in = pair[frame]->row(y0 + y) + 3 * x0;
      float* out = row + (frame * kPatchSize + y) * kPatchSize;
      for (int c = 0; c < 3; ++c) {
        for (int x = 0; x < kPatchSize; ++x) out[c * kChannelValues + x] = table.value[c][in[3 * x + c]];
      }
    }
  }
}

}  // namespace

Grid patch_grid(int64_t num_frames, int height, int width) {
  M3_CHECK(num_frames > 0, "patches of no frame");
  M3_CHECK(height > 0 && width > 0 && height % kResizeFactor == 0 && width % kResizeFactor == 0,
           "patches need sides that are multiples of {}, got {} x {} (resize first)", kResizeFactor, height, width);
  return {(num_frames + kTemporalPatch - 1) / kTemporalPatch, height / kPatchSize, width / kPatchSize};
}

void write_patch_rows(std::span<const Image> frames, std::span<float> rows) {
  M3_CHECK(!frames.empty(), "patches of no frame");
  const int height = frames[0].height, width = frames[0].width;
  for (size_t i = 1; i < frames.size(); ++i) {
    M3_CHECK(frames[i].height == height && frames[i].width == width, "frame {} has {} x {} pixels, frame 0 {} x {}", i,
             frames[i].height, frames[i].width, height, width);
  }
  const int64_t num_frames = static_cast<int64_t>(frames.size());
  const Grid grid = patch_grid(num_frames, height, width);
  M3_CHECK(static_cast<int64_t>(rows.size()) == grid.num_rows() * kPatchValues,
           "patch rows need room for {} x {} values, got {}", grid.num_rows(), kPatchValues, rows.size());

  static const Normalised table;
  const int64_t block_rows = grid.h / kMergeSize;
  const int64_t block_row_values = kMergeSize * grid.w * kPatchValues;
  parallel_for(grid.t * block_rows, [&](int64_t begin, int64_t end) {
    for (int64_t job = begin; job < end; ++job) {
      const int64_t step = job / block_rows, block_y = job % block_rows;
      const Image* pair[kTemporalPatch];
      for (int64_t k = 0; k < kTemporalPatch; ++k) {
        pair[k] = &frames[std::min(step * kTemporalPatch + k, num_frames - 1)];
      }
      float* row = rows.data() + job * block_row_values;
      for (int64_t block_x = 0; block_x < grid.w / kMergeSize; ++block_x) {
        for (int patch = 0; patch < kMergeSize * kMergeSize; ++patch, row += kPatchValues) {
          const int y = static_cast<int>(block_y) * kMergeSize + patch / kMergeSize;
          const int x = static_cast<int>(block_x) * kMergeSize + patch % kMergeSize;
          write_row(table, pair, y * kPatchSize, x * kPatchSize, row);
        }
      }
    }
  });
}

}  // namespace m3
