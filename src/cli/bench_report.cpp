#include <fmt/chrono.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/cpu_features.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/options.h"

namespace m3::cli {

namespace {

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

}  // namespace

std::vector<int64_t> parse_numbers(const std::string& flag, const std::string& text) {
  std::vector<int64_t> numbers;
  for (size_t begin = 0; begin < text.size();) {
    size_t end = text.find(',', begin);
    if (end == std::string::npos) end = text.size();
    const std::string word = text.substr(begin, end - begin);
    if (word.empty() || word.size() > 9 || word.find_first_not_of("0123456789") != std::string::npos) {
      throw UsageError{flag + " wants numbers with commas between them, got '" + text + "'"};
    }
    numbers.push_back(std::stoll(word));
    begin = end + 1;
  }
  return numbers;
}

MachineCeiling CeilingWatch::beside() {
  const MachineCeiling before = last_;
  last_ = measure_machine_ceiling();
  return {.fp32_gflops = std::max(before.fp32_gflops, last_.fp32_gflops),
          .bf16_gflops = std::max(before.bf16_gflops, last_.bf16_gflops),
          .read_gb_s = std::max(before.read_gb_s, last_.read_gb_s)};
}

nlohmann::ordered_json bench_head(const std::string& command, const Args& args, const MachineCeiling& ceiling) {
  std::string line = "m3 " + command;
  for (const std::string& word : args) line += " " + word;
  return {{"command", line},
          {"version", M3_VERSION},
          {"date", fmt::format("{:%Y-%m-%d}", fmt::gmtime(std::time(nullptr)))},
          {"machine",
           {{"cpu", cpu_name()},
            {"isa", cpu_isa_name(cpu_isa())},
            {"threads", num_threads()},
            {"fp32_gflops", ceiling.fp32_gflops},
            {"bf16_gflops", ceiling.bf16_gflops},
            {"read_gb_s", ceiling.read_gb_s}}}};
}

}  // namespace m3::cli
