#include "train/data/sample.h"

#include "base/check.h"
#include "text/chat.h"
#include "text/placeholders.h"

namespace m3::data {

SampleBuilder::SampleBuilder(const Tokenizer& tokenizer, SampleOptions options)
    : tokenizer_(tokenizer),
      options_(options),
      image_(tokenizer.require_added_id(chat_token::kImage)),
      video_(tokenizer.require_added_id(chat_token::kVideo)),
      start_(tokenizer.require_added_id(chat_token::kMediaStart)),
      end_(tokenizer.require_added_id(chat_token::kMediaEnd)) {}

void SampleBuilder::add_text(const Segment& segment, Sample& out) const {
  for (int32_t id : tokenizer_.encode(segment.text, {.added_tokens = segment.markers})) {
    M3_CHECK(id != image_ && id != video_, "document {}: a text segment holds a media placeholder", out.id);
    out.ids.push_back(id);
    out.weights.push_back(segment.weight);
  }
}

void SampleBuilder::add_media(MediaRows rows, bool video, Sample& out) const {
  const auto add = [&](int32_t id, float weight) {
    out.ids.push_back(id);
    out.weights.push_back(weight);
  };
  const float mark_weight = options_.media_marks_as_targets ? 1.0f : 0.0f;
  for (int64_t step = 0; step < rows.grid.t; ++step) {
    if (!rows.seconds.empty()) {
      const double frame = static_cast<double>(rows.indices[kTemporalPatch * step]);
      for (int32_t id : tokenizer_.encode(timestamp_text(frame / rows.source_fps), {.added_tokens = false})) add(id, 0);
    }
    add(start_, mark_weight);
    for (int64_t i = 0; i < rows.grid.tokens_per_step(); ++i) add(video ? video_ : image_, 0);
    add(end_, mark_weight);
  }
  out.media.push_back(std::move(rows));
}

Sample SampleBuilder::build(const Document& document) const {
  Sample out;
  out.id = document.id;
  out.source = document.source;
  for (const Segment& segment : document.segments) {
    if (segment.kind == Segment::Kind::kText) {
      add_text(segment, out);
    } else if (segment.kind == Segment::Kind::kImage) {
      add_media(preprocess_image(segment.pictures.at(0).decode(options_.limits), options_.image_bounds), false, out);
    } else {
      std::vector<Image> frames;
      for (const Picture& picture : segment.pictures) frames.push_back(picture.decode(options_.limits));
      VideoOptions options;
      options.bounds = options_.video_bounds;
      options.limits = options_.limits;
      add_media(preprocess_frames(std::move(frames), segment.fps, segment.frames, options), true, out);
    }
  }
  M3_CHECK(!out.ids.empty(), "document {} has no token", document.id);
  return out;
}

int64_t SampleBuilder::num_vision_tokens(const MediaSize& size) const {
  const bool video = size.frames > 0;
  const ImageSize resized = smart_resize(size.height, size.width, video ? options_.video_bounds : options_.image_bounds);
  return patch_grid(video ? size.frames : 1, resized.height, resized.width).num_tokens();
}

}  // namespace m3::data
