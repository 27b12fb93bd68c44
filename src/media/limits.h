// What a picture or a film may cost. Checked against the sizes a file declares, before memory is
// taken, and again against what it really holds; a message names the limit that was passed.
#pragma once
#include <cstdint>

namespace m3 {

struct MediaLimits {
  int64_t max_file_bytes = int64_t{512} << 20;
  // Width x height of a picture or of one frame. 100 million pixels are 300 MB of RGB; the largest
  // phone cameras make 50 to 108 million, and 12 are usual.
  int64_t max_pixels = 100'000'000;
  // Frames in the source, used or not: all are decoded. Two hours at 30 frames a second.
  int64_t max_source_frames = 216'000;
  // Frames kept by the sampling rule (model.md §13: the model's own bound).
  int64_t max_sampled_frames = 768;
  // Width x height x kept frames after the resize (model.md §12, reference server): 1.2 GB of RGB at
  // most, 3.6 GB as patch rows.
  int64_t max_video_pixels = 301'056'000;
};

}  // namespace m3
