// m3 init: a randomly initialised checkpoint from a config.
#include <fmt/core.h>

#include <filesystem>

#include "base/check.h"
#include "base/file.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "formats/random_init.h"

namespace m3::cli {

namespace fs = std::filesystem;

namespace {

// What a model folder may hold beside config and weights.
constexpr const char* kCompanions[] = {"tokenizer.json",          "tokenizer_config.json", "special_tokens_map.json",
                                       "generation_config.json",  "chat_template.jinja",   "preprocessor_config.json"};

std::vector<fs::path> companions_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const char* name : kCompanions) {
    if (fs::exists(folder / name)) files.push_back(folder / name);
  }
  return files;
}

}  // namespace

int command_init(const Args& args) {
  std::string config_path, out, tokenizer;
  uint64_t seed = 0;
  int threads = 0;
  Options options("init",
                  "Writes a checkpoint with random weights for a config.json: normal with standard deviation 0.02, norms "
                  "neutral, biases 0. The weights depend on the seed and the tensors' names only. OUT must not exist.",
                  "m3 init benchmarks/workloads/cpu_270m_config.json /tmp/m3-270m --seed 1 --tokenizer tests/golden/models/tiny-text");
  options.positional("CONFIG", config_path, "a config.json, or a model folder (its tokenizer files are copied too)");
  options.positional("OUT", out, "the folder to write");
  options.add("--seed", seed, "seed of the generator");
  options.add("--tokenizer", tokenizer, "copy the tokenizer files from this folder");
  options.threads(threads);
  options.parse(args);
  set_num_threads(threads);

  if (out.empty()) throw UsageError{"OUT must not be empty (see m3 init --help)"};

  const bool is_folder = fs::is_directory(config_path);
  const fs::path config_file = is_folder ? fs::path(config_path) / "config.json" : fs::path(config_path);
  std::vector<fs::path> files;
  if (!tokenizer.empty()) {
    files = companions_in(tokenizer);
    M3_CHECK(!files.empty(), "{}: no tokenizer.json or similar file there", tokenizer);
  } else if (is_folder) {
    files = companions_in(config_path);
  }
  const std::string config_json = read_file(config_file);
  write_random_checkpoint(config_json, config_file.string(), out, init_normal(seed), files, Progress::Mode::kAuto);
  const ModelConfig config = parse_model_config(config_json, config_file.string());
  const std::vector<TensorEntry> table = tensor_table(config);
  fmt::print("{}: {} tensors, {} parameters, {}\n", out, table.size(),
             format_count(static_cast<double>(count_parameters(config, table).total)),
             format_bytes(static_cast<double>(total_bytes(table))));
  return 0;
}

}  // namespace m3::cli
