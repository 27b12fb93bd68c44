// Outcome of work done on behalf of a request: a value, so that one bad request cannot end the
// process and no exception crosses a thread.
#pragma once
#include <string>
#include <utility>

namespace m3 {

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  static Status error(std::string message) {
    Status s;
    s.ok_ = false;
    s.message_ = std::move(message);
    return s;
  }
  bool ok() const { return ok_; }
  const std::string& message() const { return message_; }

 private:
  bool ok_ = true;
  std::string message_;
};

}  // namespace m3
