// m3: one binary, one command per file (commands.h).
#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

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

// A standard stream that was closed would otherwise be the next file opened.
void open_standard_streams() {
  int fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::dup(fd);
  if (fd > STDERR_FILENO) ::close(fd);
}

// fputs and not fmt::print, which throws when stderr cannot be written.
void complain(const std::string& text) { std::fputs(text.c_str(), stderr); }

int run(const m3::cli::Args& words) {
  if (words.empty()) {
    complain(overview());
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
      std::fputs(help.text.c_str(), stdout);
      return 0;
    } catch (const m3::cli::UsageError& error) {
      complain(fmt::format("m3 {}: {}\n", words[0], error.message));
      return kWrongUsage;
    } catch (const m3::Error& error) {
      complain(fmt::format("m3 {}: {}\n", words[0], error.what()));
      m3::log_debug("thrown at {}", error.where());
      return kFailed;
    } catch (const std::exception& error) {
      complain(fmt::format("m3 {}: {}\n", words[0], error.what()));
      return kFailed;
    }
  }
  complain(fmt::format("m3: unknown command '{}'\n\n{}", words[0], overview()));
  return kWrongUsage;
}

}  // namespace

int main(int argc, char** argv) {
  open_standard_streams();
  const int code = run(m3::cli::Args(argv + 1, argv + argc));
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  complain("m3: standard output was not written in full (disk full?)\n");
  return code == 0 ? kFailed : code;
}
