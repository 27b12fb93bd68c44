// Measures a model on documents that training never drew (nano.md §1): exact answers about
// generated pictures, clips, hidden facts and chat; bits per byte of text; what the picture is
// worth (training.md §12.8).
//
// Exact: every token of the answer is the arg-max after the true prefix, which is the same as exact
// greedy decoding.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "formats/checkpoint.h"
#include "train/batch.h"

namespace m3::eval {

// How the sparse layers attend, with the same weights. kRandomIndex: selection by index projections
// drawn at random.
enum class Attention : uint8_t { kMsa, kRandomIndex, kWindow, kDense, kDsa };
const char* attention_name(Attention attention);  // "msa", "random index", "window", "dense", "dsa"

struct Measure {
  std::string name, attention = "msa";
  double value = 0;
  std::string unit;    // "%" of documents, "bits/byte", "bits"
  double chance = -1;  // in the same unit; below 0: none is known
  int64_t count = 0;   // documents, or bytes
};

struct EvalOptions {
  int64_t count = 128;      // documents a test
  uint64_t seed = 1000003;  // of the documents; their items are held out whatever it is
  std::filesystem::path
      corpus;  // data folder: facts and text from its held-out pages; empty: none of these
  std::vector<std::filesystem::path> texts;  // files for bits per byte
  int64_t max_text_bytes = 200000;
  std::vector<int64_t> fact_tokens = {256, 512, 1024, 2048, 4096};
  std::vector<std::string> filters;         // only measures whose name contains one of them; empty: all
  Attention attention = Attention::kMsa;    // of all measures
  bool compare_attention = true;  // with kMsa: facts also with random index, window and dense attention
  int clip_frames = 8;
  // Generated sources (docs/training.md) to measure beside the fixed ones. fresh_sources: fresh documents of items
  // that training draws too, else of held-out items. (Of few names and words a model learns which pairs never occur.)
  std::vector<train::SourceConfig> sources;
  bool fresh_sources = false;
};

class Evaluator {
 public:
  // The checkpoint must outlive it. Documents are run in bf16 as the weights are stored.
  Evaluator(const Checkpoint& checkpoint, const EvalOptions& options);
  ~Evaluator();

  // All measures that the model and the options allow, in a fixed order; `on_measure` sees each as
  // it comes.
  std::vector<Measure> run(const std::function<void(const Measure&)>& on_measure = {});

 private:
  class Runner;
  using Sampler = std::function<data::Sample(uint64_t index)>;

  bool wants(const std::string& name) const;
  void report(Measure measure);
  void exact(const std::string& name, double chance, const Sampler& sampler);  // options_.attention
  void exact(const std::string& name, double chance, const Sampler& sampler, Attention attention);
  void measure_cards();
  void measure_pictures();
  void measure_clips();
  void measure_facts();
  void measure_source(const train::SourceConfig& source);
  void measure_text();
  void measure_image_gap(const std::string& name, const Sampler& describe);

  EvalOptions options_;
  Tokenizer tokenizer_;
  data::SampleBuilder builder_;
  std::shared_ptr<const synthetic::TextPool> pool_;
  std::unique_ptr<Runner> runner_;
  std::vector<Measure> measures_;
  std::function<void(const Measure&)> on_measure_;
};

std::string measures_table(const std::vector<Measure>& measures);
std::string measures_json(const std::vector<Measure>& measures);

}  // namespace m3::eval
