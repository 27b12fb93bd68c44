#include "model/vision_backward.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/gelu/gelu.h"
#include "ops/layernorm/layernorm.h"
#include "ops/qknorm_rope/qknorm_rope.h"
#include "ops/vit_attend/vit_attend.h"

namespace m3 {

namespace {

// Gradients between the operators, for running and for counting alike. Those that enter products
// have their type.
struct LayerGradients {
  Tensor dy_NW;  // dx rounded
  Tensor do_NHD, dq_NHD, dk_NHD, dv_NHD;
  Tensor dfc_NF;
  Tensor dh_NW;  // f32
};

LayerGradients alloc_layer(const VisionConfig& v, int64_t num_patches, DType dtype, Arena& arena) {
  const Shape heads = {num_patches, v.num_heads, v.head_dim()},
              width = {num_patches, v.hidden_size};
  LayerGradients g;
  if (dtype != DType::kF32) g.dy_NW = arena.alloc("vision dx, rounded", dtype, width);
  g.do_NHD = arena.alloc("vision do", dtype, heads);
  g.dq_NHD = arena.alloc("vision dq", dtype, heads);
  g.dk_NHD = arena.alloc("vision dk", dtype, heads);
  g.dv_NHD = arena.alloc("vision dv", dtype, heads);
  g.dfc_NF = arena.alloc("vision dmlp", dtype, {num_patches, v.intermediate_size});
  g.dh_NW = arena.alloc("vision dh", DType::kF32, width);
  return g;
}

struct ProjectorGradients {
  Tensor dfeatures_MC, dmerge_MC, dz_NC, dhidden_NC;
};

ProjectorGradients alloc_projector(const ModelConfig& config, int64_t num_patches, DType dtype,
                                   Arena& arena) {
  const int64_t C = config.text.hidden_size,
                num_features = num_patches / config.vision->merge_factor();
  ProjectorGradients g;
  if (dtype != DType::kF32)
    g.dfeatures_MC = arena.alloc("dfeatures, rounded", dtype, {num_features, C});
  g.dmerge_MC = arena.alloc("dmerge", dtype, {num_features, C});
  g.dz_NC = arena.alloc("dz", dtype, {num_patches, C});
  g.dhidden_NC = arena.alloc("dhidden", dtype, {num_patches, C});
  return g;
}

Tensor rounded(const Tensor& dx, const Tensor& storage, Stream stream) {
  if (!storage.defined()) return dx;
  cast(dx, storage, stream);
  return storage;
}

class Backward {
 public:
  Backward(const ModelConfig& config, const GemmOptions& options, Arena& arena, Stream stream)
      : config_(config),
        vision_(*config.vision),
        options_(options),
        add_(options),
        arena_(arena),
        stream_(stream) {
    add_.accumulate = true;
  }

  // dy of y = x Wᵀ + b: adds dW and db, and writes dx where it is wanted.
  void linear(const Tensor& dy, const Tensor& x, const Linear& w, const Linear& gradient,
              const Tensor& dx, bool accumulate = false) {
    gemm_backward_w(dy, x, gradient.weight.values, gradient.bias, add_, arena_, stream_);
    if (dx.defined())
      gemm_backward_x(dy, w.weight, dx, accumulate ? add_ : options_, arena_, stream_);
  }

  // dfeatures -> dx of the tower's output, f32.
  void projector(const VisionWeights& w, const ProjectorActs& acts, const Tensor& dfeatures_MC,
                 const Tensor& dx_NW, const VisionWeights& gradients) {
    ArenaScope scope(arena_);
    const ProjectorGradients g = alloc_projector(config_, dx_NW.dim(0), acts.z_NC.dtype(), arena_);
    const int64_t factor = vision_.merge_factor();
    const auto blocks = [&](const Tensor& t) {
      return t.reshape({t.dim(0) / factor, factor * t.dim(1)});
    };
    linear(rounded(dfeatures_MC, g.dfeatures_MC, stream_), acts.merge_gelu_MC, w.merge_2,
           gradients.merge_2, g.dmerge_MC);
    gelu_backward(acts.merge_hidden_MC, g.dmerge_MC, g.dmerge_MC, stream_);
    linear(g.dmerge_MC, blocks(acts.z_NC), w.merge_1, gradients.merge_1, blocks(g.dz_NC));
    linear(g.dz_NC, acts.gelu_NC, w.project_2, gradients.project_2, g.dhidden_NC);
    gelu_backward(acts.hidden_NC, g.dhidden_NC, g.dhidden_NC, stream_);
    linear(g.dhidden_NC, acts.tower_NW, w.project_1, gradients.project_1, dx_NW);
  }

