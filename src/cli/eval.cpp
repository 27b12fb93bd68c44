// m3 eval: what a trained model can do, with chance beside each figure.
#include <fmt/ranges.h>

#include "base/check.h"
#include "base/file.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "train/eval/evaluator.h"

namespace m3::cli {

int command_eval(const Args& args) {
  std::string model, corpus, out;
  std::vector<std::string> texts, sources;
  eval::EvalOptions eval_options;
  int threads = 0;
  bool json = false, msa_only = false;
  std::string attention = "msa", fact_tokens = "256,512,1024,2048,4096";
  Options options("eval",
                  "Measures a model on documents that training never draws: pictures, clips, facts "
                  "hidden in long text (with MSA, and "
                  "the same weights with a random index, a window, dense attention), chat, bits "
                  "per byte. Cards are fresh ones of items that training draws too. An answer counts if all of "
                  "it is right, greedily decoded.",
                  "m3 eval runs/nano/seed-0/step-00011400 --corpus runs/nano/corpus\n"
                  "  m3 eval models/m3-nano --only facts --corpus runs/nano/corpus --json");
  options.positional("MODEL", model,
                     "a model folder with its tokenizer, e.g. a checkpoint of m3 train");
  options.add(
      "--corpus", corpus,
      "data folder of m3 data: its held-out pages hide the facts and give the bits per byte");
  options.add("--text", texts, "text file for bits per byte, instead of the corpus");
  options.add("--count", eval_options.count, "documents a test");
  options.add("--seed", eval_options.seed, "of the documents");
  options.add("--only", eval_options.filters, "only measures whose name contains this; several: any of them");
  options.choice("--attention", attention, {"msa", "window", "dense", "dsa"},
                 "of the sparse layers, in all measures: what the model was trained with");
  options.add("--fact-tokens", fact_tokens, "lengths of the texts that hide the facts, 0: no text: a list");
  options.add("--clip-frames", eval_options.clip_frames, "frames of a clip");
  options.add("--source", sources,
              "JSON of a source as in a training configuration: exact answers about its held-out items");
  options.flag("--fresh", eval_options.fresh_sources, "--source: fresh documents of items that training draws too");
  options.flag("--msa-only", msa_only, "facts without the comparison of attentions");
  options.threads(threads);
  options.flag("--json", json, "a JSON list on stdout instead of the table");
  options.add("--out", out, "also write the JSON list into this file");
  options.parse(args);
  if (eval_options.count < 1) throw UsageError{"--count must be at least 1"};
  if (eval_options.clip_frames < 8 || eval_options.clip_frames > 64)
    throw UsageError{"--clip-frames must be 8 to 64"};
  eval_options.fact_tokens = parse_numbers("--fact-tokens", fact_tokens);
  for (const eval::Attention kind : {eval::Attention::kMsa, eval::Attention::kWindow,
                                     eval::Attention::kDense, eval::Attention::kDsa}) {
    if (attention == eval::attention_name(kind)) eval_options.attention = kind;
  }
  for (const std::string& source : sources) eval_options.sources.push_back(train::parse_source(source));
  set_num_threads(threads);
  eval_options.corpus = corpus;
  eval_options.texts.assign(texts.begin(), texts.end());
  eval_options.compare_attention = !msa_only;

  const Checkpoint checkpoint = Checkpoint::open(model);
  eval::Evaluator evaluator(checkpoint, eval_options);
  const std::vector<eval::Measure> measures = evaluator.run([](const eval::Measure& m) {
    fmt::print(stderr, "{} ({}): {:.3f} {}\n", m.name, m.attention, m.value, m.unit);
  });
  M3_CHECK(!measures.empty(), "no measure's name contains '{}'", fmt::join(eval_options.filters, "' or '"));
  fmt::print("{}", json ? eval::measures_json(measures) : eval::measures_table(measures));
  if (!out.empty()) write_file_atomic(out, eval::measures_json(measures));
  return 0;
}

}  // namespace m3::cli
