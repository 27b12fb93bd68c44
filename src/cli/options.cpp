#include "cli/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace m3::cli {

namespace {

constexpr int kMaxThreads = 1024;  // more is a slip of the finger, and each has its own activations

// CLI11 reads a number beyond the type's range as the nearest limit, and -1 as the largest unsigned number.
template <class T>
std::string integer_error(const std::string& text) {
  T value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  if (parsed.ec == std::errc::result_out_of_range) return text + " is out of range";
  if (std::is_unsigned_v<T> && text.starts_with('-')) return text + " is negative";
  return {};
}

std::string number_error(const std::string& text) {
  return std::isfinite(std::strtod(text.c_str(), nullptr)) ? std::string() : text + " is not a finite number";
}

}  // namespace

struct Options::Impl {
  CLI::App app;
  std::string command;
};

Options::Options(std::string command, std::string summary, std::string example)
    : impl_(std::make_unique<Impl>()) {
  impl_->command = std::move(command);
  impl_->app.name("m3 " + impl_->command);
  impl_->app.description(std::move(summary));
  impl_->app.footer("Example:\n  " + example);
  impl_->app.get_formatter()->column_width(34);
}

Options::~Options() = default;

void Options::positional(const std::string& name, std::string& value, const std::string& help, bool required) {
  impl_->app.add_option(name, value, help)->required(required);
}
void Options::positional(const std::string& name, std::vector<std::string>& values, const std::string& help,
                         bool required) {
  impl_->app.add_option(name, values, help)->required(required);
}
void Options::add(const std::string& names, std::string& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->capture_default_str();
}
void Options::add(const std::string& names, int& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(integer_error<int>)->capture_default_str();
}
void Options::add(const std::string& names, int64_t& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(integer_error<int64_t>)->capture_default_str();
}
void Options::add(const std::string& names, uint64_t& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(integer_error<uint64_t>)->capture_default_str();
}
void Options::add(const std::string& names, double& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(number_error)->capture_default_str();
}
void Options::add(const std::string& names, std::optional<double>& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(number_error);
}
void Options::add(const std::string& names, std::optional<int64_t>& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->check(integer_error<int64_t>);
}
void Options::add(const std::string& names, std::optional<std::string>& value, const std::string& help) {
  impl_->app.add_option(names, value, help);
}
void Options::add(const std::string& names, std::vector<std::string>& values, const std::string& help) {
  // One value each time, else `--image F MODEL` would take the model for a picture.
  impl_->app.add_option(names, values, help)->take_all()->expected(1)->allow_extra_args(false);
}
void Options::flag(const std::string& names, bool& value, const std::string& help) {
  impl_->app.add_flag(names, value, help);
}
void Options::choice(const std::string& names, std::string& value, const std::vector<std::string>& words,
                     const std::string& help) {
  impl_->app.add_option(names, value, help)->check(CLI::IsMember(words))->capture_default_str();
}

void Options::threads(int& value, const std::string& help) {
  impl_->app.add_option("--threads", value, help)->check([](const std::string& text) {
    int count = 0;
    std::from_chars(text.data(), text.data() + text.size(), count);
    const bool ok = integer_error<int>(text).empty() && count >= 0 && count <= kMaxThreads;
    return ok ? std::string() : text + " is not between 0 and " + std::to_string(kMaxThreads);
  })->capture_default_str();
}

void Options::parse(const std::vector<std::string>& args) {
  std::vector<std::string> reversed(args.rbegin(), args.rend());  // CLI11 takes the last first
  try {
    impl_->app.parse(std::move(reversed));
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest{impl_->app.help()};
  } catch (const CLI::ParseError& error) {
    throw UsageError{error.what() + std::string(" (see m3 ") + impl_->command + " --help)"};
  }
}

std::string read_stdin() {
  std::string text;
  char buffer[65536];
  while (const size_t count = std::fread(buffer, 1, sizeof buffer, stdin)) text.append(buffer, count);
  M3_CHECK(std::ferror(stdin) == 0, "standard input cannot be read: {}", std::strerror(errno));
  return text;
}

}  // namespace m3::cli
