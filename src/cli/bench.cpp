// m3 bench: what to measure is the first word; one file per kind.
#include <fmt/core.h>

#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/options.h"

namespace m3::cli {

namespace {

const std::vector<Command>& kinds() {
  static const std::vector<Command> list = {
      {"model", "prefill and decode of a whole model", bench_model},
      {"msa", "one attention layer: sparse, full, window, token lists", bench_msa},
      {"msa-train", "its forward and backward: sparse and full", bench_msa_train},
      {"serve", "load on a running server, and what its clients see", bench_serve},
  };
  return list;
}

}  // namespace

int command_bench(const Args& args) {
  std::string text = "Measures this build on this machine.\nUsage: m3 bench KIND [...]\n\n";
  for (const Command& kind : kinds()) text += fmt::format("  {:<14} {}\n", kind.name, kind.summary);
  text += "\nExample:\n  m3 bench model benchmarks/workloads/cpu_270m_config.json --prompt 512,4096 --decode-at 0,4096\n"
          "  m3 bench msa --context 32768,131072 --new 1 --attention msa,full\n";
  if (!args.empty() && (args[0] == "--help" || args[0] == "-h")) throw HelpRequest{text};
  for (const Command& kind : kinds()) {
    if (!args.empty() && args[0] == kind.name) return kind.run({args.begin() + 1, args.end()});
  }
  const std::string fault = args.empty() ? "what is to be measured?" : fmt::format("unknown kind '{}'", args[0]);
  throw UsageError{fmt::format("{}\n\n{}", fault, text)};
}

}  // namespace m3::cli
