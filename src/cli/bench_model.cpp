// m3 bench model: prefill and decode of a whole model with random weights (or a checkpoint), against the
// arithmetic and bandwidth bounds of the machine measured in the same run.
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "cli/bench.h"
#include "cli/options.h"
#include "formats/random_init.h"
#include "model/sequence_runner.h"

namespace m3::cli {

namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

struct BenchFlags {
  std::string config, prompt = "512,4096", decode_at = "0,4096", dtype = "bf16", attention = "msa", json;
  int64_t chunk = 512, runs = 3, decode_tokens = 16;
  int threads = 0;
};

// Random weights live in a temporary folder, removed at the end.
class TemporaryCheckpoint {
 public:
  explicit TemporaryCheckpoint(const fs::path& config)
      : folder_(fs::temp_directory_path() / fmt::format("m3-bench-{}", ::getpid())) {
    write_random_checkpoint(read_file(config), config.string(), folder_, init_normal(1), {}, Progress::Mode::kAuto);
  }
  ~TemporaryCheckpoint() {
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
  }
  TemporaryCheckpoint(const TemporaryCheckpoint&) = delete;
  TemporaryCheckpoint& operator=(const TemporaryCheckpoint&) = delete;
  const fs::path& folder() const { return folder_; }

 private:
  fs::path folder_;
};

double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Keys that one query at position p reads, and the work and bytes that follow (msa.md §13).
class Costs {
 public:
  Costs(const ModelConfig& config, AttentionMode mode, int bytes_per_value)
      : text_(config.text),
        msa_(mode == AttentionMode::kMsa || mode == AttentionMode::kDsa),
        sparse_(mode != AttentionMode::kFull),
        bytes_(bytes_per_value),
        active_(count_parameters(config, tensor_table(config)).active) {}

  double prefill_flop(int64_t tokens) const {
    double pairs_sparse = 0, pairs_full = 0;
    for (int64_t p = 0; p < tokens; ++p) {
      pairs_full += static_cast<double>(p + 1);
      pairs_sparse += static_cast<double>(visible(p));
    }
    const double head = 2.0 * text_.vocab_size * text_.hidden_size;  // of the last token only
    const double per_pair = 4.0 * text_.num_heads * text_.head_dim;
    const double index = msa_ ? 2.0 * text_.num_kv_heads * text_.index_dim * pairs_full * num_sparse() : 0;
    return 2.0 * active_ * tokens + head + per_pair * (pairs_full * num_full() + pairs_sparse * num_sparse()) + index;
  }
  double decode_bytes(int64_t context) const {
    const double weights = 2.0 * (active_ + static_cast<double>(text_.vocab_size) * text_.hidden_size);
    const double per_key = 2.0 * text_.num_kv_heads * text_.head_dim * bytes_;
    const double index = msa_ ? static_cast<double>(context) * text_.index_dim * bytes_ * num_sparse() : 0;
    return weights + per_key * (static_cast<double>(context) * num_full() + static_cast<double>(visible(context)) * num_sparse()) +
           index;
  }

 private:
  // One query's own block is on average half full.
  int64_t visible(int64_t p) const {
    const int64_t budget = int64_t{text_.topk_blocks} * text_.block_size;
    return sparse_ && p >= budget ? budget - text_.block_size + p % text_.block_size + 1 : p + 1;
  }
  int num_sparse() const { return text_.num_sparse_layers(); }
  int num_full() const { return text_.num_layers - num_sparse(); }

  const TextConfig& text_;
  bool msa_, sparse_;
  int bytes_;
  double active_;
};

class ModelBench {
 public:
  ModelBench(const Checkpoint& checkpoint, const BenchFlags& flags, int64_t longest)
      : flags_(flags), checkpoint_(checkpoint) {
    ModelOptions options;
    options.decoder.dtype = flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
    for (const AttentionMode mode : {AttentionMode::kMsa, AttentionMode::kFull, AttentionMode::kWindow, AttentionMode::kDsa}) {
      if (flags.attention == attention_mode_name(mode)) options.decoder.attention = mode;
    }
    options.step = {std::min(flags.chunk, longest), 1, 1, longest};
    const int64_t before = resident_bytes();
    model_.emplace(checkpoint, options);
    model_->add_to_plan(plan_);
    const TextConfig& text = checkpoint.config().text;
    const int64_t pages = (longest + text.block_size - 1) / text.block_size;
    plan_.add("KV cache", KvCache::bytes(text, pages, options.decoder.dtype, uses_index(options.decoder.attention)));
    plan_.add("program", before);
    model_->load();
    sequence_.emplace(*model_, longest);
    Philox rng(2);
    for (int64_t i = 0; i < longest; ++i) ids_.push_back(static_cast<int32_t>(rng.below(text.vocab_size)));
  }

  // Seconds of the fastest run.
  double prefill(int64_t tokens) {
    double best = 1e30;
    for (int64_t run = 0; run < flags_.runs; ++run) {
      sequence_->rewind();
      best = std::min(best, seconds_of([&] { feed_to(tokens); }));
    }
    return best;
  }

