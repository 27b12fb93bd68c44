#include "model/vision.h"

#include <algorithm>
#include <cmath>

#include "ops/elementwise/elementwise.h"
#include "ops/gelu/gelu.h"
#include "ops/layernorm/layernorm.h"
#include "ops/qknorm_rope/qknorm_rope.h"
#include "ops/vit_attend/vit_attend.h"

namespace m3 {

std::vector<VisionGrid> vision_segments(const VisionConfig& config, const VisionGrid& grid) {
  const int64_t merge = config.spatial_merge_size;
  M3_CHECK(grid.t > 0 && grid.h > 0 && grid.w > 0 && grid.h % merge == 0 && grid.w % merge == 0,
           "grid ({}, {}, {}) of patches: all must be positive, height and width multiples of {}", grid.t, grid.h,
           grid.w, merge);
  std::vector<VisionGrid> segments;
  for (int64_t t = 0; t < grid.t; t += config.segment_max_frames) {
    segments.push_back({std::min<int64_t>(config.segment_max_frames, grid.t - t), grid.h, grid.w});
  }
  return segments;
}

void append_vision_positions(const VisionConfig& config, const VisionGrid& segment, std::vector<int32_t>& pos_T3) {
  const int64_t merge = config.spatial_merge_size;
  for (int64_t t = 0; t < segment.t; ++t) {
    for (int64_t block_row = 0; block_row < segment.h; block_row += merge) {
      for (int64_t block_column = 0; block_column < segment.w; block_column += merge) {
        for (int64_t inside = 0; inside < merge * merge; ++inside) {
          pos_T3.push_back(static_cast<int32_t>(t));
          pos_T3.push_back(static_cast<int32_t>(block_row + inside / merge));
          pos_T3.push_back(static_cast<int32_t>(block_column + inside % merge));
        }
      }
    }
  }
}

namespace {

void alloc_pass(const VisionConfig& config, int64_t num_patches, Arena& arena, VisionPass& pass) {
  const int64_t pairs = rope_3d_pairs(config.head_dim());
  pass.cos_NM = arena.alloc("vision rope cos", DType::kF32, {num_patches, pairs});
  pass.sin_NM = arena.alloc("vision rope sin", DType::kF32, {num_patches, pairs});
}

int64_t patches_of(std::span<const VisionGrid> segments) {
  int64_t count = 0;
  for (const VisionGrid& segment : segments) count += segment.num_patches();
  return count;
}

}  // namespace

float vision_logit_scale(const VisionConfig& config) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(config.head_dim())));
}

VisionPass plan_vision(const VisionConfig& config, std::span<const VisionGrid> segments, Arena& arena, Stream stream) {
  VisionPass pass;
  std::vector<int32_t> pos_T3;
  pass.cu_segments.push_back(0);
  for (const VisionGrid& segment : segments) {
    append_vision_positions(config, segment, pos_T3);
    pass.cu_segments.push_back(static_cast<int32_t>(pos_T3.size() / 3));
  }
  const int64_t num_patches = pass.cu_segments.back();
  alloc_pass(config, num_patches, arena, pass);
  rope_angles_3d(Tensor(pos_T3.data(), DType::kI32, {num_patches, 3}), config.head_dim(), config.rope_theta,
                 pass.cos_NM, pass.sin_NM, stream);
  return pass;
}

VisionLayerActs alloc_vision_layer_acts(const VisionConfig& config, int64_t num_patches, DType dtype, Keep keep,
                                        Arena& arena) {
  const Shape heads = {num_patches, config.num_heads, config.head_dim()};
  VisionLayerActs acts;
  acts.h_NW = arena.alloc("vision layer input", dtype, {num_patches, config.hidden_size});
  acts.q_NHD = arena.alloc("vision q", dtype, heads);
  acts.k_NHD = arena.alloc("vision k", dtype, heads);
  acts.v_NHD = arena.alloc("vision v", dtype, heads);
  acts.o_NHD = arena.alloc("vision attention output", dtype, heads);
  acts.fc1_NF = arena.alloc("vision mlp", dtype, {num_patches, config.intermediate_size});
  if (keep == Keep::kNothing) {
    acts.mlp_h_NW = acts.h_NW;
    acts.gelu_NF = acts.fc1_NF;
    return acts;
  }
  acts.lse_NH = arena.alloc("vision lse", DType::kF32, {num_patches, config.num_heads});
  acts.mlp_h_NW = arena.alloc("vision mlp input", dtype, {num_patches, config.hidden_size});
  acts.gelu_NF = arena.alloc("vision mlp gelu", dtype, {num_patches, config.intermediate_size});
  return acts;
}

