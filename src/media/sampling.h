// Which frames of a film are kept, and the times written before them (model.md §9, §13).
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace m3 {

// Constant interval: keep frame 0, then repeatedly the first frame at least 1 / target_fps later
// (less 1e-4 s), at least one further on. The last frame is not appended.
// The frame kept after `previous`; it may lie beyond the end of the film.
int64_t next_sampled_frame(int64_t previous, double source_fps, double target_fps);
std::vector<int64_t> sample_frames(int64_t num_frames, double source_fps, double target_fps);

// Seconds of each temporal step (two kept frames), "%.1f" of index / fps: "0.0", "2.1", ...
std::vector<std::string> step_seconds(std::span<const int64_t> indices, double source_fps);

}  // namespace m3