  // Median seconds of a token; the prompt before it is computed first (untimed).
  double decode(int64_t context) {
    if (sequence_->length() < context) feed_to(context);
    sequence_->rewind(context);
    std::vector<double> times;
    for (int64_t i = 0; i < flags_.decode_tokens; ++i) {
      times.push_back(seconds_of([&] { sequence_->feed(std::span(ids_).subspan(context + i, 1)); }));
    }
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  const MemoryPlan& plan() const { return plan_; }
  Costs costs() const {
    const DecoderOptions& options = model_->options().decoder;
    return Costs(checkpoint_.config(), options.attention, static_cast<int>(dtype_bytes(options.dtype)));
  }

 private:
  void feed_to(int64_t tokens) {
    while (sequence_->length() < tokens) {
      const int64_t begin = sequence_->length(), count = std::min(flags_.chunk, tokens - begin);
      sequence_->feed(std::span(ids_).subspan(begin, count));
    }
  }

  const BenchFlags& flags_;
  const Checkpoint& checkpoint_;
  std::optional<Model> model_;
  std::optional<SequenceRunner> sequence_;
  MemoryPlan plan_;
  std::vector<int32_t> ids_;
};

BenchFlags parse(const Args& args) {
  BenchFlags flags;
  Options options("bench model",
                  "Times prefill (fastest run) and decode (median token) of a whole model, beside the least time that this "
                  "machine's measured arithmetic and memory bandwidth allow, and peak memory beside the plan.",
                  "m3 bench model benchmarks/workloads/cpu_270m_config.json --prompt 512,4096 --decode-at 0,4096");
  options.positional("CONFIG", flags.config, "config.json (random weights) or a checkpoint folder");
  options.add("--prompt", flags.prompt, "prompt lengths");
  options.add("--decode-at", flags.decode_at, "tokens already in the cache");
  options.add("--decode-tokens", flags.decode_tokens, "tokens per decode measurement");
  options.add("--runs", flags.runs, "runs per prompt length");
  options.add("--chunk", flags.chunk, "prompt tokens computed at a time");
  options.choice("--dtype", flags.dtype, {"bf16", "f32"}, "arithmetic and cache");
  options.choice("--attention", flags.attention, {"msa", "full", "window", "dsa"}, "as in m3 run");
  options.threads(flags.threads);
  options.add("--json", flags.json, "write the results to this file");
  options.parse(args);
  if (flags.runs < 1 || flags.chunk < 1 || flags.decode_tokens < 1) {
    throw UsageError{"--runs, --chunk and --decode-tokens must be at least 1"};
  }
  return flags;
}

}  // namespace

int bench_model(const Args& args) {
  const BenchFlags flags = parse(args);
  const std::vector<int64_t> prompts = parse_numbers("--prompt", flags.prompt);
  const std::vector<int64_t> contexts = parse_numbers("--decode-at", flags.decode_at);
  set_num_threads(flags.threads);
  int64_t longest = 1;
  for (const int64_t tokens : prompts) longest = std::max(longest, tokens);
  for (const int64_t tokens : contexts) longest = std::max(longest, tokens + flags.decode_tokens);

  CeilingWatch ceilings;
  reset_peak_resident_bytes();  // what measuring the ceilings took is not the model's
  std::optional<TemporaryCheckpoint> temporary;
  if (!fs::is_directory(flags.config)) temporary.emplace(flags.config);
  const Checkpoint checkpoint = Checkpoint::open(temporary ? temporary->folder() : fs::path(flags.config));
  ModelBench bench(checkpoint, flags, longest);
  const Costs costs = bench.costs();
  const auto gflops_of = [&](const MachineCeiling& ceiling) {
    // Some processors multiply bf16 pairs at half the rate of fp32: the bound is what the machine can do at best.
    return flags.dtype == "bf16" ? std::max(ceiling.bf16_gflops, ceiling.fp32_gflops) : ceiling.fp32_gflops;
  };
  fmt::print("{}", bench.plan().str());

  int64_t peak = 0;
  const auto ceiling_beside = [&] {
    peak = std::max(peak, peak_resident_bytes());
    const MachineCeiling ceiling = ceilings.beside();
    reset_peak_resident_bytes();
    return ceiling;
  };
  ordered_json results = ordered_json::array();
  for (const int64_t tokens : prompts) {
    const double seconds = bench.prefill(tokens), gflops = gflops_of(ceiling_beside());
    const double bound = costs.prefill_flop(tokens) / gflops / 1e9;
    fmt::print("prefill {:>7}: {:8.1f} tok/s; bound at {:.0f} GFLOP/s {:8.1f}, {:3.0f} % of it\n", tokens, tokens / seconds,
               gflops, tokens / bound, 100 * bound / seconds);
    std::fflush(stdout);
    results.push_back({{"what", "prefill"}, {"tokens", tokens}, {"seconds", seconds}, {"tokens_per_second", tokens / seconds},
                       {"ceiling_gflops", gflops}, {"bound_tokens_per_second", tokens / bound}, {"share", bound / seconds}});
  }
  for (const int64_t context : contexts) {
    const double seconds = bench.decode(context), gb_s = ceiling_beside().read_gb_s;
    const double bound = costs.decode_bytes(context) / gb_s / 1e9;
    fmt::print("decode at {:>7}: {:6.2f} ms; bound at {:.1f} GB/s {:6.2f} ms, {:3.0f} % of it\n", context, seconds * 1e3,
               gb_s, bound * 1e3, 100 * bound / seconds);
    std::fflush(stdout);
    results.push_back({{"what", "decode"}, {"context", context}, {"ms", seconds * 1e3}, {"ceiling_gb_s", gb_s}, {"bound_ms", bound * 1e3},
                       {"share", bound / seconds}});
  }
  fmt::print("peak memory {} of {} planned\n", format_bytes(static_cast<double>(peak)),
             format_bytes(static_cast<double>(bench.plan().total_bytes())));
  if (!flags.json.empty()) {
    ordered_json document = bench_head("bench model", args, ceilings.first());
    document["settings"] = {{"dtype", flags.dtype}, {"attention", flags.attention}, {"chunk", flags.chunk}, {"runs", flags.runs}};
    document["results"] = results;
    document["memory"] = {{"plan_bytes", bench.plan().total_bytes()}, {"peak_bytes", peak}};
    write_file_atomic(flags.json, document.dump(1) + "\n");
  }
  return 0;
}

}  // namespace m3::cli
