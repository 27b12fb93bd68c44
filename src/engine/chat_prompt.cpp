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

// Texts of users, tools and systems on their way through the template: it sees a stand-in for each, so that
// nothing inside them is taken for a marker, and they are put back with their places noted.
class PlainTexts {
 public:
  std::vector<Message> hide(std::span<const Message> messages) {
    std::vector<Message> hidden(messages.begin(), messages.end());
    for (Message& message : hidden) {
      if (message.role == "assistant") continue;  // the template may cut its text at think markers
      for (ContentPart& part : message.content) {
        if (part.type != ContentPart::Type::kText || part.text.empty()) continue;
        texts_.push_back(part.text);
        part.text = stand_in(texts_.size() - 1);
      }
    }
    return hidden;
  }

  // The template drops some messages and keeps the order of the others.
  std::string put_back(const std::string& rendered, std::vector<TextRange>& ranges) const {
    std::string out;
    size_t at = 0;
    for (size_t i = 0; i < texts_.size(); ++i) {
      const std::string mark = stand_in(i);
      const size_t found = rendered.find(mark, at);
      if (found == std::string::npos) continue;
      out.append(rendered, at, found - at);
      ranges.push_back({out.size(), out.size() + texts_[i].size()});
      out += texts_[i];
      at = found + mark.size();
    }
    return out.append(rendered, at);
  }

 private:
  static std::string stand_in(size_t index) { return fmt::format("\x1e{}\x1f", index); }
  std::vector<std::string> texts_;
};

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
  PlainTexts plain;
  const std::string rendered = render_chat(plain.hide(messages), tools, options);
  std::vector<TextRange> ranges;
  ChatPrompt prompt;
  prompt.text = plain.put_back(expand_placeholders(rendered, images, videos), ranges);
  prompt.ids = tokenizer.encode(prompt.text, {.plain = ranges});
  return prompt;
}

}  // namespace m3
