#include "engine/chat_prompt.h"

#include <algorithm>

#include "text/placeholders.h"

namespace m3 {

namespace {

ChatMedia chat_media(bool is_video, MediaRows rows) {
  const Grid& grid = rows.grid;
  return {{is_video, {grid.t, grid.h, grid.w}, std::make_shared<const std::vector<float>>(std::move(rows.rows))}, grid, {}};
}

// model.md §9: a step's time is that of its first frame; the last step of an odd clip repeats a frame.
std::vector<double> step_times(const MediaRows& rows) {
  std::vector<double> seconds;
  if (rows.source_fps <= 0 || rows.indices.empty()) return seconds;
  const auto last = static_cast<int64_t>(rows.indices.size()) - 1;
  for (int64_t step = 0; step < rows.grid.t; ++step) {
    seconds.push_back(static_cast<double>(rows.indices[std::min(kTemporalPatch * step, last)]) / rows.source_fps);
  }
  return seconds;
}

}  // namespace

ChatMedia chat_image(MediaRows rows) { return chat_media(false, std::move(rows)); }

ChatMedia chat_video(MediaRows rows) {
  std::vector<double> seconds = step_times(rows);
  ChatMedia media = chat_media(true, std::move(rows));
  media.seconds = std::move(seconds);
  return media;
}

ChatPrompt build_chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages, std::span<const Tool> tools,
                             const RenderOptions& options, std::span<const ChatMedia> media) {
  std::vector<ImageSpan> images;
  std::vector<VideoSpan> videos;
  for (const ChatMedia& item : media) {
    if (item.input.is_video) {
      videos.push_back({item.grid.t, item.grid.tokens_per_step(), item.seconds});
    } else {
      images.push_back({item.grid.num_tokens()});
    }
  }
  ChatPrompt prompt;
  prompt.text = expand_placeholders(render_chat(messages, tools, options), images, videos);
  prompt.ids = tokenizer.encode(prompt.text);
  return prompt;
}

}  // namespace m3
