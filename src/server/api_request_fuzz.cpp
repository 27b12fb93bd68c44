// Bodies of requests: the first byte chooses the reader, the rest is the body. Only ApiError may
// come out, and it names a status of the client's. Media are switched on, so that data: URLs and
// base64 are read too.
#include <cstdint>
#include <cstdlib>

#include "base/check.h"
#include "server/api_routes.h"
#include "server/chat_api.h"
#include "server/completions_api.h"
#include "server/file_store.h"
#include "server/messages_api.h"
#include "server/request_fields.h"
#include "server/responses_api.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace m3;
  static const ModelInfo info = [] {
    ModelInfo made;
    made.id = "m";
    made.max_model_len = 4096;
    made.num_ids = 1000;
    made.has_vision = true;
    return made;
  }();
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  try {
    if (data[0] % 6 == 5) {
      const size_t line = text.find('\n');
      read_form(text.substr(0, line), line == text.npos ? "" : text.substr(line + 1));
      return 0;
    }
    JsonValue body;
    try {
      body = JsonValue::parse(text, "the body", kMaxJsonDepth);
    } catch (const Error&) {
      return 0;
    }
    switch (data[0] % 6) {
      case 0:
        read_chat_request(body, info);
        break;
      case 1:
        read_completions_request(body, info);
        break;
      case 2:
        read_responses_request(body, info);
        break;
      case 3:
        read_messages_request(body, info);
        break;
      default:
        read_tokenize_request(body, info);
        break;
    }
  } catch (const ApiError& error) {
    if (error.status < 400 || error.status > 499) std::abort();
  }
  return 0;
}
