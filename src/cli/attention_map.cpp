// m3 attention-map: how much text attends to pictures, by layer and head, and where.
#include <fmt/core.h>

#include "base/file.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "train/eval/attention_map.h"

namespace m3::cli {

int command_attention_map(const Args& args) {
  std::string model, out;
  int count = 16, threads = 0;
  uint64_t seed = 1000003;
  bool json = false;
  Options options("attention-map",
                  "Shows how much the text behind a picture attends to it: probability on the "
                  "picture's tokens over their share of the "
                  "visible keys (1: as if attention were uniform), by layer and head, on generated "
                  "pictures that training never draws.",
                  "m3 attention-map runs/nano/seed-0/step-00011400 --out map.html");
  options.positional("MODEL", model, "a model folder with its tokenizer");
  options.add("--count", count, "pictures");
  options.add("--seed", seed, "of the pictures");
  options.add("--out", out,
              "also write an HTML page with a map over the first picture for each layer");
  options.threads(threads);
  options.flag("--json", json, "JSON on stdout instead of the table");
  options.parse(args);
  if (count < 1 || count > 256) throw UsageError{"--count must lie between 1 and 256"};
  set_num_threads(threads);
  const eval::AttentionMap map = eval::map_attention(Checkpoint::open(model), count, seed);
  fmt::print("{}", json ? eval::attention_json(map) : eval::attention_table(map));
  if (!out.empty()) write_file_atomic(out, eval::attention_page(map));
  return 0;
}

}  // namespace m3::cli
