#include "media/sampling.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "media/patches.h"

namespace m3 {

int64_t next_sampled_frame(int64_t previous, double source_fps, double target_fps) {
  M3_CHECK(source_fps > 0 && target_fps > 0 && std::isfinite(source_fps) && std::isfinite(target_fps),
           "frame rates must be positive, got {} (source) and {} (target)", source_fps, target_fps);
  const double earliest = std::ceil((static_cast<double>(previous) / source_fps + 1.0 / target_fps - 1e-4) * source_fps);
  constexpr double kBeyondAnyFilm = 0x1p62;
  return std::max(static_cast<int64_t>(std::min(earliest, kBeyondAnyFilm)), previous + 1);
}

std::vector<int64_t> sample_frames(int64_t num_frames, double source_fps, double target_fps) {
  std::vector<int64_t> kept;
  for (int64_t n = 0; n < num_frames; n = next_sampled_frame(n, source_fps, target_fps)) kept.push_back(n);
  return kept;
}

std::vector<std::string> step_seconds(std::span<const int64_t> indices, double source_fps) {
  M3_CHECK(source_fps > 0, "the frame rate must be positive, got {}", source_fps);
  std::vector<std::string> seconds;
  for (size_t i = 0; i < indices.size(); i += kTemporalPatch) {
    // fmt rounds the exact value of the double, ties to even, like printf.
    seconds.push_back(fmt::format("{:.1f}", static_cast<double>(indices[i]) / source_fps));
  }
  return seconds;
}

}  // namespace m3
