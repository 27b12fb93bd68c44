#include "train/attention_row.h"

#include <algorithm>
#include <cmath>

namespace m3::train {

double value_at(const Tensor& tensor, int64_t index) {
  return tensor.dtype() == DType::kBF16 ? to_float(tensor.ptr<bf16>()[index])
                                        : tensor.ptr<float>()[index];
}

std::vector<int32_t> selected_blocks(const TextConfig& config, const AttentionActs& acts,
                                     const QueryRow& query, int group) {
  const int64_t T = acts.lists.dim(1), K = acts.lists.dim(2);
  const int32_t* ids_K = acts.lists.ptr<int32_t>() + (group * T + query.row) * K;
  std::vector<int32_t> blocks(ids_K, ids_K + K);
  std::erase_if(blocks, [](int32_t id) { return id < 0; });
  return blocks;
}

std::vector<double> logit_row(const TextConfig& config, const AttentionActs& acts,
                              const QueryRow& query, int head, bool selected) {
  const int64_t D = config.head_dim, H = config.num_heads, R = config.num_kv_heads;
  const int64_t group = head / config.heads_per_group(), num_keys = query.num_keys();
  std::vector<bool> visible(static_cast<size_t>(num_keys), !selected);
  if (selected) {
    for (const int32_t block : selected_blocks(config, acts, query, static_cast<int>(group))) {
      const int64_t begin = int64_t{block} * config.block_size,
                    end = std::min(num_keys, begin + config.block_size);
      for (int64_t j = begin; j < end; ++j) visible[j] = true;
    }
  }
  std::vector<double> row(static_cast<size_t>(num_keys), -INFINITY);
  for (int64_t j = 0; j < num_keys; ++j) {
    if (!visible[j]) continue;
    double dot = 0;
    for (int64_t d = 0; d < D; ++d) {
      dot += value_at(acts.q_THD, (query.row * H + head) * D + d) *
             value_at(acts.k_TRD, ((query.first + j) * R + group) * D + d);
    }
    row[j] = dot / std::sqrt(static_cast<double>(D));
  }
  return row;
}

std::vector<double> attention_row(const TextConfig& config, const AttentionActs& acts,
                                  const QueryRow& query, int head, bool selected) {
  std::vector<double> row = logit_row(config, acts, query, head, selected);
  softmax(row);
  return row;
}

void softmax(std::vector<double>& row) {
  const double largest = *std::max_element(row.begin(), row.end());
  double sum = 0;
  for (double& logit : row) sum += logit = std::exp(logit - largest);
  for (double& p : row) p /= sum;
}

}  // namespace m3::train