  void layer(const VisionLayerWeights& w, const VisionPass& pass, const VisionTape::Layer& tape,
             const Tensor& dx_NW, const VisionLayerWeights& gradients) {
    ArenaScope scope(arena_);
    const LayerGradients g = alloc_layer(vision_, dx_NW.dim(0), tape.acts.h_NW.dtype(), arena_);
    const VisionLayerActs& acts = tape.acts;
    linear(rounded(dx_NW, g.dy_NW, stream_), acts.gelu_NF, w.fc2, gradients.fc2, g.dfc_NF);
    gelu_backward(acts.fc1_NF, g.dfc_NF, g.dfc_NF, stream_);
    linear(g.dfc_NF, acts.mlp_h_NW, w.fc1, gradients.fc1, g.dh_NW);
    layernorm_backward(tape.mid_NW, w.norm2_W, g.dh_NW, vision_.layer_norm_eps, dx_NW, true,
                       gradients.norm2_W, gradients.norm2_bias_W, arena_, stream_);

    const auto flat = [](const Tensor& t) { return t.reshape({t.dim(0), t.dim(1) * t.dim(2)}); };
    linear(rounded(dx_NW, g.dy_NW, stream_), flat(acts.o_NHD), w.out, gradients.out,
           flat(g.do_NHD));
    vit_attend_backward(acts.q_NHD, acts.k_NHD, acts.v_NHD, acts.o_NHD, acts.lse_NH, g.do_NHD,
                        pass.cu_segments, vision_logit_scale(vision_), g.dq_NHD, g.dk_NHD, g.dv_NHD,
                        arena_, stream_);
    rope_backward(g.dq_NHD, pass.cos_NM, pass.sin_NM, g.dq_NHD, stream_);
    rope_backward(g.dk_NHD, pass.cos_NM, pass.sin_NM, g.dk_NHD, stream_);
    linear(flat(g.dq_NHD), acts.h_NW, w.q, gradients.q, g.dh_NW);
    linear(flat(g.dk_NHD), acts.h_NW, w.k, gradients.k, g.dh_NW, true);
    linear(flat(g.dv_NHD), acts.h_NW, w.v, gradients.v, g.dh_NW, true);
    layernorm_backward(tape.x_NW, w.norm1_W, g.dh_NW, vision_.layer_norm_eps, dx_NW, true,
                       gradients.norm1_W, gradients.norm1_bias_W, arena_, stream_);
  }

  void patch_embedding(const VisionWeights& w, const VisionTape& tape, const Tensor& dx_NW,
                       const VisionWeights& gradients) {
    layernorm_backward(tape.patch_embed_NW, w.pre_norm_W, dx_NW, vision_.layer_norm_eps, dx_NW,
                       false, gradients.pre_norm_W, gradients.pre_norm_bias_W, arena_, stream_);
    gemm_backward_w(dx_NW, tape.patches_NP,
                    gradients.patch_embed.reshape({vision_.hidden_size, vision_.patch_numel()}), {},
                    add_, arena_, stream_);
  }