void vision_attention_forward(const VisionConfig& config, const VisionLayerWeights& weights, const VisionPass& pass,
                              const GemmOptions& gemm_options, const VisionLayerActs& acts, const Tensor& x_NW,
                              Arena& scratch, Stream stream) {
  const Shape flat = {x_NW.dim(0), config.hidden_size};
  GemmOptions add = gemm_options;
  add.accumulate = true;
  layernorm(x_NW, weights.norm1_W, weights.norm1_bias_W, acts.h_NW, config.layer_norm_eps, stream);
  const GemmOutput outputs[] = {{weights.q.weight, weights.q.bias, acts.q_NHD.reshape(flat)},
                                {weights.k.weight, weights.k.bias, acts.k_NHD.reshape(flat)},
                                {weights.v.weight, weights.v.bias, acts.v_NHD.reshape(flat)}};
  gemm_shared_input(acts.h_NW, outputs, gemm_options, scratch, stream);
  rope(acts.q_NHD, pass.cos_NM, pass.sin_NM, acts.q_NHD, stream);
  rope(acts.k_NHD, pass.cos_NM, pass.sin_NM, acts.k_NHD, stream);
  vit_attend(acts.q_NHD, acts.k_NHD, acts.v_NHD, pass.cu_segments, vision_logit_scale(config), acts.o_NHD, acts.lse_NH,
             scratch, stream);
  gemm(acts.o_NHD.reshape(flat), weights.out.weight, weights.out.bias, x_NW, add, scratch, stream);
}

void vision_mlp_forward(const VisionConfig& config, const VisionLayerWeights& weights, const GemmOptions& gemm_options,
                        const VisionLayerActs& acts, const Tensor& x_NW, Arena& scratch, Stream stream) {
  GemmOptions add = gemm_options;
  add.accumulate = true;
  layernorm(x_NW, weights.norm2_W, weights.norm2_bias_W, acts.mlp_h_NW, config.layer_norm_eps, stream);
  gemm(acts.mlp_h_NW, weights.fc1.weight, weights.fc1.bias, acts.fc1_NF, gemm_options, scratch, stream);
  gelu(acts.fc1_NF, acts.gelu_NF, stream);
  gemm(acts.gelu_NF, weights.fc2.weight, weights.fc2.bias, x_NW, add, scratch, stream);
}

ProjectorActs alloc_projector_acts(const ModelConfig& config, int64_t num_patches, DType dtype, Keep keep,
                                   Arena& arena) {
  const int64_t C = config.text.hidden_size, num_features = num_patches / config.vision->merge_factor();
  ProjectorActs acts;
  acts.tower_NW = arena.alloc("tower output", dtype, {num_patches, config.vision->hidden_size});
  acts.hidden_NC = arena.alloc("projector hidden", dtype, {num_patches, C});
  acts.z_NC = arena.alloc("projector output", dtype, {num_patches, C});
  acts.merge_hidden_MC = arena.alloc("merge hidden", dtype, {num_features, C});
  const bool kept = keep == Keep::kForBackward;
  acts.gelu_NC = kept ? arena.alloc("projector gelu", dtype, {num_patches, C}) : acts.hidden_NC;
  acts.merge_gelu_MC = kept ? arena.alloc("merge gelu", dtype, {num_features, C}) : acts.merge_hidden_MC;
  return acts;
}

