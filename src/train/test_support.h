// A model and a run small enough for tests: T0 of training.md §1 made smaller, pictures and clips
// from the generator.
#pragma once
#include <unistd.h>

#include <filesystem>
#include <string>

#include "base/check.h"

namespace m3::train {

// Hidden 32, 2 layers, 2 heads, 4 experts, vision 32 wide; blocks of 16 tokens, 2 chosen. The
// tokenizer is the golden one.
inline std::string tiny_model_json() {
  return R"({"model_type": "minimax_m3_vl", "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
 "text_config": {
  "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
  "vocab_size": 1088, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "use_gemma_norm": true, "use_qk_norm": true,
  "qk_norm_type": "per_head", "rope_theta": 5000000, "rotary_dim": 16, "partial_rotary_factor": 0.5,
  "hidden_act": "swigluoai", "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "dense_intermediate_size": 64,
  "intermediate_size": 32, "shared_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
  "n_shared_experts": 1, "scoring_func": "sigmoid", "use_routing_bias": true, "routed_scaling_factor": 2.0,
  "moe_layer_freq": [0, 1], "tie_word_embeddings": false, "num_mtp_modules": 0,
  "sparse_attention_config": {"use_sparse_attention": true, "sparse_attention_freq": [0, 1], "sparse_num_index_heads": 1,
   "sparse_index_dim": 32, "sparse_block_size": 16, "sparse_topk_blocks": 2, "sparse_local_block": 1,
   "sparse_init_block": 0, "sparse_score_type": "max", "sparse_disable_index_value": [0, 1]}},
 "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
  "patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "rope_mode": "3d",
  "rope_theta": 10000.0, "temporal_patch_size": 2, "spatial_merge_size": 2, "vision_segment_max_frames": 4,
  "projection_dim": 32},
 "projector_hidden_size": 32, "image_token_index": 1049, "video_token_index": 1050, "eos_token_id": 1044})";
}

inline std::string tiny_config_json(const std::string& output = "unused") {
  return fmt::format(R"({{"model": {}, "tokenizer": "{}", "output": "{}", "seed": 3, "steps": 12,
 "init": {{"scheme": "fan_in"}},
 "optimizer": {{"lr": 2e-3, "vision": {{"lr_factor": 0.5}}}},
 "schedule": {{"kind": "cosine", "warmup_steps": 2}},
 "stages": [{{"until": 1, "attention": "sparse"}}],
 "loss": {{"kl_weight": 0.2}},
 "sources": [{{"name": "cards", "family": "card", "count": 2}}, {{"name": "clips", "family": "clip", "count": 1}},
  {{"name": "chat", "family": "chat", "count": 2}}],
 "compute": {{"dtype": "f32", "micro_batch_tokens": 128, "micro_batch_patches": 512}},
 "save": {{"every": 4, "keep": 2}}}})",
                     tiny_model_json(), M3_SOURCE_DIR "/tests/golden/tokenizer/tiny", output);
}

// A folder that is removed at the end of the test.
class TestFolder {
 public:
  explicit TestFolder(const std::string& name)
      : path_(std::filesystem::temp_directory_path() /
              fmt::format("m3-{}-{}", name, static_cast<long>(::getpid()))) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }
  std::string str() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace m3::train
