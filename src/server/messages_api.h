// POST /v1/messages and /v1/messages/count_tokens, as Anthropic clients speak (serving.md §3 to
// §9).
#pragma once
#include <memory>

#include "server/answer.h"
#include "server/api_request.h"

namespace m3 {

// Reads both: count_tokens has the prompt's fields alone.
ApiRequest read_messages_request(const JsonValue& body, const ModelInfo& info);
std::unique_ptr<AnswerFormat> messages_format(const ApiRequest& request);

}  // namespace m3
