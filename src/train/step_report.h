// What one optimizer step did: the record of the log (training.md §11).
#pragma once
#include <map>
#include <string>
#include <vector>

#include "train/batch.h"
#include "train/flops.h"
#include "train/optimizer.h"
#include "train/training_checkpoint.h"

namespace m3::train {

// Cross-entropy in nats, summed: answers (targets of weight above 1) and plain targets apart.
struct LossSum {
  double answer = 0, plain = 0;
  int64_t answers = 0, plains = 0;
  void add(double loss, bool is_answer);
  void add(const LossSum& other);
  double mean() const;  // over all targets; 0 without any
  double answer_mean() const { return answers > 0 ? answer / static_cast<double>(answers) : 0; }
};
using LossSums = std::map<std::string, LossSum>;

// How one layer's selection compares with dense attention, on a sample of queries (training.md §9).
struct SelectionQuality {
  int layer = 0;
  double captured = 0;  // dense attention mass on the selected blocks, mean over heads and queries
  double oracle = 0;    // the same for the best blocks
  double block_recall = 0;  // share of the best blocks that are selected
  double score_recall = 0;  // share of the best blocks' mass that lies in those selected
};

// What passes through one layer, on one pack (training.md §11).
struct LayerActivity {
  int layer = 0;
  double text_rms = 0, media_rms = 0;  // of the residual stream behind the layer; 0: no such rows
  double clamped = 0;                  // share of SwiGLU inputs beyond their limit
  // Of attention, means over a sample of queries and all heads: over the selected keys where MSA is
  // sparse, else over all visible ones.
  double entropy = 0;                        // nats
  double first_mass = 0, own_block_mass = 0;  // on the document's first token, the query's own block
  double largest_logit = 0;                  // of these queries, scaled
  double largest_q = 0, largest_k = 0;       // norm of a head's query or key of any row, before its norm
  // Means over a sample of text queries behind media: probability on the media's keys, and their
  // share of the visible ones. Below 0: no such query.
  double media_mass = -1, media_share = -1;
};

struct StepReport {
  int64_t step = 0;            // from 0
  std::string stage, skipped;  // skipped: why there was no update, else empty
  TrainLoss loss;
  TrainSums sums;
  LossSums by_source, by_context;  // context: what came before the target: text, image, video
  GroupUpdates groups;
  GradientNorms gradients;
  bool zeros_changed = false;  // the names in gradients.zeros are others than a step ago
  FlopCount flops;
  int64_t num_tokens = 0, num_media_tokens = 0, num_documents = 0, num_micro_batches = 0,
          num_patches = 0;
  int64_t num_broken = 0;  // documents left out so far
  double load_seconds = 0, model_seconds = 0, update_seconds = 0;
  std::vector<SelectionQuality> selection;
  std::vector<LayerActivity> layers;
  std::vector<std::string> documents;  // ids; of skipped steps only
  std::vector<ConfigChange> changes;   // of the configuration, on the resume before this step

  double seconds() const { return load_seconds + model_seconds + update_seconds; }
  std::string to_json(const ModelConfig& config, double ceiling_gflops) const;  // one line
};

// Adds the losses of a micro-batch's targets.
void add_losses(const TrainConfig& config, const std::vector<BatchDocument>& batch,
                const PackedDocuments& pack, const std::vector<float>& loss_T, StepReport& report);

// OUTPUT/train.jsonl. On resume the records of steps that will be done again are removed.
class StepLog {
 public:
  StepLog(const std::filesystem::path& file, int64_t first_step);
  ~StepLog();
  StepLog(const StepLog&) = delete;
  StepLog& operator=(const StepLog&) = delete;
  void write(const std::string& line);

 private:
  std::filesystem::path path_;
  int fd_ = -1;
};

}  // namespace m3::train
