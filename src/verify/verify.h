// Replaying goldens (formats: tests/golden/README.md and the READMEs beside the files) through the
// product's own code. Each suite lives in its own file and claims the JSON files of its formats by
// their content, so that other sets of the same formats work wherever they lie.
#pragma once
#include <filesystem>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "tensor/tensor.h"

namespace m3::verify {

struct CaseResult {
  enum class Outcome { kPassed, kFailed, kSkipped };
  std::string name;     // "msa/ties", unique in a run
  Outcome outcome = Outcome::kPassed;
  std::string detail;   // measured errors with their tolerances, or the first difference
};

struct Options {
  Device device;
  DType dtype = DType::kF32;  // arithmetic of operators and models: f32 or bf16
  std::string filter;         // run only cases whose name contains it
};

class Report {
 public:
  Report(const Options& options, std::function<void(const CaseResult&)> on_case)
      : options_(options), on_case_(std::move(on_case)) {}
  const Options& options() const { return options_; }
  bool wants(const std::string& name) const { return name.find(options_.filter) != std::string::npos; }
  void add(CaseResult result);
  // Runs `body` unless filtered out; an exception is a failure with its text. `body` returns the
  // detail and throws (M3_CHECK) when the case fails.
  void run(const std::string& name, const std::function<std::string()>& body);
  void skip(const std::string& name, const std::string& reason);

  int num_cases() const { return num_passed + num_failed + num_skipped; }
  int num_passed = 0, num_failed = 0, num_skipped = 0;

 private:
  Options options_;
  std::function<void(const CaseResult&)> on_case_;
};

// A suite looks at one parsed JSON file; returns false if the file is not of its formats.
using Suite = bool (*)(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
const std::vector<Suite>& suites();  // the list, in suites.cpp

// Walks the paths (files or folders, sorted) and runs every golden found. A damaged golden
// is a failed case; throws if a path holds no golden.
void verify_paths(const std::vector<std::filesystem::path>& paths, Report& report);

}  // namespace m3::verify
