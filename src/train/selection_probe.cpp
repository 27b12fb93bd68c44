#include "train/selection_probe.h"

#include <algorithm>
#include <cmath>

namespace m3::train {
namespace {

struct Query {
  int32_t row, first;  // of the micro-batch: the query, and the first token of its document
};

std::vector<Query> sample_queries(const TextConfig& config, const std::vector<int32_t>& cu_seqlens, int num_queries) {
  std::vector<Query> all;
  const int32_t budget = config.topk_blocks * config.block_size;  // earlier rows see all there is
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    for (int32_t row = cu_seqlens[i] + budget; row < cu_seqlens[i + 1]; ++row) all.push_back({row, cu_seqlens[i]});
  }
  std::vector<Query> chosen;
  const size_t count = std::min(all.size(), static_cast<size_t>(num_queries));
  for (size_t i = 0; i < count; ++i) chosen.push_back(all[(2 * i + 1) * all.size() / (2 * count)]);
  return chosen;
}

float at(const Tensor& tensor, int64_t index) {
  return tensor.dtype() == DType::kBF16 ? to_float(static_cast<const bf16*>(tensor.data())[index])
                                        : static_cast<const float*>(tensor.data())[index];
}

// Attention mass of each block, mean over the heads of group r.
std::vector<double> block_mass(const TextConfig& c, const AttentionActs& acts, const Query& query, int r) {
  const int64_t D = c.head_dim, H = c.num_heads, R = c.num_kv_heads, G = c.heads_per_group();
  const int64_t num_keys = query.row - query.first + 1;
  std::vector<double> mass(static_cast<size_t>((num_keys + c.block_size - 1) / c.block_size), 0.0), logits(static_cast<size_t>(num_keys));
  for (int64_t h = r * G; h < (r + 1) * G; ++h) {
    double largest = -INFINITY, sum = 0;
    for (int64_t j = 0; j < num_keys; ++j) {
      double dot = 0;
      for (int64_t d = 0; d < D; ++d) dot += double{at(acts.q_THD, (query.row * H + h) * D + d)} * at(acts.k_TRD, ((query.first + j) * R + r) * D + d);
      logits[j] = dot / std::sqrt(static_cast<double>(D));
      largest = std::max(largest, logits[j]);
    }
    for (double& logit : logits) sum += logit = std::exp(logit - largest);
    for (int64_t j = 0; j < num_keys; ++j) mass[j / c.block_size] += logits[j] / sum / static_cast<double>(G);
  }
  return mass;
}

}  // namespace

std::vector<SelectionQuality> probe_selection(TrainableModel& model, const PackedDocuments& pack, int num_queries) {
  const TextConfig& config = model.config().text;
  const std::vector<Query> queries = sample_queries(config, pack.cu_seqlens(), num_queries);
  std::vector<SelectionQuality> out;
  if (queries.empty() || config.num_sparse_layers() == 0) return out;
  const TrainOptions before = model.options();
  TrainOptions sparse = before;
  sparse.stage = TrainStage::kSparse;
  sparse.freeze = Freeze::kNone;
  model.set_options(sparse);

  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    if (!config.is_sparse[layer.index]) return;
    SelectionQuality quality;
    quality.layer = layer.index;
    const int32_t* ids_RTK = layer.attention->lists.ptr<int32_t>();
    const int64_t T = static_cast<int64_t>(pack.num_tokens()), K = config.topk_blocks;
    for (const Query& query : queries) {
      for (int r = 0; r < config.num_kv_heads; ++r) {
        const std::vector<double> mass = block_mass(config, *layer.attention, query, r);
        std::vector<size_t> best(mass.size());
        for (size_t b = 0; b < best.size(); ++b) best[b] = b;
        std::stable_sort(best.begin(), best.end(), [&](size_t a, size_t b) { return mass[a] > mass[b]; });
        best.resize(std::min(best.size(), static_cast<size_t>(K)));
        for (const size_t b : best) quality.oracle += mass[b];
        for (int64_t k = 0; k < K; ++k) {
          const int32_t id = ids_RTK[(r * T + query.row) * K + k];
          if (id < 0) break;
          quality.captured += mass[id];
          quality.block_recall += std::find(best.begin(), best.end(), static_cast<size_t>(id)) != best.end();
        }
      }
    }
    const double count = static_cast<double>(queries.size()) * config.num_kv_heads;
    quality.captured /= count;
    quality.oracle /= count;
    quality.block_recall /= count * static_cast<double>(K);
    out.push_back(quality);
  };
  model.forward_only(pack.micro_batch(), &trace);
  model.set_options(before);
  return out;
}

}  // namespace m3::train
