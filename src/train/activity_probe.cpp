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

// Text rows behind media of their own document.
std::vector<QueryRow> queries_behind_media(std::span<const int32_t> cu_seqlens,
                                           const std::vector<uint8_t>& is_media, int num_queries) {
  std::vector<QueryRow> all, chosen;
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    bool behind = false;
    for (int32_t row = cu_seqlens[i]; row < cu_seqlens[i + 1]; ++row) {
      behind |= is_media[row] != 0;
      if (behind && is_media[row] == 0) all.push_back({row, cu_seqlens[i]});
    }
  }
  const size_t count = std::min(all.size(), static_cast<size_t>(num_queries));
  for (size_t i = 0; i < count; ++i) chosen.push_back(all[(2 * i + 1) * all.size() / (2 * count)]);
  return chosen;
}

void measure_attention(const TextConfig& config, const AttentionActs& acts,
                       const std::vector<QueryRow>& queries, bool selected, LayerActivity& out) {
  out.largest_logit = -INFINITY;
  for (const QueryRow& query : queries) {
    const int64_t own_block = (query.num_keys() - 1) / config.block_size * config.block_size;
    for (int head = 0; head < config.num_heads; ++head) {
      std::vector<double> row = logit_row(config, acts, query, head, selected);
      out.largest_logit = std::max(out.largest_logit, *std::ranges::max_element(row));
      softmax(row);
      out.first_mass += row[0];
      for (size_t j = 0; j < row.size(); ++j) {
        out.entropy -= row[j] > 0 ? row[j] * std::log(row[j]) : 0;
        if (static_cast<int64_t>(j) >= own_block) out.own_block_mass += row[j];
      }
    }
  }
  const double count = static_cast<double>(queries.size()) * config.num_heads;
  for (double* mean : {&out.entropy, &out.first_mass, &out.own_block_mass}) *mean /= count;
}

void measure_media(const TextConfig& config, const AttentionActs& acts,
                   const std::vector<QueryRow>& queries, const std::vector<uint8_t>& is_media,
                   bool selected, LayerActivity& out) {
  if (queries.empty()) return;
  double mass = 0, share = 0;
  for (const QueryRow& query : queries) {
    for (int head = 0; head < config.num_heads; ++head) {
      const std::vector<double> row = attention_row(config, acts, query, head, selected);
      double visible = 0, media = 0;
      for (size_t j = 0; j < row.size(); ++j) {
        const bool counts = is_media[query.first + j] != 0;
        visible += row[j] > 0;
        media += counts && row[j] > 0;
        mass += counts ? row[j] : 0;
      }
      share += media / visible;
    }
  }
  const double count = static_cast<double>(queries.size()) * config.num_heads;
  out.media_mass = mass / count;
  out.media_share = share / count;
}

// Of the rows of the last dimension.
double largest_norm(const Tensor& tensor) {
  const int64_t D = tensor.dim(2);
  double largest = 0;
  for (int64_t i = 0; i < tensor.numel(); i += D) {
    double sum = 0;
    for (int64_t d = 0; d < D; ++d) sum += std::pow(value_at(tensor, i + d), 2);
    largest = std::max(largest, sum);
  }
  return std::sqrt(largest);
}

}  // namespace

std::vector<LayerActivity> probe_activity(TrainableModel& model, const MicroBatch& batch,
                                          int num_queries) {
  const TextConfig& config = model.config().text;
  const std::vector<QueryRow> queries = spread_queries(batch.cu_seqlens, num_queries);
  std::vector<uint8_t> is_media(batch.ids_T.size());
  for (const TrainMedia& media : batch.media)
    for (const int32_t row : media.rows) is_media[row] = 1;
  const std::vector<QueryRow> behind_media =
      queries_behind_media(batch.cu_seqlens, is_media, num_queries);
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
    measure_attention(config, *layer.attention, queries, selected, activity);
    measure_media(config, *layer.attention, behind_media, is_media, selected, activity);
    activity.largest_q = largest_norm(layer.attention->q_raw_THD);
    activity.largest_k = largest_norm(layer.attention->k_raw_TRD);
  };
  model.forward_only(batch, &trace);
  return out;
}

}  // namespace m3::train
