// Training pass of tower, projector and merge (model.md §8; training.md §7): a forward that keeps
// what the backward reads, and the backward. All pictures and clips of a micro-batch go through
// together, as one list of segments.
//
// The tower has no loss of its own: its gradient is that of the placeholder rows. N patches, M
// features, C hidden.
#pragma once
#include <span>
#include <vector>

#include "model/vision.h"

namespace m3 {

struct VisionTape {
  struct Layer {
    Tensor x_NW, mid_NW;  // residual stream before the layer and between its halves, f32
    VisionLayerActs acts;
  };
  bool recompute = false;  // layers share mid and acts; the backward computes them again
  VisionPass pass;
  Tensor patches_NP;
  Tensor patch_embed_NW;  // before the first norm
  Tensor x_NW;            // after the last layer
  std::vector<Layer> layers;
  ProjectorActs projector;
  Tensor features_MC;
};

// Everything comes from `arena`, also what the calls below carve in passing: vision_train_bytes in
// all.
VisionTape alloc_vision_tape(const ModelConfig& config, int64_t num_patches, DType dtype,
                             bool recompute, Arena& arena);

// Fills the tape; tape.patches_NP [N, P] f32 is set by the caller. Returns tape.features_MC.
Tensor vision_train_forward(const ModelConfig& config, const VisionWeights& weights,
                            std::span<const VisionGrid> segments, const GemmOptions& gemm_options,
                            VisionTape& tape, Arena& arena, Stream stream = {});

// dfeatures_MC f32; adds to all gradients of the vision part.
void vision_backward(const ModelConfig& config, const VisionWeights& weights,
                     const GemmOptions& gemm_options, const VisionTape& tape,
                     const Tensor& dfeatures_MC, const VisionWeights& gradients, Arena& arena,
                     Stream stream = {});

int64_t vision_train_bytes(const ModelConfig& config, int64_t num_patches, DType dtype,
                           bool recompute);

}  // namespace m3
