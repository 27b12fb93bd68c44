// Command-line flags of one command. A thin front of CLI11, whose header costs six seconds a file: it
// is included in options.cpp alone. Flags are declared against variables that hold the defaults:
//
//   Options options("run", "Answers a prompt with a model.", "m3 run models/m3-nano -p 'Hello'");
//   options.positional("MODEL", model, "checkpoint folder");
//   options.add("--max-tokens", max_tokens, "most tokens to generate");
//   options.parse(args);
#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace m3::cli {

// Wrong usage (exit code 2): the text says what was wrong and names --help.
struct UsageError {
  std::string message;
};
// --help was asked for (exit code 0).
struct HelpRequest {
  std::string text;
};

class Options {
 public:
  Options(std::string command, std::string summary, std::string example);
  ~Options();

  void positional(const std::string& name, std::string& value, const std::string& help, bool required = true);
  void positional(const std::string& name, std::vector<std::string>& values, const std::string& help,
                  bool required = true);

  // `names` may hold a short form: "-p,--prompt". An optional stays empty when the flag is absent.
  void add(const std::string& names, std::string& value, const std::string& help);
  void add(const std::string& names, int& value, const std::string& help);
  void add(const std::string& names, int64_t& value, const std::string& help);
  void add(const std::string& names, uint64_t& value, const std::string& help);
  void add(const std::string& names, double& value, const std::string& help);
  void add(const std::string& names, std::optional<double>& value, const std::string& help);
  void add(const std::string& names, std::optional<int64_t>& value, const std::string& help);
  void add(const std::string& names, std::optional<std::string>& value, const std::string& help);
  void add(const std::string& names, std::vector<std::string>& values, const std::string& help);
  void flag(const std::string& names, bool& value, const std::string& help);
  // One of a fixed list of words.
  void choice(const std::string& names, std::string& value, const std::vector<std::string>& words,
              const std::string& help);

  // --threads: 0 stands for the default that `help` names.
  void threads(int& value, const std::string& help = "CPU threads (0: all)");

  void parse(const std::vector<std::string>& args);  // throws UsageError or HelpRequest

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// All of standard input; throws Error if it cannot be read (closed, a folder).
std::string read_stdin();

}  // namespace m3::cli
