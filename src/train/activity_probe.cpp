#include "train/activity_probe.h"

#include <algorithm>
#include <cmath>

#include "train/attention_row.h"

namespace m3::train {
namespace {

std::vector<QueryRow> spread_queries(std::span<const int32_t> cu_seqlens, int num_queries) {
  const int64_t total = cu_seqlens.back(), count = std::min<int64_t>(total, num_queries);
  std::vector<QueryRow> queries;
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<int32_t>((2 * i + 1) * total / (2 * count));
    const auto next = std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), row);
    queries.push_back({row, *(next - 1)});
  }
  return queries;
}

// Root of the mean square of the rows' values; 0 without rows.
double rms_of(const Tensor& x_TC, const std::vector<uint8_t>& is_media, bool media) {
  const int64_t C = x_TC.dim(1);
  double sum = 0;
  int64_t count = 0;
  for (int64_t t = 0; t < x_TC.dim(0); ++t) {
    if ((is_media[t] != 0) != media) continue;
    for (int64_t c = 0; c < C; ++c) sum += std::pow(double{x_TC.ptr<float>()[t * C + c]}, 2);
    count += C;
  }
  return count > 0 ? std::sqrt(sum / static_cast<double>(count)) : 0;
}

// Share of the gates above the limit and of the other factors outside of it: they get no gradient.
double clamped_share(const MoeSaved& saved, float limit) {
  int64_t clamped = 0, count = 0;
  const auto look = [&](const Tensor& values, bool both_sides) {
    if (!values.defined()) return;
    for (int64_t i = 0; i < values.numel(); ++i) {
      const float value = values.ptr<float>()[i];
      clamped += value > limit || (both_sides && value < -limit);
    }
    count += values.numel();
  };
  look(saved.routed_gate, false);
  look(saved.shared_gate, false);
  look(saved.routed_up, true);
  look(saved.shared_up, true);
  return count > 0 ? static_cast<double>(clamped) / static_cast<double>(count) : 0;
}

// In nats, mean over the queries and all heads.
double mean_entropy(const TextConfig& config, const AttentionActs& acts,
                    const std::vector<QueryRow>& queries, bool selected) {
  double sum = 0;
  for (const QueryRow& query : queries) {
    for (int head = 0; head < config.num_heads; ++head) {
      for (const double p : attention_row(config, acts, query, head, selected))
        sum -= p > 0 ? p * std::log(p) : 0;
    }
  }
  return sum / static_cast<double>(queries.size() * config.num_heads);
}

}  // namespace

std::vector<LayerActivity> probe_activity(TrainableModel& model, const MicroBatch& batch,
                                          int num_queries) {
  const TextConfig& config = model.config().text;
  const std::vector<QueryRow> queries = spread_queries(batch.cu_seqlens, num_queries);
  std::vector<uint8_t> is_media(batch.ids_T.size());
  for (const TrainMedia& media : batch.media)
    for (const int32_t row : media.rows) is_media[row] = 1;
  std::vector<LayerActivity> out;
  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    const bool selected =
        config.is_sparse[layer.index] != 0 && model.options().stage == TrainStage::kSparse;
    LayerActivity& activity = out.emplace_back();
    activity.layer = layer.index;
    activity.text_rms = rms_of(layer.x_TC, is_media, false);
    activity.media_rms = rms_of(layer.x_TC, is_media, true);
    activity.clamped = clamped_share(layer.ffn->saved, config.swiglu_limit);
    activity.entropy = mean_entropy(config, *layer.attention, queries, selected);
  };
  model.forward_only(batch, &trace);
  return out;
}

}  // namespace m3::train
