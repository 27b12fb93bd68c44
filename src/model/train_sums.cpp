// Names, counts and sums of training; nothing here touches a tensor.
#include <algorithm>
#include <array>

#include "model/trainable_model.h"

namespace m3 {

namespace {

template <class T>
void add_vector(const std::vector<T>& from, std::vector<T>& to) {
  if (to.empty()) to.resize(from.size());
  M3_CHECK(from.empty() || from.size() == to.size(), "sums of {} and of {} layers cannot be added",
           to.size(), from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] += from[i];
}

}  // namespace

const char* train_stage_name(TrainStage stage) {
  static constexpr std::array<const char*, 5> kNames = {"warmup", "sparse", "full", "window",
                                                        "dsa"};
  return kNames[static_cast<size_t>(stage)];
}

AttentionMode attention_mode_of(TrainStage stage) {
  switch (stage) {
    case TrainStage::kWarmup:
    case TrainStage::kSparse:
      return AttentionMode::kMsa;
    case TrainStage::kFull:
      return AttentionMode::kFull;
    case TrainStage::kWindow:
      return AttentionMode::kWindow;
    case TrainStage::kDsa:
      return AttentionMode::kDsa;
  }
  M3_FAIL("unknown training stage {}", static_cast<int>(stage));
}

bool teaches_index(TrainStage stage) {
  return stage == TrainStage::kWarmup || stage == TrainStage::kSparse || stage == TrainStage::kDsa;
}

void Normalisers::add(const Normalisers& other) {
  target_weight += other.target_weight;
  num_tokens += other.num_tokens;
  kl_queries += other.kl_queries;
}

Normalisers normalisers_of(const MicroBatch& batch, const TrainOptions& options) {
  Normalisers n;
  n.num_tokens = static_cast<int64_t>(batch.ids_T.size());
  for (size_t t = 0; t < batch.targets_T.size(); ++t) {
    if (batch.targets_T[t] >= 0)
      n.target_weight += batch.target_weights_T.empty() ? 1.0 : batch.target_weights_T[t];
  }
  if (teaches_index(options.stage) && options.freeze != Freeze::kFrozenIndex) {
    for (size_t i = 1; i < batch.cu_seqlens.size(); ++i) {
      const int64_t length = batch.cu_seqlens[i] - batch.cu_seqlens[i - 1];
      if (length > options.kl_min_tokens) n.kl_queries += length;
    }
  }
  return n;
}

void TrainSums::add(const TrainSums& other) {
  logz_max = num_targets == 0
                 ? other.logz_max
                 : (other.num_targets == 0 ? logz_max : std::max(logz_max, other.logz_max));
  ce += other.ce;
  logz2 += other.logz2;
  logz += other.logz;
  num_targets += other.num_targets;
  counts.add(other.counts);
  add_vector(other.kl_L, kl_L);
  add_vector(other.balance_L, balance_L);
  add_vector(other.text_experts_LE, text_experts_LE);
  add_vector(other.media_experts_LE, media_experts_LE);
}

TrainLoss train_loss(const TextConfig& config, const TrainOptions& options, const TrainSums& sums) {
  TrainLoss loss;
  const auto over = [](double sum, double count) { return count > 0 ? sum / count : 0.0; };
  loss.ce = over(sums.ce, sums.counts.target_weight);
  loss.z = options.z_weight * over(sums.logz2, sums.counts.target_weight);
  const double groups = options.stage == TrainStage::kDsa ? 1 : config.num_kv_heads;
  for (const double kl : sums.kl_L) {
    loss.kl += options.lambda * over(kl, static_cast<double>(sums.counts.kl_queries) * groups);
  }
  for (const double balance : sums.balance_L) {
    loss.balance +=
        options.balance_alpha * over(balance, static_cast<double>(sums.counts.num_tokens));
  }
  return loss;
}

}  // namespace m3
