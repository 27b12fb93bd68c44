// POST /v1/completions: plain prompts (serving.md §2, §3.2).
#pragma once
#include <memory>

#include "server/answer.h"
#include "server/api_request.h"

namespace m3 {

ApiRequest read_completions_request(const JsonValue& body, const ModelInfo& info);
// `prompt_texts` go in front of the answers if the request says echo. The request must outlive the
// format.
std::unique_ptr<AnswerFormat> completions_format(const ApiRequest& request,
                                                 const Tokenizer& tokenizer,
                                                 std::vector<std::string> prompt_texts);

}  // namespace m3
