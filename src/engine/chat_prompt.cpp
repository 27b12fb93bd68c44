#include "engine/chat_prompt.h"

#include <algorithm>

#include "base/check.h"
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

std::string replaced(const std::string& text, std::string_view from, std::string_view to) {
  std::string out;
  size_t at = 0;
  for (size_t found = text.find(from); found != text.npos; found = text.find(from, at)) {
    out.append(text, at, found - at).append(to);
    at = found + from.size();
  }
  return out.append(text, at);
}

// Texts on their way through the template, which sees stand-ins, so that nothing inside them is taken for a marker; they are
// put back with their places noted. Of users, tools and systems that is all text. The model's own is cut by the template at
// think markers and stays, but for what spells the mark of a picture or film: only a media part is one.
class PlainTexts {
 public:
  std::string render(std::span<const Message> messages, std::span<const Tool> tools, const RenderOptions& options) {
    std::vector<Message> hidden(messages.begin(), messages.end());
    for (Message& message : hidden) {
      for (ContentPart& part : message.content) {
        if (part.type != ContentPart::Type::kText) {
          part = ContentPart::of_text(stand_in(part.type == ContentPart::Type::kImage ? "I" : "V"));
        } else if (message.role != "assistant" && !part.text.empty()) {
          texts_.push_back(part.text);
          part.text = stand_in(std::to_string(texts_.size() - 1));
        }
      }
    }
    std::string rendered = render_chat(hidden, tools, options);
    rendered = replaced(rendered, chat_token::kImage, stand_in("i"));
    rendered = replaced(rendered, chat_token::kVideo, stand_in("v"));
    rendered = replaced(rendered, stand_in("I"), chat_token::kImage);
    return replaced(rendered, stand_in("V"), chat_token::kVideo);
  }

  // The template drops some messages and keeps the order of the others.
  std::string put_back(const std::string& rendered, std::vector<TextRange>& ranges) const {
    std::string out;
    size_t at = 0, next = 0;
    for (size_t found = rendered.find(kBegin); found != rendered.npos; found = rendered.find(kBegin, found + 1)) {
      const size_t end = std::min(rendered.find(kEnd, found), rendered.size());
      const std::string name = rendered.substr(found + 1, end - found - 1);
      std::string_view text;
      if (name == "i" || name == "v") {
        text = name == "i" ? chat_token::kImage : chat_token::kVideo;
      } else {
        size_t index = next;
        while (index < texts_.size() && name != std::to_string(index)) ++index;
        M3_CHECK(index < texts_.size(), "the template repeats or reorders messages");
        text = texts_[index];
        next = index + 1;
      }
      out.append(rendered, at, found - at);
      ranges.push_back({out.size(), out.size() + text.size()});
      out += text;
      at = end + 1;
    }
    return out.append(rendered, at);
  }

 private:
  // Bytes that no UTF-8 text holds, so nobody can write a stand-in.
  static constexpr char kBegin = '\xfe', kEnd = '\xff';
  static std::string stand_in(std::string_view name) { return fmt::format("{}{}{}", kBegin, name, kEnd); }
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
                             const RenderOptions& options, std::span<const ChatMedia> media, EncodeCache* cache) {
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
  const std::string rendered = plain.render(messages, tools, options);
  std::vector<TextRange> ranges;
  ChatPrompt prompt;
  prompt.text = plain.put_back(expand_placeholders(rendered, images, videos), ranges);
  prompt.ids = tokenizer.encode(prompt.text, {.plain = ranges, .cache = cache});
  return prompt;
}

}  // namespace m3
