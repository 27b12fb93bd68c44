#include "base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>

namespace m3 {
namespace {

spdlog::level::level_enum spd_level(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace: return spdlog::level::trace;
    case LogLevel::kDebug: return spdlog::level::debug;
    case LogLevel::kInfo: return spdlog::level::info;
    case LogLevel::kWarn: return spdlog::level::warn;
    case LogLevel::kError: return spdlog::level::err;
    case LogLevel::kOff: return spdlog::level::off;
  }
  return spdlog::level::info;
}

spdlog::logger& logger() {
  static std::shared_ptr<spdlog::logger> instance = [] {
    auto made = std::make_shared<spdlog::logger>(
        "m3", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    made->set_pattern("%^%L%$ %T.%e %v");
    const char* env = std::getenv("M3_LOG");
    if (env == nullptr) return made;
    const auto level = spdlog::level::from_str(env);  // off for words that it does not know
    if (level == spdlog::level::off && std::string_view(env) != "off") {
      made->warn("M3_LOG is '{}', want trace, debug, info, warn, error or off; using info", env);
    } else {
      made->set_level(level);
    }
    return made;
  }();
  return *instance;
}

}  // namespace

bool log_enabled(LogLevel level) { return logger().should_log(spd_level(level)); }

void log_message(LogLevel level, std::string_view text) {
  logger().log(spd_level(level), spdlog::string_view_t(text.data(), text.size()));
}

}  // namespace m3
