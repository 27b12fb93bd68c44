#include "server/api_error.h"

#include "server/json_build.h"

namespace m3 {

namespace {

const char* openai_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 429:
      return "rate_limit_error";
    case 503:
      return "service_unavailable_error";
    case 504:
      return "timeout_error";
    default:
      return status < 500 ? "invalid_request_error" : "server_error";
  }
}

const char* anthropic_type(int status) {
  switch (status) {
    case 401:
      return "authentication_error";
    case 404:
      return "not_found_error";
    case 413:
      return "request_too_large";
    case 429:
      return "rate_limit_error";
    case 503:
      return "overloaded_error";
    case 504:
      return "timeout_error";
    default:
      return status < 500 ? "invalid_request_error" : "api_error";
  }
}

}  // namespace

JsonValue error_json(ApiFamily family, const ApiError& error, const std::string& request_id) {
  const auto text_or_null = [](const std::string& text) {
    return text.empty() ? JsonValue() : JsonValue::string(text);
  };
  if (family == ApiFamily::kAnthropic) {
    return json_object({{"type", "error"},
                        {"error", json_object({{"type", anthropic_type(error.status)},
                                               {"message", error.what()},
                                               {"param", text_or_null(error.param)}})},
                        {"request_id", request_id}});
  }
  return json_object({{"error", json_object({{"message", error.what()},
                                             {"type", openai_type(error.status)},
                                             {"param", text_or_null(error.param)},
                                             {"code", text_or_null(error.code)},
                                             {"request_id", request_id}})}});
}

}  // namespace m3
