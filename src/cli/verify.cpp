// m3 verify: replay goldens, one line per case, exit 1 if any failed.
#include "verify/verify.h"

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include "base/file.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace m3::cli {

int command_verify(const Args& args) {
  std::vector<std::string> paths;
  std::string device = "cpu", dtype = "f32", filter, json_path;
  int threads = 0;
  Options options("verify",
                  "Finds every golden under the paths (operators, models, chat, tokenizer, media, end to end), runs it "
                  "through this build and prints the measured errors.",
                  "m3 verify tests/golden --dtype bf16 --filter msa/");
  options.positional("PATH", paths, "golden files or folders");
  options.choice("--device", device, {"cpu", "cuda"}, "where operators run");
  options.choice("--dtype", dtype, {"f32", "bf16"}, "arithmetic of operators and models");
  options.add("--filter", filter, "only cases whose name contains this text");
  options.threads(threads);
  options.add("--json", json_path, "write the results to this file");
  options.parse(args);
  set_num_threads(threads);

  verify::Options verify_options;
  verify_options.device.kind = device == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
  verify_options.dtype = dtype == "bf16" ? DType::kBF16 : DType::kF32;
  verify_options.filter = filter;

  nlohmann::ordered_json cases = nlohmann::ordered_json::array();
  static const char* const kOutcomes[] = {"passed", "FAILED", "skipped"};
  verify::Report report(verify_options, [&](const verify::CaseResult& result) {
    const char* outcome = kOutcomes[static_cast<int>(result.outcome)];
    fmt::print("{:<8}{:<48} {}\n", outcome, result.name, result.detail);
    cases.push_back({{"name", result.name}, {"outcome", outcome}, {"detail", result.detail}});
  });
  verify::verify_paths({paths.begin(), paths.end()}, report);

  if (!json_path.empty()) {
    const nlohmann::ordered_json document = {{"device", device},
                                             {"dtype", dtype},
                                             {"passed", report.num_passed},
                                             {"failed", report.num_failed},
                                             {"skipped", report.num_skipped},
                                             {"cases", cases}};
    write_file_atomic(json_path, document.dump(1) + "\n");
  }
  if (report.num_passed + report.num_failed == 0) {
    fmt::print(stderr, "m3 verify: no case ran (filter '{}', {} skipped)\n", filter, report.num_skipped);
    return 1;
  }
  if (report.num_skipped > 0) {
    fmt::print("{} passed, {} failed, {} skipped\n", report.num_passed, report.num_failed, report.num_skipped);
  } else {
    fmt::print("{} passed, {} failed\n", report.num_passed, report.num_failed);
  }
  return report.num_failed > 0 ? 1 : 0;
}

}  // namespace m3::cli