 private:
  const ModelConfig& config_;
  const VisionConfig& vision_;
  const GemmOptions& options_;
  GemmOptions add_;
  Arena& arena_;
  Stream stream_;
};

void layer_forward(const VisionConfig& v, const VisionLayerWeights& w, const VisionPass& pass,
                   const GemmOptions& options, const VisionTape::Layer& layer, const Tensor& out_NW,
                   Arena& arena, Stream stream) {
  copy(layer.x_NW, layer.mid_NW, stream);
  vision_attention_forward(v, w, pass, options, layer.acts, layer.mid_NW, arena, stream);
  if (!out_NW.defined()) {  // recomputation: what the MLP's backward reads, without its output
    layernorm(layer.mid_NW, w.norm2_W, w.norm2_bias_W, layer.acts.mlp_h_NW, v.layer_norm_eps,
              stream);
    gemm(layer.acts.mlp_h_NW, w.fc1.weight, w.fc1.bias, layer.acts.fc1_NF, options, arena, stream);
    gelu(layer.acts.fc1_NF, layer.acts.gelu_NF, stream);
    return;
  }
  copy(layer.mid_NW, out_NW, stream);
  vision_mlp_forward(v, w, options, layer.acts, out_NW, arena, stream);
}

}  // namespace

VisionTape alloc_vision_tape(const ModelConfig& config, int64_t num_patches, DType dtype,
                             bool recompute, Arena& arena) {
  const VisionConfig& v = *config.vision;
  const Shape width = {num_patches, v.hidden_size};
  VisionTape tape;
  tape.recompute = recompute;
  tape.patch_embed_NW = arena.alloc("patch embedding", DType::kF32, width);
  for (int i = 0; i < v.num_layers; ++i) {
    VisionTape::Layer layer;
    layer.x_NW = arena.alloc("vision residual", DType::kF32, width);
    if (i > 0 && recompute) {
      layer.mid_NW = tape.layers[0].mid_NW;
      layer.acts = tape.layers[0].acts;
    } else {
      layer.mid_NW = arena.alloc("vision residual", DType::kF32, width);
      layer.acts = alloc_vision_layer_acts(v, num_patches, dtype, Keep::kForBackward, arena);
    }
    tape.layers.push_back(layer);
  }
  tape.x_NW = arena.alloc("tower output", DType::kF32, width);
  tape.projector = alloc_projector_acts(config, num_patches, dtype, Keep::kForBackward, arena);
  tape.features_MC =
      arena.alloc("features", dtype, {num_patches / v.merge_factor(), config.text.hidden_size});
  return tape;
}

Tensor vision_train_forward(const ModelConfig& config, const VisionWeights& weights,
                            std::span<const VisionGrid> segments, const GemmOptions& options,
                            VisionTape& tape, Arena& arena, Stream stream) {
  const VisionConfig& v = *config.vision;
  tape.pass = plan_vision(v, segments, arena, stream);
  gemm(tape.patches_NP, weights.patch_embed.reshape({v.hidden_size, v.patch_numel()}), {},
       tape.patch_embed_NW, options, arena, stream);
  const size_t num_layers = tape.layers.size();
  layernorm(tape.patch_embed_NW, weights.pre_norm_W, weights.pre_norm_bias_W,
            num_layers > 0 ? tape.layers[0].x_NW : tape.x_NW, v.layer_norm_eps, stream);
  for (size_t i = 0; i < num_layers; ++i) {
    layer_forward(v, weights.layers[i], tape.pass, options, tape.layers[i],
                  i + 1 < num_layers ? tape.layers[i + 1].x_NW : tape.x_NW, arena, stream);
  }
  project_features(config, weights, tape.x_NW, tape.projector, tape.features_MC, options, arena,
                   stream);
  return tape.features_MC;
}

void vision_backward(const ModelConfig& config, const VisionWeights& weights,
                     const GemmOptions& options, const VisionTape& tape, const Tensor& dfeatures_MC,
                     const VisionWeights& gradients, Arena& arena, Stream stream) {
  ArenaScope scope(arena);
  const Tensor dx_NW = arena.alloc("vision dx", DType::kF32, tape.x_NW.shape());
  Backward backward(config, options, arena, stream);
  backward.projector(weights, tape.projector, dfeatures_MC, dx_NW, gradients);
  for (size_t i = tape.layers.size(); i-- > 0;) {
    if (tape.recompute) {
      layer_forward(*config.vision, weights.layers[i], tape.pass, options, tape.layers[i], {},
                    arena, stream);
    }
    backward.layer(weights.layers[i], tape.pass, tape.layers[i], dx_NW, gradients.layers[i]);
  }
  backward.patch_embedding(weights, tape, dx_NW, gradients);
}

int64_t vision_train_bytes(const ModelConfig& config, int64_t num_patches, DType dtype,
                           bool recompute) {
  const VisionConfig& v = *config.vision;
  const int64_t N = num_patches;
  Arena measuring = Arena::measuring("vision training");
  alloc_vision_tape(config, N, dtype, recompute, measuring);
  for (int i = 0; i < 2; ++i)
    measuring.alloc("angles", DType::kF32, {N, std::max<int64_t>(1, v.head_dim() / 2)});
  measuring.alloc("vision dx", DType::kF32, {N, v.hidden_size});
  const int64_t mark = measuring.mark();
  alloc_projector(config, N, dtype, measuring);
  measuring.reset(mark);
  alloc_layer(v, N, dtype, measuring);
  return measuring.peak_bytes() + 4 * Arena::kAlignment +
         std::max({vision_scratch_bytes(config, N),
                   layernorm_backward_scratch_bytes(N, v.hidden_size),
                   vit_attend_backward_scratch_bytes(N, v.num_heads, v.head_dim())});
}

}  // namespace m3
