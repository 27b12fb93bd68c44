#include "engine/chat_prompt.h"

#include <algorithm>

#include "text/placeholders.h"

namespace m3 {

ChatMedia load_chat_image(const std::filesystem::path& path) { return {false, preprocess_image_file(path)}; }
ChatMedia load_chat_video(const std::filesystem::path& path) { return {true, preprocess_video_file(path)}; }

namespace {

// model.md §9: a step's time is that of its first frame; the last step of an odd clip repeats a frame.
VideoSpan video_span(const MediaRows& rows) {
  VideoSpan span{rows.grid.t, rows.grid.tokens_per_step(), {}};
  if (rows.source_fps <= 0 || rows.indices.empty()) return span;
  const auto last = static_cast<int64_t>(rows.indices.size()) - 1;
  for (int64_t step = 0; step < rows.grid.t; ++step) {
    span.seconds.push_back(static_cast<double>(rows.indices[std::min(kTemporalPatch * step, last)]) / rows.source_fps);
  }
  return span;
}

}  // namespace

ChatPrompt build_chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages, std::span<const Tool> tools,
                             const RenderOptions& options, std::span<const ChatMedia> media) {
  std::vector<ImageSpan> images;
  std::vector<VideoSpan> videos;
  for (const ChatMedia& item : media) {
    if (item.is_video) {
      videos.push_back(video_span(item.rows));
    } else {
      images.push_back({item.rows.grid.num_tokens()});
    }
  }
  ChatPrompt prompt;
  prompt.text = expand_placeholders(render_chat(messages, tools, options), images, videos);
  prompt.ids = tokenizer.encode(prompt.text);
  return prompt;
}

MediaInput media_input(const ChatMedia& media) {
  const Grid& grid = media.rows.grid;
  return {media.is_video, {grid.t, grid.h, grid.w}, media.rows.rows};
}

}  // namespace m3
