// POST /v1/responses, stateless: nothing is stored between requests (serving.md §2 to §9).
#pragma once
#include <memory>

#include "server/answer.h"
#include "server/api_request.h"

namespace m3 {

ApiRequest read_responses_request(const JsonValue& body, const ModelInfo& info);
std::unique_ptr<AnswerFormat> responses_format(const ApiRequest& request);

}  // namespace m3
