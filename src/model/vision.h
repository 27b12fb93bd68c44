// Vision tower, projector and merge (model.md §8): patch rows in, rows for the placeholder tokens out.
//
// N patches of a pass, P values of a patch, W tower width, H heads, D head dim, C hidden of the text model.
// A pass is a list of segments: each picture is one, a clip is cut along t into pieces of at most
// segment_max_frames temporal steps (§8.4). Segments do not see each other, so passes may be cut
// between any two of them.
#pragma once
#include <functional>
#include <span>
#include <vector>

#include "formats/config.h"
#include "model/keep.h"
#include "model/weights.h"

namespace m3 {

struct VisionGrid {
  int64_t t = 0, h = 0, w = 0;
  int64_t num_patches() const { return t * h * w; }
  bool operator==(const VisionGrid&) const = default;
};

// The pieces of one picture or clip, in order.
std::vector<VisionGrid> vision_segments(const VisionConfig& config, const VisionGrid& grid);

// (t, row, column) of every patch of a segment in the order of the processors (§8.3, §8.6), appended.
void append_vision_positions(const VisionConfig& config, const VisionGrid& segment, std::vector<int32_t>& pos_T3);

// What the layers of one pass share.
struct VisionPass {
  std::vector<int32_t> cu_segments;  // patches, n + 1 offsets
  Tensor cos_NM, sin_NM;
};
VisionPass plan_vision(const VisionConfig& config, std::span<const VisionGrid> segments, Arena& arena,
                       Stream stream = {});

float vision_logit_scale(const VisionConfig& config);  // 1/sqrt(D)

// Where nothing is kept for a backward, tensors of one shape whose lives do not overlap are the same memory.
struct VisionLayerActs {
  Tensor h_NW, mlp_h_NW;    // normed inputs of the attention and of the MLP
  Tensor q_NHD, k_NHD, v_NHD, o_NHD;
  Tensor lse_NH;            // kept for the backward only
  Tensor fc1_NF, gelu_NF;
};
VisionLayerActs alloc_vision_layer_acts(const VisionConfig& config, int64_t num_patches, DType dtype, Keep keep,
                                        Arena& arena);

// The two halves of a layer. x_NW [N, W] f32, updated in place.
void vision_attention_forward(const VisionConfig& config, const VisionLayerWeights& weights, const VisionPass& pass,
                              const GemmOptions& gemm_options, const VisionLayerActs& acts, const Tensor& x_NW,
                              Arena& scratch, Stream stream = {});
void vision_mlp_forward(const VisionConfig& config, const VisionLayerWeights& weights, const GemmOptions& gemm_options,
                        const VisionLayerActs& acts, const Tensor& x_NW, Arena& scratch, Stream stream = {});

// Projector and merge: two linear layers with GELU between them per patch, two more per 2 x 2 patches.
struct ProjectorActs {
  Tensor tower_NW;                             // the tower's output in the type of products
  Tensor hidden_NC, gelu_NC, z_NC;             // of the projector
  Tensor merge_hidden_MC, merge_gelu_MC;
};
ProjectorActs alloc_projector_acts(const ModelConfig& config, int64_t num_patches, DType dtype, Keep keep,
                                   Arena& arena);
void project_features(const ModelConfig& config, const VisionWeights& weights, const Tensor& x_NW,
                      const ProjectorActs& acts, const Tensor& features_MC, const GemmOptions& gemm_options,
                      Arena& scratch, Stream stream = {});

// patches_NP f32 -> features [N / 4, C] in dtype. Temporaries come from `arena`
// (vision_forward_bytes). `tower` sees the residual stream x_NW after the last layer.
void vision_forward(const ModelConfig& config, const VisionWeights& weights, std::span<const VisionGrid> segments,
                    const Tensor& patches_NP, const Tensor& features_MC, DType dtype, const GemmOptions& gemm_options,
                    Arena& arena, Stream stream = {}, const std::function<void(const Tensor& x_NW)>& tower = {});

int64_t vision_forward_bytes(const ModelConfig& config, int64_t num_patches, DType dtype);
int64_t vision_scratch_bytes(const ModelConfig& config, int64_t num_patches);  // of any function above but that one

}  // namespace m3
