// POST /v1/chat/completions (serving.md §3 to §9).
#pragma once
#include <memory>

#include "server/answer.h"
#include "server/api_request.h"

namespace m3 {

ApiRequest read_chat_request(const JsonValue& body, const ModelInfo& info);
std::unique_ptr<AnswerFormat> chat_format(const ApiRequest& request, const Tokenizer& tokenizer);

// The messages, tools and thinking fields alone: /tokenize and /apply-template take them too.
class FieldReader;
void read_chat_prompt(FieldReader& fields, const ModelInfo& info, ApiRequest& request);

// logprobs of a list of tokens as chat writes them.
JsonValue chat_logprobs(std::span<const AnswerToken> tokens, const Tokenizer& tokenizer);

}  // namespace m3
