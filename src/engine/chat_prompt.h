// From a conversation to what the engine takes: rendered text, placeholders expanded, token ids, media rows
// in the tower's form. Used by m3 run, the server's workers and the goldens alike.
#pragma once
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "engine/request.h"
#include "media/preprocess.h"
#include "text/chat.h"
#include "text/tokenizer.h"

namespace m3 {

// A decoded picture or film of a conversation.
struct ChatMedia {
  bool is_video = false;
  MediaRows rows;
};
ChatMedia load_chat_image(const std::filesystem::path& path);
ChatMedia load_chat_video(const std::filesystem::path& path);

struct ChatPrompt {
  std::string text;  // placeholders expanded
  std::vector<int32_t> ids;
};

// `media`: of all media parts of all messages, in order. Throws Error if their number or kinds differ.
ChatPrompt build_chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages, std::span<const Tool> tools,
                             const RenderOptions& options, std::span<const ChatMedia> media);

// For a request; the patch rows are copied, since later turns need them again.
MediaInput media_input(const ChatMedia& media);

}  // namespace m3
