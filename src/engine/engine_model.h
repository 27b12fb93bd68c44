// What the engine knows of a model: steps over packed tokens of several sequences whose keys and values lie in pages,
// a tower for media, and copies of pages. A model on any device fits behind it; CpuEngineModel is the first.
//
// A page is one object: K, V and index keys of its positions in every layer, addressed by one id (msa.md §6).
// There is no call for a part of it. The engine decides which pages hold what (page_cache.h).
#pragma once
#include <memory>
#include <string>

#include "engine/request.h"
#include "model/model.h"

namespace m3 {

struct EngineModelSizes {
  int64_t num_pages = 0;
  int page_tokens = 0;
  int64_t page_bytes = 0;           // of all lanes
  int64_t max_step_tokens = 0;
  int64_t max_sequences = 0;        // of a step
  int64_t max_logit_rows = 0;       // of a step
  int64_t max_sequence_tokens = 0;  // prompt and answer of one request
};

// Rows of the tower for one picture or clip, on the model's device.
struct MediaFeatures {
  Arena arena;
  Tensor features_MC;
  int64_t bytes() const { return features_MC.bytes(); }
};

class EngineModel {
 public:
  virtual ~EngineModel() = default;

  // Vocabulary and placeholder ids are read from here.
  virtual const ModelConfig& config() const = 0;
  virtual const EngineModelSizes& sizes() const = 0;

  // logits_LV, f32 on the host, valid until the next call; the engine may overwrite them. If it throws, the pages of
  // the step's new tokens hold anything.
  virtual Tensor step(const StepInput& input) = 0;

  virtual int64_t num_features(const VisionGrid& grid) const = 0;
  virtual std::shared_ptr<const MediaFeatures> encode_media(const MediaInput& media) = 0;

  virtual void copy_page(int32_t from, int32_t to) = 0;
  // A page as page_bytes bytes of host memory, all lanes, and back: for pages that leave the cache (page_tier.h).
  virtual void read_page(int32_t page, std::span<std::byte> bytes) = 0;
  virtual void write_page(int32_t page, std::span<const std::byte> bytes) = 0;
  // What a page is and what computed it, a fact a line. Pages may be carried from one model to another only where these
  // texts are equal (page_file.h). Runs the model on page 0: call it before anything is cached.
  virtual std::string page_layout() = 0;
};

// A Model and its cache. The model must outlive it.
class CpuEngineModel : public EngineModel {
 public:
  CpuEngineModel(Model& model, int64_t num_pages);

  const ModelConfig& config() const override { return model_.config(); }
  const EngineModelSizes& sizes() const override { return sizes_; }
  Tensor step(const StepInput& input) override { return model_.step(input, cache_); }
  int64_t num_features(const VisionGrid& grid) const override { return model_.num_features(grid); }
  std::shared_ptr<const MediaFeatures> encode_media(const MediaInput& media) override;
  void copy_page(int32_t from, int32_t to) override { cache_.copy_page(from, to); }
  void read_page(int32_t page, std::span<std::byte> bytes) override { cache_.read_page(page, bytes); }
  void write_page(int32_t page, std::span<const std::byte> bytes) override { cache_.write_page(page, bytes); }
  std::string page_layout() override;

 private:
  std::string fingerprint();
  Model& model_;
  KvCache cache_;
  EngineModelSizes sizes_;
};

}  // namespace m3
