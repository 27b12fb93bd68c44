// m3: one binary, one command per file (commands.h).
#include <fmt/core.h>

#include <cstdio>
#include <string>

#include "base/check.h"
#include "base/log.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace {

constexpr int kFailed = 1, kWrongUsage = 2;

std::string overview() {
  std::string text = "m3 " M3_VERSION ": MiniMax-M3 models on CPUs and Hopper GPUs\n\nUsage: m3 COMMAND [...]\n\n";
  for (const auto& command : m3::cli::commands()) {
    text += fmt::format("  {:<14} {}\n", command.name, command.summary);
  }
  return text + "\n'm3 COMMAND --help' shows the flags and an example.\n";
}

}  // namespace

int main(int argc, char** argv) {
  const m3::cli::Args words(argv + 1, argv + argc);
  if (words.empty()) {
    fmt::print(stderr, "{}", overview());
    return kWrongUsage;
  }
  if (words[0] == "--help" || words[0] == "-h" || words[0] == "help") {
    fmt::print("{}", overview());
    return 0;
  }
  if (words[0] == "--version") {
    fmt::print("m3 {}\n", M3_VERSION);
    return 0;
  }
  for (const auto& command : m3::cli::commands()) {
    if (words[0] != command.name) continue;
    try {
      return command.run(m3::cli::Args(words.begin() + 1, words.end()));
    } catch (const m3::cli::HelpRequest& help) {
      fmt::print("{}", help.text);
      return 0;
    } catch (const m3::cli::UsageError& error) {
      fmt::print(stderr, "m3 {}: {}\n", words[0], error.message);
      return kWrongUsage;
    } catch (const m3::Error& error) {
      fmt::print(stderr, "m3 {}: {}\n", words[0], error.what());
      m3::log_debug("thrown at {}", error.where());
      return kFailed;
    } catch (const std::exception& error) {
      fmt::print(stderr, "m3 {}: {}\n", words[0], error.what());
      return kFailed;
    }
  }
  fmt::print(stderr, "m3: unknown command '{}'\n\n{}", words[0], overview());
  return kWrongUsage;
}
