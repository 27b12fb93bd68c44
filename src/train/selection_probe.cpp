#include "train/selection_probe.h"

#include <algorithm>

#include "train/attention_row.h"

namespace m3::train {
namespace {

std::vector<QueryRow> sample_queries(const TextConfig& config,
                                     std::span<const int32_t> cu_seqlens, int num_queries) {
  std::vector<QueryRow> all;
  const int32_t budget = config.topk_blocks * config.block_size;  // earlier rows see all there is
  for (size_t i = 0; i + 1 < cu_seqlens.size(); ++i) {
    for (int32_t row = cu_seqlens[i] + budget; row < cu_seqlens[i + 1]; ++row)
      all.push_back({row, cu_seqlens[i]});
  }
  std::vector<QueryRow> chosen;
  const size_t count = std::min(all.size(), static_cast<size_t>(num_queries));
  for (size_t i = 0; i < count; ++i) chosen.push_back(all[(2 * i + 1) * all.size() / (2 * count)]);
  return chosen;
}

// Attention mass of each block, mean over the heads of group r.
std::vector<double> block_mass(const TextConfig& c, const AttentionActs& acts,
                               const QueryRow& query, int group) {
  std::vector<double> mass(
      static_cast<size_t>((query.num_keys() + c.block_size - 1) / c.block_size), 0.0);
  for (int i = 0; i < c.heads_per_group(); ++i) {
    const std::vector<double> row =
        attention_row(c, acts, query, group * c.heads_per_group() + i, false);
    for (size_t j = 0; j < row.size(); ++j) mass[j / c.block_size] += row[j] / c.heads_per_group();
  }
  return mass;
}

}  // namespace

std::vector<SelectionQuality> probe_selection(TrainableModel& model, const MicroBatch& batch,
                                              int num_queries) {
  const TextConfig& config = model.config().text;
  const std::vector<QueryRow> queries = sample_queries(config, batch.cu_seqlens, num_queries);
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
    const int64_t K = config.topk_blocks;
    for (const QueryRow& query : queries) {
      for (int r = 0; r < config.num_kv_heads; ++r) {
        const std::vector<double> mass = block_mass(config, *layer.attention, query, r);
        std::vector<size_t> best(mass.size());
        for (size_t b = 0; b < best.size(); ++b) best[b] = b;
        // Forced blocks are forced here too (msa.md §8.6).
        const auto forced = [&](size_t b) {
          return b + config.local_blocks >= mass.size() ||
                 b < static_cast<size_t>(config.init_blocks);
        };
        std::stable_sort(best.begin(), best.end(), [&](size_t a, size_t b) {
          return forced(a) != forced(b) ? forced(a) : mass[a] > mass[b];
        });
        best.resize(std::min(best.size(), static_cast<size_t>(K)));
        double best_mass = 0, found_mass = 0;
        for (const size_t b : best) best_mass += mass[b];
        for (const int32_t id : selected_blocks(config, *layer.attention, query, r)) {
          quality.captured += mass[id];
          if (std::find(best.begin(), best.end(), static_cast<size_t>(id)) == best.end()) continue;
          quality.block_recall += 1;
          found_mass += mass[id];
        }
        quality.oracle += best_mass;
        quality.score_recall += found_mass / best_mass;
      }
    }
    const double count = static_cast<double>(queries.size()) * config.num_kv_heads;
    quality.captured /= count;
    quality.oracle /= count;
    quality.score_recall /= count;
    quality.block_recall /= count * static_cast<double>(K);
    out.push_back(quality);
  };
  model.forward_only(batch, &trace);
  model.set_options(before);
  return out;
}

}  // namespace m3::train
