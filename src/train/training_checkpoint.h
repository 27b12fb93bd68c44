// Checkpoints of a training run (training.md §15, docs/training.md). OUTPUT holds
//
//   step-00000500/            a model folder of the released form: m3 run and m3 eval take it as is
//     config.json model.safetensors tokenizer.json ...
//     training/
//       optimizer.safetensors   master.NAME f32 of every parameter; m.NAME, v.NAME of those with
//                               optimizer state
//       state.json              step, updates, position in the data, guard, totals, seed
//       config.json             the run's configuration
//       identity.json           what decides the weights; a resumed run must have the same
//       manifest.json           bytes and SHA-256 of every file of the checkpoint; written last
//   .saving/                  what is being written or removed; a checkpoint appears by one rename
//
// Killed at any moment, or with the disk full, a run leaves complete checkpoints only.
#pragma once
#include <filesystem>
#include <optional>

#include "train/batch.h"
#include "train/optimizer.h"

namespace m3::train {

// A key of the identity that was changed on resume, by request; values as JSON, "" where absent.
struct ConfigChange {
  int64_t step = 0;  // from this step on
  std::string key, from, to;

  JsonValue to_json() const;
};

// What decides the weights: the configuration's identity, and of every data folder that it reads
// the SHA-256 of its manifest, as "manifests.corpus" and "manifests.SOURCE".
std::string run_identity(const TrainConfig& config);

// Everything but the parameters that decides the rest of the run. Random numbers are functions of
// seed and step.
struct TrainingState {
  int64_t step = 0;  // steps done
  std::array<int64_t, kNumGroups> num_updates = {};
  std::array<double, kNumGroups> mean_norm = {};  // of the guard
  int64_t num_skipped = 0, num_skipped_in_row = 0;
  int64_t num_tokens = 0, num_documents = 0;
  double flops = 0, seconds = 0;
  StreamStates streams;
  std::vector<ConfigChange> changes;

  std::string to_json() const;
  static TrainingState from_json(const std::string& text, const std::string& file);
};

// One run at a time in a folder: a second one, in any process, is refused while this object lives.
class RunLock {
 public:
  explicit RunLock(const std::filesystem::path& output);  // makes the folder
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int fd_ = -1;
};

class CheckpointStore {
 public:
  CheckpointStore(std::filesystem::path output, const SaveConfig& config)
      : output_(std::move(output)), config_(config) {}

  // Steps of which there is a folder, ascending. Not necessarily sound ones.
  std::vector<int64_t> steps() const;
  std::filesystem::path folder(int64_t step) const;

  // `companions`: copied beside the weights (the tokenizer's files). Removes what SaveConfig does
  // not keep. Throws Error if it cannot be written; older checkpoints are then untouched.
  void save(const TrainConfig& config, const Parameters& parameters, const TrainingState& state,
            const std::vector<std::filesystem::path>& companions);

  // The newest sound checkpoint, into `parameters`. A broken one is named, with the reason, in a
  // warning, and the one before it is tried. Throws Error if there is none, or if the run's
  // identity differs in a key that is neither in `may_change` nor below one of them; what differs
  // in these is added to TrainingState::changes.
  TrainingState load_latest(const TrainConfig& config, Parameters& parameters,
                            const std::vector<std::string>& may_change = {});

 private:
  std::filesystem::path saving() const { return output_ / ".saving"; }
  void prune();

  std::filesystem::path output_;
  SaveConfig config_;
};

// Compares every file with training/manifest.json; throws Error naming the first that is missing,
// cut or changed.
void verify_checkpoint(const std::filesystem::path& folder);

}  // namespace m3::train