void project_features(const ModelConfig& config, const VisionWeights& w, const Tensor& x_NW, const ProjectorActs& acts,
                      const Tensor& features_MC, const GemmOptions& options, Arena& scratch, Stream stream) {
  cast(x_NW, acts.tower_NW, stream);
  gemm(acts.tower_NW, w.project_1.weight, w.project_1.bias, acts.hidden_NC, options, scratch, stream);
  gelu(acts.hidden_NC, acts.gelu_NC, stream);
  gemm(acts.gelu_NC, w.project_2.weight, w.project_2.bias, acts.z_NC, options, scratch, stream);
  // Rows of one 2 x 2 block follow each other, so the merge is a reshape.
  const int64_t factor = config.vision->merge_factor();
  const Tensor blocks = acts.z_NC.reshape({acts.z_NC.dim(0) / factor, factor * acts.z_NC.dim(1)});
  gemm(blocks, w.merge_1.weight, w.merge_1.bias, acts.merge_hidden_MC, options, scratch, stream);
  gelu(acts.merge_hidden_MC, acts.merge_gelu_MC, stream);
  gemm(acts.merge_gelu_MC, w.merge_2.weight, w.merge_2.bias, features_MC, options, scratch, stream);
}

int64_t vision_scratch_bytes(const ModelConfig& config, int64_t num_patches) {
  const VisionConfig& v = *config.vision;
  const int64_t C = config.text.hidden_size, factor = v.merge_factor();
  return std::max({gemm_scratch_bytes(num_patches, v.hidden_size, v.patch_numel()),
                   gemm_scratch_bytes(num_patches, v.intermediate_size, v.hidden_size),
                   gemm_scratch_bytes(num_patches, v.hidden_size, v.intermediate_size),
                   gemm_scratch_bytes(num_patches, C, std::max<int64_t>(C, v.hidden_size)),
                   gemm_scratch_bytes(num_patches / factor, C, factor * C),
                   vit_attend_scratch_bytes(num_patches, v.num_heads, v.head_dim())});
}

int64_t vision_forward_bytes(const ModelConfig& config, int64_t num_patches, DType dtype) {
  Arena measuring = Arena::measuring("vision");
  VisionPass pass;
  measuring.alloc("tower", DType::kF32, {num_patches, config.vision->hidden_size});
  alloc_pass(*config.vision, num_patches, measuring, pass);
  const int64_t mark = measuring.mark();
  alloc_vision_layer_acts(*config.vision, num_patches, dtype, Keep::kNothing, measuring);
  measuring.reset(mark);
  alloc_projector_acts(config, num_patches, dtype, Keep::kNothing, measuring);
  return measuring.peak_bytes() + vision_scratch_bytes(config, num_patches) + 4 * Arena::kAlignment;
}

void vision_forward(const ModelConfig& config, const VisionWeights& weights, std::span<const VisionGrid> segments,
                    const Tensor& patches_NP, const Tensor& features_MC, DType dtype, const GemmOptions& gemm_options,
                    Arena& arena, Stream stream, const std::function<void(const Tensor& x_NW)>& tower) {
  const VisionConfig& v = *config.vision;
  const int64_t N = patches_of(segments);
  M3_CHECK(patches_NP.shape() == Shape({N, v.patch_numel()}), "patches are {}, the grids want [{}, {}]",
           patches_NP.shape().str(), N, v.patch_numel());
  ArenaScope scope(arena);
  const Tensor x_NW = arena.alloc("tower", DType::kF32, {N, v.hidden_size});
  const VisionPass pass = plan_vision(v, segments, arena, stream);
  gemm(patches_NP, weights.patch_embed.reshape({v.hidden_size, v.patch_numel()}), {}, x_NW, gemm_options, arena,
       stream);
  layernorm(x_NW, weights.pre_norm_W, weights.pre_norm_bias_W, x_NW, v.layer_norm_eps, stream);
  {
    ArenaScope layers(arena);
    const VisionLayerActs acts = alloc_vision_layer_acts(v, N, dtype, Keep::kNothing, arena);
    for (const VisionLayerWeights& layer : weights.layers) {
      vision_attention_forward(v, layer, pass, gemm_options, acts, x_NW, arena, stream);
      vision_mlp_forward(v, layer, gemm_options, acts, x_NW, arena, stream);
    }
  }
  if (tower) tower(x_NW);
  const ProjectorActs acts = alloc_projector_acts(config, N, dtype, Keep::kNothing, arena);
  project_features(config, weights, x_NW, acts, features_MC, gemm_options, arena, stream);
}

}  // namespace m3
