// A training run: batches, gradients, updates, checkpoints, log (training.md). What `m3 train`
// does.
//
// The weights after step n are a function of the configuration (and of changes that a resume asked
// for) alone: not of threads, of when
// checkpoints were written or of how often the run was killed and resumed (compute.batch_invariant;
// it is the default).
#pragma once
#include <functional>
#include <memory>
#include <optional>

#include "train/batch.h"
#include "train/replicas.h"
#include "train/step_report.h"
#include "train/training_checkpoint.h"

namespace m3::train {

struct RunOptions {
  bool resume = false;
  // Keys of the configuration that may differ from the checkpoint's on resume: "steps",
  // "compute.replicas", "manifests.corpus".
  std::vector<std::string> may_change;
  int64_t stop_after = 0;  // steps done in all; then save and return. 0: the configuration's
  bool show_progress = false;
  std::function<void(const StepReport&)> on_step;
};

enum class RunEnd : uint8_t {
  kFinished,
  kStopped
};  // kStopped: by request_stop or stop_after; resume goes on

class Trainer {
 public:
  // Opens tokenizer and data, makes or loads the weights. Without `resume` the output folder must
  // hold no checkpoint.
  Trainer(const TrainConfig& config, const RunOptions& options);
  ~Trainer();

  RunEnd run();

  // What the machine can do, for MFU in the log; 0: not known.
  void set_ceiling(double gflops) { ceiling_gflops_ = gflops; }

  const TrainingState& state() const { return state_; }
  std::filesystem::path checkpoint_folder() const { return store_.folder(state_.step); }
  const Parameters& parameters() const { return parameters_; }
  MemoryPlan memory_plan() const;

  // Ends run() after the step that is being done, with a checkpoint. Safe in signal handlers.
  static void request_stop();

 private:
  StepReport do_step(Batch batch);
  void run_micro_batches(const Batch& batch, StepReport& report);
  void update(const Batch& batch, StepReport& report);
  void probe(const std::vector<const PackedDocuments*>& packs, StepReport& report);
  bool is_probed(int64_t step) const {
    return config_.log.attention_every > 0 && step % config_.log.attention_every == 0;
  }
  std::string reason_to_skip(const StepReport& report) const;
  void start_weights();
  void enter_stage(int64_t step);
  void make_models(const TrainOptions& options);
  std::vector<PackedDocuments> pack(const std::vector<BatchDocument>& documents,
                                    std::vector<int32_t> which, const TrainSizes& limits) const;
  std::vector<std::vector<PackedDocuments>> pack_for_replicas(
      const std::vector<BatchDocument>& documents, std::vector<int32_t>& which) const;
  void fit_model(const std::vector<PackedDocuments>& packs);
  void save();

  TrainConfig config_;
  RunOptions options_;
  RunLock lock_;
  double ceiling_gflops_ = 0;
  Tokenizer tokenizer_;
  std::vector<std::filesystem::path> companions_;
  Parameters parameters_;
  Optimizer optimizer_;
  CheckpointStore store_;
  TrainingState state_;
  TrainSizes sizes_, replica_sizes_;
  const StageConfig* stage_ = nullptr;
  std::optional<std::vector<std::string>> zero_gradients_;  // of the step before
  std::unique_ptr<TrainableModel> model_;  // runs on all threads
  std::unique_ptr<Replicas> replicas_;     // absent with one replica
  std::unique_ptr<BatchMaker> batches_;
  std::unique_ptr<StepLog> log_;
};

// Groups that any step of the run can move.
GroupFlags trained_groups(const TrainConfig& config);

}  // namespace m3::train
