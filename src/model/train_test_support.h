// For the tests of training: a tiny multimodal model with random weights, and packs of random
// documents.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "base/rng.h"
#include "model/trainable_model.h"
#include "ops/elementwise/elementwise.h"

namespace m3::testing {

// Every kind of layer: full attention with a dense MLP, then two sparse layers with experts. Blocks
// of 8 tokens, 2 chosen.
inline ModelConfig tiny_train_config() {
  ModelConfig config;
  TextConfig& t = config.text;
  t.hidden_size = 24;
  t.num_layers = 3;
  t.num_heads = 4;
  t.num_kv_heads = 2;
  t.head_dim = 16;
  t.vocab_size = 40;
  t.max_position_embeddings = 1024;
  t.rope_theta = 10000;
  t.rotary_dim = 8;
  t.dense_intermediate_size = 28;
  t.expert_intermediate_size = 12;
  t.shared_intermediate_size = 20;
  t.num_experts = 6;
  t.num_experts_per_token = 2;
  t.is_moe = {0, 1, 1};
  t.is_sparse = {0, 1, 1};
  t.index_dim = 12;
  t.block_size = 8;
  t.topk_blocks = 2;
  VisionConfig v;
  v.hidden_size = 24;
  v.num_layers = 2;
  v.num_heads = 2;
  v.intermediate_size = 20;
  v.patch_size = 2;
  v.projection_dim = t.hidden_size;
  config.vision = v;
  return config;
}

// Weights and gradients of a model, f32.
struct TrainSet {
  explicit TrainSet(const ModelConfig& model_config = tiny_train_config(), uint64_t seed = 1)
      : config(model_config), arena("test", 2 * parameter_bytes(model_config, DType::kF32)) {
    weights = alloc_parameters(config, DType::kF32, arena);
    gradients = alloc_parameters(config, DType::kF32, arena);
    uint64_t stream = 0;
    for_each_parameter(config, weights, [&](const std::string& name, const Tensor& t) {
      Philox rng(seed, stream++);
      // Matrices keep the scale of activations; Gemma norms lie around 0, those of the tower
      // around 1.
      const bool vector = t.rank() == 1,
                 layer_norm = vector && name.find("vision_tower") != std::string::npos &&
                              name.find("norm") != std::string::npos && name.ends_with("weight");
      const double fan_in = vector ? 25 : static_cast<double>(t.numel() / t.dim(0));
      for (int64_t i = 0; i < t.numel(); ++i) {
        t.ptr<float>()[i] =
            static_cast<float>(rng.normal() / std::sqrt(fan_in) + (layer_norm ? 1 : 0));
      }
    });
  }
  void clear() const {
    for_each_parameter(config, gradients,
                       [](const std::string&, const Tensor& t) { fill_zero(t); });
  }
  // All gradients, one after another.
  std::vector<std::vector<float>> snapshot() const {
    std::vector<std::vector<float>> all;
    for_each_parameter(config, gradients, [&](const std::string&, const Tensor& t) {
      all.emplace_back(t.ptr<float>(), t.ptr<float>() + t.numel());
    });
    return all;
  }
  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for_each_parameter(config, gradients,
                       [&](const std::string& name, const Tensor&) { all.push_back(name); });
    return all;
  }

  ModelConfig config;
  Arena arena;
  ModelWeights weights, gradients;
};

struct TestDocument {
  int64_t length = 0;
  std::vector<VisionGrid>
      media;  // its features follow each other from position 1 on, one token between two items
  uint64_t seed = 0;  // contents: the same seed gives the same document in every pack
};

// Owns the arrays of a micro-batch.
class TestPack {
 public:
  TestPack(const ModelConfig& config, const std::vector<TestDocument>& documents) {
    for (const TestDocument& document : documents) add(config, document);
    for (size_t i = 0; i < media_.size(); ++i) {
      const Shape shape = {media_[i].grid.num_patches(), config.vision->patch_numel()};
      media_[i].patches_NP = Tensor(patches_[i].data(), DType::kF32, shape);
      media_[i].rows = rows_[i];
      num_patches += media_[i].grid.num_patches();
    }
  }
  MicroBatch batch() const { return {ids, cu_seqlens, targets, weights, media_}; }
  int64_t num_tokens() const { return static_cast<int64_t>(ids.size()); }

  std::vector<int32_t> ids, cu_seqlens = {0}, targets;
  std::vector<float> weights;
  int64_t num_patches = 0;

 private:
  void add(const ModelConfig& config, const TestDocument& document) {
    Philox rng(document.seed, 7);
    const auto begin = static_cast<int32_t>(ids.size());
    for (int64_t i = 0; i < document.length; ++i) {
      ids.push_back(static_cast<int32_t>(rng.below(config.text.vocab_size)));
      const bool counts = i + 1 < document.length && rng.below(4) != 0;
      targets.push_back(counts ? static_cast<int32_t>(rng.below(config.text.vocab_size)) : -1);
      weights.push_back(static_cast<float>(1 + rng.below(3)));
    }
    int32_t row = begin + 1;
    for (const VisionGrid& grid : document.media) {
      std::vector<float> values(grid.num_patches() * config.vision->patch_numel());
      for (float& x : values) x = static_cast<float>(rng.normal());
      patches_.push_back(std::move(values));
      rows_.emplace_back();
      for (int64_t i = 0; i < grid.num_patches() / config.vision->merge_factor(); ++i)
        rows_.back().push_back(row++);
      media_.push_back({grid, {}, {}});
      ++row;
    }
    M3_CHECK(row <= begin + document.length, "the test document is too short for its media");
    cu_seqlens.push_back(static_cast<int32_t>(ids.size()));
  }

  std::vector<std::vector<float>> patches_;
  std::vector<std::vector<int32_t>> rows_;
  std::vector<TrainMedia> media_;
};

// Lengths at and around the borders of blocks and of the selection budget, pictures, a clip of five
// steps.
inline std::vector<TestDocument> uneven_documents() {
  return {{1, {}, 11},           {8, {}, 12}, {9, {}, 13}, {33, {{1, 2, 4}, {5, 2, 2}}, 14},
          {17, {{1, 4, 2}}, 15}, {26, {}, 16}};
}

inline TrainOptions f32_options(TrainStage stage) {
  TrainOptions options;
  options.dtype = DType::kF32;
  options.stage = stage;
  options.lambda = 0.7;
  return options;
}

// Gradients of the packs, each a micro-batch of one step, from zero. Returns the sums.
inline TrainSums run_step(TrainSet& set, const TrainOptions& options,
                          const std::vector<const TestPack*>& packs) {
  Normalisers global;
  TrainSizes sizes{1, 0};
  for (const TestPack* pack : packs) {
    global.add(normalisers_of(pack->batch(), options));
    sizes.max_tokens = std::max(sizes.max_tokens, pack->num_tokens());
    sizes.max_patches = std::max(sizes.max_patches, pack->num_patches);
  }
  set.clear();
  TrainableModel model(set.config, set.weights, set.gradients, options, sizes);
  TrainSums sums;
  for (const TestPack* pack : packs) sums.add(model.forward_backward(pack->batch(), global).sums);
  return sums;
}

inline double relative_error(const std::vector<float>& got, const std::vector<float>& want) {
  double miss = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    miss += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return miss == 0 ? 0 : std::sqrt(miss / norm);
}

}  // namespace m3::testing
