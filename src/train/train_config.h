// The configuration of a training run: one JSON file (configs/train/*.json, docs/training.md), read
// strictly. An unknown key or a bad value is an error that names the key, what was found and what
// is allowed.
//
// Times are shares of the run: f = step / steps, from 0 to 1 (nano.md §4).
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "model/trainable_model.h"

namespace m3::synthetic {
enum class ClipKind;  // synthetic/clips.h
enum class ClipAsk;
enum class ClipEvents;
}  // namespace m3::synthetic

namespace m3::train {

// How the first weights are made (nano.md §2). kCheckpoint: read from a model folder.
struct InitConfig {
  enum class Scheme : uint8_t { kNormal, kFanIn, kCheckpoint };
  Scheme scheme = Scheme::kFanIn;
  double std = 0.02;                            // kNormal: of every matrix
  double embedding_std = 0.5, head_std = 0.02;  // kFanIn
  bool scale_residual = true;     // kFanIn: output matrices of blocks times 1 / sqrt(2 layers)
  bool positional_start = false;  // heads of layer 0 that look 1, 2, 3, 4 tokens back
  std::string checkpoint;         // kCheckpoint
};

// Each group has its own learning rate, clip norm and decay (training.md §10).
enum class Group : uint8_t { kText, kVision, kIndexer };
inline constexpr int kNumGroups = 3;
const char* group_name(Group group);  // "text", "vision", "indexer"

struct GroupConfig {
  double lr_factor = 1;
  double clip = 1;          // 0: no clipping
  double weight_decay = 0;  // of matrices; vectors never decay
  bool frozen = false;      // absent from the optimizer
};

struct OptimizerConfig {
  double lr = 0, beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  GroupConfig groups[kNumGroups];
  double embedding_decay = 0, head_decay = 0.1;
  DType moments = DType::kF32;
  double router_bias_step = 1e-3;
  bool router_bias_in_decay =
      true;  // false: the bias rests while the learning rate falls (training.md §8)
};

struct ScheduleConfig {
  enum class Kind : uint8_t { kCosine, kStableDecay, kConstant };
  Kind kind = Kind::kCosine;
  int64_t warmup_steps = 0;
  double final_factor = 0;   // of the peak rate, at the last step
  double decay_share = 0.2;  // kStableDecay: of the steps, at the end
};

// What the sparse layers do and who learns, until share `until` of the run (training.md §9, msa.md
// §8.5).
struct StageConfig {
  double until = 1;
  TrainStage attention = TrainStage::kSparse;
  Freeze freeze = Freeze::kNone;
  double indexer_lr_factor = 1;  // times the group's
};
const char* freeze_name(Freeze freeze);  // "none", "index_only", "frozen_index"

struct LossConfig {
  double kl_weight = 0;
  int64_t kl_min_tokens =
      0;  // documents of at most so many tokens have no KL (one block has nothing to select)
  double z_weight = 0;
  double balance_alpha = 0;        // of the sequence-wise balance loss of the experts
  bool detach_index_input = true;  // false only for the experiment of training.md §12.4
};

// One family of documents with its share of the batch.
struct SourceConfig {
  enum class Family : uint8_t { kCard, kPicture, kClip, kChat, kRepeat, kFacts, kText, kShards };
  std::string name;    // also names its random stream
  std::string log_as;  // sources of one such name share a line of the log
  Family family = Family::kText;
  int64_t count = 0;           // documents of a step that has any
  int64_t every = 1;           // steps
  double from = 0, until = 1;  // shares of the run
  double easy_until = 0;       // pictures, clips: easy with probability max(0, 1 - f / easy_until)
  double bare_until = 0,
         bare_min = 0;  // facts: without filler with probability max(bare_min, 1 - f / bare_until)
  bool full_prompt = false;  // behind the whole system text (not text, shards)
  synthetic::ClipKind clip_kind{};  // what clips show (kAny), which question they ask (kAny)
  synthetic::ClipAsk clip_ask{};
  synthetic::ClipEvents clip_events{};
  int frames = 8;           // of a clip
  int hold = 1, cells = 3;  // of a clip: frames that show one picture; cells a side
  bool timestamps = true;   // of half of the clips
  double tint = 0;          // of a clip's background
  int colour = -1;          // of all objects of a clip; -1: any
  bool repeat = false;       // the first step's documents again in every step (not shards)
  int64_t tokens = 256;      // text, facts: of a document, about
  int min_facts = 4, max_facts = 7, min_questions = 3, max_questions = 5;  // repeat: 4 to 9
  int num_names = 48, num_words = 121;  // facts, repeat: the first ones of synthetic/words.h
  double asked_share = 0;               // facts: if above 0, this share of the facts is asked
  std::string folder, split = "train";  // shards
};

struct ComputeConfig {
  DType dtype = DType::kBF16;  // of weights and activations; masters, gradients and moments are f32
  bool recompute = false;      // layers compute their activations again in the backward
  bool batch_invariant =
      true;  // false: oneDNN where it is faster; runs then repeat on one machine only
  int64_t micro_batch_tokens = 4096;  // of all replicas together
  int64_t micro_batch_patches = 4096;
  int replicas = 1;  // of the model, one thread each (replicas.h)
  int threads = 0;  // 0: all
};

struct GuardConfig {
  enum class Action : uint8_t { kSkip, kStop };
  Action non_finite = Action::kSkip;
  double spike_factor = 0;  // 0: off; a gradient norm above this many times its mean is a spike
  Action spike = Action::kSkip;
  int64_t max_skipped = 20;  // in a row; then the run stops
};

struct SaveConfig {
  int64_t every = 500;  // steps
  int keep = 2;
  int64_t keep_every = 0;  // steps whose checkpoint is never removed; 0: none
};

struct LogConfig {
  int64_t every = 10;           // steps: a line of means in the terminal
  int64_t attention_every = 0;  // steps: captured and oracle mass on a sample of queries; 0: never
};

struct TrainConfig {
  std::filesystem::path file;  // where it came from; paths in it start at the working folder
  std::string model_json;      // text of the model's config.json
  ModelConfig model;
  std::filesystem::path tokenizer, output,
      corpus;  // corpus: data folder of `text` and `facts`; may be empty
  uint64_t seed = 0;
  int64_t steps = 0;
  InitConfig init;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  std::vector<StageConfig> stages;
  LossConfig loss;
  std::vector<SourceConfig> sources;
  ComputeConfig compute;
  GuardConfig guard;
  SaveConfig save;
  LogConfig log;
  // What decides the weights, as canonical JSON: everything but output, threads, save and log. A
  // resumed run must have the same.
  std::string identity;
  std::string resolved;  // the whole file with the overrides, for the record
};

// One source alone, for m3 eval: as in "sources"; without "count" it has 1.
SourceConfig parse_source(const std::string& json);

// `overrides`: "optimizer.lr=1e-3", "sources.cards.count=4" (members of lists by name or number);
// the value is JSON, or else text. Throws Error naming file, key, value and what is wanted.
TrainConfig read_train_config(const std::filesystem::path& file,
                              const std::vector<std::string>& overrides = {});
TrainConfig parse_train_config(const std::string& json, const std::filesystem::path& file,
                               const std::vector<std::string>& overrides = {});

}  // namespace m3::train
