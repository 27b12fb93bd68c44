// Media placeholders of a prompt (model.md §9): one mark per image or video becomes as many
// placeholder tokens as the vision tower gives rows.
#pragma once
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

struct ImageSpan {
  int64_t num_tokens = 0;  // h * w / 4 of the patch grid
};

struct VideoSpan {
  int64_t num_steps = 0;        // temporal steps, grid t
  int64_t tokens_per_step = 0;  // h * w / 4
  std::vector<double> seconds;  // time of each step; empty: unknown, no timestamps are written
};

// Replaces the marks from left to right in one pass. Throws Error naming both counts ("image",
// "video") when marks and media do not match.
std::string expand_placeholders(std::string_view prompt, std::span<const ImageSpan> images,
                                std::span<const VideoSpan> videos);

// "]<]12.5 seconds[>[": ordinary text, one decimal, correctly rounded from the double.
std::string timestamp_text(double seconds);

}  // namespace m3
