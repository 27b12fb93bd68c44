#include "cli/options.h"

#include <CLI/CLI.hpp>

#include <algorithm>

namespace m3::cli {

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
  impl_->app.add_option(names, value, help)->capture_default_str();
}
void Options::add(const std::string& names, int64_t& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->capture_default_str();
}
void Options::add(const std::string& names, uint64_t& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->capture_default_str();
}
void Options::add(const std::string& names, double& value, const std::string& help) {
  impl_->app.add_option(names, value, help)->capture_default_str();
}
void Options::add(const std::string& names, std::optional<double>& value, const std::string& help) {
  impl_->app.add_option(names, value, help);
}
void Options::add(const std::string& names, std::optional<int64_t>& value, const std::string& help) {
  impl_->app.add_option(names, value, help);
}
void Options::add(const std::string& names, std::optional<std::string>& value, const std::string& help) {
  impl_->app.add_option(names, value, help);
}
void Options::add(const std::string& names, std::vector<std::string>& values, const std::string& help) {
  impl_->app.add_option(names, values, help)->take_all();
}
void Options::flag(const std::string& names, bool& value, const std::string& help) {
  impl_->app.add_flag(names, value, help);
}
void Options::choice(const std::string& names, std::string& value, const std::vector<std::string>& words,
                     const std::string& help) {
  impl_->app.add_option(names, value, help)->check(CLI::IsMember(words))->capture_default_str();
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

}  // namespace m3::cli
