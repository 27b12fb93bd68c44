#include "model/model.h"

#include <algorithm>
#include <atomic>

#include "base/threads.h"

namespace m3 {

namespace {

// On the CPU untouched memory costs nothing, so arenas reserve more than the plan says: op workspaces
// depend on how a batch is composed.
constexpr int64_t kReserveFactor = 2, kReserveBytes = int64_t{64} << 20;

int64_t count_bytes(const ModelConfig& config, ModelWeights weights) {
  int64_t bytes = 0;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string&, Weight& weight) {
    bytes += weight.values.bytes() + (weight.scales.defined() ? weight.scales.bytes() : 0);
  };
  visitor.tensor = [&](const std::string&, Tensor& tensor) { bytes += tensor.bytes(); };
  visit_parameters(config, weights, visitor);
  return bytes;
}

}  // namespace

Model::Model(const Checkpoint& checkpoint, const ModelOptions& options)
    : Model(checkpoint.config(), weights_of(checkpoint), options) {}

Model::Model(const ModelConfig& config, ModelWeights weights, const ModelOptions& options)
    : config_(config), weights_(std::move(weights)), options_(options) {
  const StepSizes& sizes = options.step;
  M3_CHECK(sizes.max_tokens > 0 && sizes.max_sequences > 0 && sizes.max_logit_rows >= 0,
           "a step of {} tokens, {} sequences, {} logit rows", sizes.max_tokens, sizes.max_sequences,
           sizes.max_logit_rows);
  weight_bytes_ = count_bytes(config_, weights_);
  step_bytes_ = decoder_step_bytes(config_.text, options.decoder, sizes);
  step_arena_ = Arena("activations", kReserveFactor * step_bytes_ + kReserveBytes);
  if (options.max_vision_patches > 0) {
    M3_CHECK(config_.vision.has_value(), "media were given to a text-only model (its config has no vision_config)");
    vision_bytes_ = vision_forward_bytes(config_, options.max_vision_patches, activation_dtype());
    vision_arena_ = Arena("vision", kReserveFactor * vision_bytes_ + kReserveBytes);
  }
}

KvCache Model::make_cache(int64_t num_pages) const {
  return KvCache(config_.text, num_pages, options_.decoder.dtype, uses_index(options_.decoder.attention));
}

Tensor Model::step(const StepInput& input, const KvCache& cache, const StepTrace* trace) {
  step_arena_.reset();
  return decoder_step(config_.text, weights_.text, options_.decoder, input, cache, step_arena_, trace);
}

int64_t Model::num_features(const VisionGrid& grid) const { return grid.num_patches() / config_.vision->merge_factor(); }

int64_t vision_pass_patches(const VisionConfig& config, const VisionGrid& grid) {
  return std::min<int64_t>(grid.t, config.segment_max_frames) * grid.h * grid.w;
}

void Model::encode_media(const VisionGrid& grid, const Tensor& patches_NP, const Tensor& features_MC,
                         const std::function<void(const Tensor& x_NW)>& tower) {
  M3_CHECK(config_.vision.has_value(), "the model has no vision tower");
  const VisionConfig& vision = *config_.vision;
  M3_CHECK(features_MC.shape() == Shape({num_features(grid), config_.text.hidden_size}),
           "features are {}, the grid gives [{}, {}]", features_MC.shape().str(), num_features(grid),
           config_.text.hidden_size);
  const std::vector<VisionGrid> segments = vision_segments(vision, grid);
  int64_t patch = 0;
  for (size_t begin = 0; begin < segments.size();) {
    size_t end = begin;
    int64_t patches = 0;
    while (end < segments.size() && (end == begin || patches + segments[end].num_patches() <= options_.max_vision_patches)) {
      patches += segments[end++].num_patches();
    }
    M3_CHECK(patches <= options_.max_vision_patches, "one vision segment has {} patches, the model was opened for {}",
             patches, options_.max_vision_patches);
    const int64_t factor = vision.merge_factor();
    vision_forward(config_, weights_.vision, std::span(segments).subspan(begin, end - begin),
                   patches_NP.rows(patch, patch + patches), features_MC.rows(patch / factor, (patch + patches) / factor),
                   activation_dtype(), options_.decoder.gemm, vision_arena_, {}, tower);
    patch += patches;
    begin = end;
  }
}

void Model::add_to_plan(MemoryPlan& plan) const {
  plan.add("weights (mapped)", weight_bytes_);
  plan.add("activations", step_bytes_);
  if (vision_bytes_ > 0) plan.add("vision", vision_bytes_);
}

void Model::load(const std::function<void(int64_t done_bytes)>& on_bytes) const {
  constexpr int64_t kPage = 4096, kPiece = int64_t{64} << 20;
  int64_t done = 0;
  std::atomic<int> sink = 0;
  auto touch = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto* bytes = static_cast<const volatile char*>(tensor.data());
    for (int64_t begin = 0; begin < tensor.bytes(); begin += kPiece) {
      const int64_t piece = std::min(kPiece, tensor.bytes() - begin);
      parallel_for((piece + kPage - 1) / kPage, [&](int64_t first, int64_t last) {
        int sum = 0;
        for (int64_t page = first; page < last; ++page) sum += bytes[begin + page * kPage];
        sink.fetch_add(sum, std::memory_order_relaxed);
      });
      done += piece;
      if (on_bytes) on_bytes(done);
    }
  };
  ModelWeights views = weights_;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string&, Weight& weight) {
    touch(weight.values);
    touch(weight.scales);
  };
  visitor.tensor = [&](const std::string&, Tensor& tensor) { touch(tensor); };
  visit_parameters(config_, views, visitor);
}

PlaceholderMap map_placeholders(const ModelConfig& config, std::span<const int32_t> ids,
                                std::span<const PlaceholderItem> items) {
  // Feature rows in the order in which placeholders of each kind consume them.
  std::vector<int32_t> rows_of_kind[2];
  int32_t row = 0;
  for (const PlaceholderItem& item : items) {
    for (int64_t i = 0; i < item.num_features; ++i) rows_of_kind[item.is_video].push_back(row++);
  }
  PlaceholderMap map;
  size_t used[2] = {0, 0};
  for (size_t position = 0; position < ids.size(); ++position) {
    const bool is_image = ids[position] == config.image_token_id, is_video = ids[position] == config.video_token_id;
    if (!config.vision || (!is_image && !is_video)) continue;
    if (used[is_video] < rows_of_kind[is_video].size()) {
      map.positions.push_back(static_cast<int32_t>(position));
      map.order.push_back(rows_of_kind[is_video][used[is_video]]);
    }
    ++used[is_video];
  }
  for (const bool is_video : {false, true}) {
    M3_CHECK(used[is_video] == rows_of_kind[is_video].size(),
             "the prompt has {} {} placeholder tokens, its media give {} rows", used[is_video],
             is_video ? "video" : "image", rows_of_kind[is_video].size());
  }
  return map;
}

}  // namespace m3
