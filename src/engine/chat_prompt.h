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
  MediaInput input;
  Grid grid;
  std::vector<double> seconds;  // films: time of each step; empty where unknown
};
ChatMedia chat_image(MediaRows rows);
ChatMedia chat_video(MediaRows rows);

struct ChatPrompt {
  std::string text;  // placeholders expanded
  std::vector<int32_t> ids;
};

// `media`: of all media parts of all messages, in order. Throws Error if their number or kinds differ.
// Text parts of messages that the model did not write (every role but assistant) are data: what spells a marker in
// them becomes ordinary tokens, not a marker, a turn or a picture. What the model wrote keeps its markers, but never
// counts as a picture or film. `cache`: of earlier turns' ids (encode_cache.h); may be null.
ChatPrompt build_chat_prompt(const Tokenizer& tokenizer, std::span<const Message> messages, std::span<const Tool> tools,
                             const RenderOptions& options, std::span<const ChatMedia> media, EncodeCache* cache = nullptr);

}  // namespace m3
