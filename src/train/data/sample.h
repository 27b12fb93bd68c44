// A document as the model takes it: ids with placeholders, target weights, patch rows.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "media/preprocess.h"
#include "text/tokenizer.h"
#include "train/data/document.h"
#include "train/data/manifest.h"

namespace m3::data {

struct SampleOptions {
  PixelBounds image_bounds = kImageBounds, video_bounds = kVideoBounds;
  MediaLimits limits;
  bool media_marks_as_targets = false;  // training.md §3: start and end of media
};

struct Sample {
  std::string id, source;
  std::vector<int32_t> ids;
  std::vector<float> weights;    // of ids[i] as a target, predicted from ids[i - 1]; 0: input only
  std::vector<MediaRows> media;  // in the order of their placeholders, which are grid.num_tokens() each

  int64_t num_tokens() const { return static_cast<int64_t>(ids.size()); }
};

// Thread-safe; the tokenizer must outlive it.
class SampleBuilder {
 public:
  explicit SampleBuilder(const Tokenizer& tokenizer, SampleOptions options = {});

  // Every text segment is encoded by itself. A picture is start mark, placeholders, end mark; a clip is that
  // for each temporal step, with its time as text before it where the rate is known (model.md §9).
  Sample build(const Document& document) const;

  // Placeholders of a picture or clip of this size, without decoding it.
  int64_t num_vision_tokens(const MediaSize& size) const;

 private:
  void add_text(const Segment& segment, Sample& out) const;
  void add_media(MediaRows rows, bool video, Sample& out) const;

  const Tokenizer& tokenizer_;
  SampleOptions options_;
  int32_t image_, video_, start_, end_;
};

}  // namespace m3::data
