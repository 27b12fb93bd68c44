// Logging to stderr. Thread-safe. Level from M3_LOG (trace, debug, info, warn, error, off); default
// info. stdout belongs to results.
#pragma once
#include <fmt/core.h>

#include <string_view>

namespace m3 {

enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };

void log_message(LogLevel level, std::string_view text);
bool log_enabled(LogLevel level);

template <typename... Args>
void log_debug(fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::kDebug)) {
    log_message(LogLevel::kDebug, fmt::format(format, std::forward<Args>(args)...));
  }
}
template <typename... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_warn(fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::kWarn, fmt::format(format, std::forward<Args>(args)...));
}
template <typename... Args>
void log_error(fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::kError, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace m3
