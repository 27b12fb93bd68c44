// Errors. A failed check at an API border throws m3::Error with file and line. Threads catch what they
// run for others: one bad request cannot end the process.
#pragma once
#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace m3 {

// what() names the thing, what came, what was wanted and what to do. where() is "file:line" of the
// check, for logs; the message shown to a user does not need it.
class Error : public std::runtime_error {
 public:
  Error(std::string message, const char* file, int line)
      : std::runtime_error(std::move(message)), file_(file), line_(line) {}
  std::string where() const { return fmt::format("{}:{}", file_, line_); }

 private:
  const char* file_;
  int line_;
};

[[noreturn]] void throw_error(const char* file, int line, std::string message);

}  // namespace m3

// M3_FAIL("config.json: rope_theta is {}, want a positive number", value);
#define M3_FAIL(...) ::m3::throw_error(__FILE__, __LINE__, ::fmt::format(__VA_ARGS__))

// M3_CHECK(q.rank() == 3, "q_THD must be [T, H, D], got {}", q.shape().str());
#define M3_CHECK(cond, ...)                                                 \
  do {                                                                      \
    if (!(cond)) [[unlikely]] ::m3::throw_error(__FILE__, __LINE__, ::fmt::format(__VA_ARGS__)); \
  } while (0)
