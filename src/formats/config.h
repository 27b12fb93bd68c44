// config.json of a model (model.md §1) as plain numbers, in one form whichever spelling the file uses:
// the released one (sparse_attention_config, moe_layer_freq) or that of transformers 5.x (index_*,
// layer_types, mlp_layer_types, rope_parameters).
//
// Reading is strict. Every value is bounded, so that no later size computed from a config overflows or
// runs away; a value that would change the computation in a way that we do not implement is refused by
// name with what was found and what is supported. Keys that we do not know are listed as ignored.
//
// Defaults, where a key may be absent: swiglu_beta 1, swiglu_alpha 1.702, swiglu_limit 7,
// rms_norm_eps 1e-6, routed_scaling_factor 2, sparse_local_block 1, sparse_init_block 0,
// vision: num_channels 3, temporal_patch_size 2, spatial_merge_size 2, vision_segment_max_frames 4,
// layer_norm_eps 1e-5, rope_theta 10000. Everything else must be present.
#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

// Symbols in brackets: the letters used in names of shapes.
struct TextConfig {
  int hidden_size = 0;             // [C]
  int num_layers = 0;              // [L]
  int num_heads = 0;               // [H] query heads
  int num_kv_heads = 0;            // [R] KV heads = GQA groups = index heads
  int head_dim = 0;                // [D]
  int vocab_size = 0;              // [V]
  int64_t max_position_embeddings = 0;
  float rms_norm_eps = 1e-6f;
  float rope_theta = 0;
  int rotary_dim = 0;              // leading dims of a head that are rotated; even
  float swiglu_alpha = 1.702f, swiglu_limit = 7.0f, swiglu_beta = 1.0f;
  int dense_intermediate_size = 0;   // of layers without experts; 0 if there are none
  int expert_intermediate_size = 0;  // [F] of one routed expert
  int shared_intermediate_size = 0;  // of the one shared expert
  int num_experts = 0;               // [E]
  int num_experts_per_token = 0;     // [K]
  float routed_scaling_factor = 2.0f;
  std::vector<uint8_t> is_moe;       // [L] 1: experts, 0: dense MLP
  std::vector<uint8_t> is_sparse;    // [L] 1: index branch and block-sparse attention, 0: full attention
  int index_dim = 0;                 // of the index branch; the number of index heads is num_kv_heads
  int block_size = 128;              // tokens; also the page of the cache where no layer is sparse
  int topk_blocks = 0;
  int local_blocks = 1, init_blocks = 0;

  int heads_per_group() const { return num_heads / num_kv_heads; }  // [G]
  int num_sparse_layers() const;
  int num_moe_layers() const;
  // Bytes of cache that one token takes in all layers (model.md §5.4): K and V in every layer, one index
  // key in every sparse one.
  int64_t cache_bytes_per_token(int bytes_per_element = 2) const;
};

struct VisionConfig {
  int hidden_size = 0, num_layers = 0, num_heads = 0, intermediate_size = 0;
  int patch_size = 14, num_channels = 3, temporal_patch_size = 2;
  int spatial_merge_size = 2;   // merged tokens are squares of so many patches
  int segment_max_frames = 4;   // temporal patches of one attention segment (model.md §8.4)
  float layer_norm_eps = 1e-5f, rope_theta = 10000.0f;
  int projection_dim = 0;       // = hidden_size of the text model

  int head_dim() const { return hidden_size / num_heads; }
  int patch_numel() const { return num_channels * temporal_patch_size * patch_size * patch_size; }
  int merge_factor() const { return spatial_merge_size * spatial_merge_size; }
};

// How matrices are stored. Each tensor's own type decides; this is what the files announce.
enum class Quantization { kNone, kMxfp8 };

struct ModelConfig {
  TextConfig text;
  std::optional<VisionConfig> vision;      // absent: a text-only model
  int image_token_id = -1, video_token_id = -1;
  Quantization quantization = Quantization::kNone;
  int eos_token_id = -1;                   // at the top level of the file; -1: not given
  int num_mtp_modules = 0;                 // announced; their tensors are skipped (model.md §10)
  std::vector<std::string> ignored_keys;   // keys that we do not know: "text_config.tokens_per_cake"
};

// Sampling defaults of generation_config.json; a key that is absent leaves the model card's value.
struct GenerationConfig {
  bool do_sample = true;
  double temperature = 1.0, top_p = 0.95;
  int top_k = 40;
  int bos_token_id = -1;                 // -1: not given
  std::vector<int> eos_token_ids;        // empty: not given
};

// `file` is the name for messages.
ModelConfig parse_model_config(std::string_view json, const std::string& file);
GenerationConfig parse_generation_config(std::string_view json, const std::string& file);

ModelConfig read_model_config(const std::filesystem::path& path);  // a config.json or the folder that holds one
GenerationConfig read_generation_config(const std::filesystem::path& folder);  // defaults if there is no file

}  // namespace m3
