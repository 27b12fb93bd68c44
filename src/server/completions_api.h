// POST /v1/completions: plain prompts (serving.md §2, §3.2).
#pragma once
#include <memory>

#include "server/answer.h"
#include "server/api_request.h"

namespace m3 {

ApiRequest read_completions_request(const JsonValue& body, const ModelInfo& info);
std::unique_ptr<AnswerFormat> completions_format(const ApiRequest& request, const Tokenizer& tokenizer);

}  // namespace m3
