#include "train/flops.h"

#include <algorithm>

namespace m3::train {

int64_t causal_pairs(int64_t tokens) {
  return tokens * (tokens + 1) / 2;
}

int64_t selected_pairs(int64_t tokens, int64_t block_tokens, int64_t blocks) {
  int64_t pairs = 0;
  for (int64_t begin = 0, block = 0; begin < tokens; begin += block_tokens, ++block) {
    const int64_t rows = std::min(block_tokens, tokens - begin);
    pairs += rows * std::min(block, blocks - 1) * block_tokens + causal_pairs(rows);
  }
  return pairs;
}

namespace {

struct TextWeightCounts {
  int64_t active = 0, index = 0;  // of one token, without embedding and head
};

TextWeightCounts count_text(const TextConfig& c) {
  TextWeightCounts out;
  const int64_t hidden = c.hidden_size;
  for (int layer = 0; layer < c.num_layers; ++layer) {
    out.active += hidden * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads);
    if (c.is_sparse[layer]) out.index += hidden * c.index_dim * (c.num_kv_heads + 1);
    if (c.is_moe[layer]) {
      out.active += hidden * c.num_experts +
                    3 * hidden *
                        (int64_t{c.num_experts_per_token} * c.expert_intermediate_size +
                         c.shared_intermediate_size);
    } else {
      out.active += 3 * hidden * c.dense_intermediate_size;
    }
  }
  return out;
}

double vision_flops(const ModelConfig& config, const TrainMedia& media) {
  const VisionConfig& v = *config.vision;
  const int64_t w = v.hidden_size, projection = v.projection_dim;
  const int64_t per_patch = w * v.patch_numel() +
                            v.num_layers * (4 * w * w + 2 * w * v.intermediate_size) +
                            projection * (w + projection);
  const int64_t per_merged = projection * (v.merge_factor() * projection + projection);
  int64_t pairs = 0;
  for (const VisionGrid& segment : vision_segments(v, media.grid))
    pairs += segment.num_patches() * segment.num_patches();
  const int64_t patches = media.grid.num_patches();
  return 6.0 * static_cast<double>(patches * per_patch + patches / v.merge_factor() * per_merged) +
         14.0 * static_cast<double>(v.num_layers * w * pairs);
}

}  // namespace

void FlopCount::add(const FlopCount& other) {
  text += other.text;
  head += other.head;
  attention += other.attention;
  index += other.index;
  vision += other.vision;
}

FlopCount train_flops(const ModelConfig& config, const TrainOptions& options,
                      const MicroBatch& batch) {
  const TextConfig& c = config.text;
  const TextWeightCounts weights = count_text(c);
  const bool trains_backbone = options.freeze != Freeze::kIndexOnly;
  const bool has_index = teaches_index(options.stage) || options.stage == TrainStage::kDsa;
  const bool has_kl = teaches_index(options.stage) && options.freeze != Freeze::kFrozenIndex;
  const double num_sparse = c.num_sparse_layers(), num_full = c.num_layers - num_sparse;
  const double head_width = static_cast<double>(c.num_heads) * c.head_dim;
  const double attention_pass = trains_backbone ? 14 : 4, weight_pass = trains_backbone ? 6 : 2;

  FlopCount out;
  const double rows = static_cast<double>(batch.ids_T.size());
  out.text = weight_pass * rows * static_cast<double>(weights.active);
  if (has_index) out.index = (has_kl ? 4 : 2) * rows * static_cast<double>(weights.index);
  for (const int32_t target : batch.targets_T) {
    if (target >= 0) out.head += weight_pass * static_cast<double>(c.hidden_size) * c.vocab_size;
  }
  for (size_t i = 0; i + 1 < batch.cu_seqlens.size(); ++i) {
    const int64_t tokens = batch.cu_seqlens[i + 1] - batch.cu_seqlens[i];
    const double causal = static_cast<double>(causal_pairs(tokens));
    const double selected =
        static_cast<double>(selected_pairs(tokens, c.block_size, c.topk_blocks));
    const bool dense = options.stage == TrainStage::kWarmup || options.stage == TrainStage::kFull;
    const double visible = dense ? causal : selected;
    out.attention += attention_pass * head_width * (num_full * causal + num_sparse * visible);
    if (options.stage == TrainStage::kSparse || options.stage == TrainStage::kDsa) {
      out.index += num_sparse * 2 * c.num_kv_heads * c.index_dim * causal;
    }
    if (has_kl && tokens > options.kl_min_tokens) {
      out.index += num_sparse * 2 * (head_width + 3.0 * c.index_dim * c.num_kv_heads) * visible;
    }
  }
  for (const TrainMedia& media : batch.media) out.vision += vision_flops(config, media);
  return out;
}

}  // namespace m3::train
