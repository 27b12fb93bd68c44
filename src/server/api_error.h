// What a client did wrong, or why we cannot serve it now, in the shape of its API family
// (serving.md §10).
#pragma once
#include <stdexcept>
#include <string>

#include "text/json_value.h"

namespace m3 {

enum class ApiFamily { kOpenAi, kAnthropic };

// Thrown while a request is read and caught in the same worker: it never crosses a thread.
class ApiError : public std::runtime_error {
 public:
  ApiError(int status, std::string message, std::string param = {}, std::string code = {})
      : std::runtime_error(std::move(message)),
        status(status),
        param(std::move(param)),
        code(std::move(code)) {}
  int status;
  std::string param;  // the field: messages[2].content[0].image_url.url
  std::string code;
};

// The `error` member of a body or of a stream's last event.
JsonValue error_json(ApiFamily family, const ApiError& error, const std::string& request_id);

}  // namespace m3
