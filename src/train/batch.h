// The documents of a step and their packing into micro-batches.
//
// A step's documents are a function of (seed, source, step, slot) for generated sources; shards are
// read on from where the step before stopped. So a run that resumes sees what the uninterrupted one
// would have seen.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/trainable_model.h"
#include "train/data/stream.h"
#include "train/synthetic/texts.h"
#include "train/train_config.h"

namespace m3::train {

struct BatchDocument {
  data::Sample sample;
  int source = 0;  // of TrainConfig::sources
};

using StreamStates = std::map<std::string, data::StreamState>;  // by source; shards only

struct Batch {
  int64_t step = 0;
  std::vector<BatchDocument> documents;
  StreamStates streams;  // behind this batch
};

// Makes batches in order, from step `first` on, one ahead in a thread of its own. The tokenizer
// must outlive it.
class BatchMaker {
 public:
  BatchMaker(const TrainConfig& config, const Tokenizer& tokenizer, int64_t first,
             const StreamStates& states);
  ~BatchMaker();
  Batch next();

 private:
  class Sources;
  std::unique_ptr<Sources> sources_;
  std::unique_ptr<data::Prefetcher<Batch>> prefetcher_;
};

// Pages of a data folder for sources that take running text; `held_out`: the pages that training
// never sees.
std::shared_ptr<const synthetic::TextPool> load_text_pool(const std::filesystem::path& corpus,
                                                          bool held_out,
                                                          const Tokenizer& tokenizer);

// Document `index` of a source other than text and shards, at share f of the run. Takes running text from `pool`.
data::Document generated_document(const SourceConfig& source, uint64_t seed, uint64_t index, double f,
                                  synthetic::Draw draw, const synthetic::TextPool& pool);

// Documents that are run at once, with the memory that MicroBatch points to.
class PackedDocuments {
 public:
  // `documents`: of `batch`, which must outlive this object: patches stay where they are.
  PackedDocuments(const ModelConfig& config, const std::vector<BatchDocument>& batch,
                  std::vector<int32_t> documents);

  MicroBatch micro_batch() const;
  int64_t num_tokens() const { return static_cast<int64_t>(ids_T_.size()); }
  int64_t num_patches() const { return num_patches_; }
  const std::vector<int32_t>& documents() const { return documents_; }
  const std::vector<int32_t>& cu_seqlens() const { return cu_seqlens_; }

 private:
  void add(const ModelConfig& config, const data::Sample& sample);

  std::vector<int32_t> documents_, ids_T_, cu_seqlens_ = {0}, targets_T_;
  std::vector<float> weights_T_;
  std::vector<std::vector<int32_t>> media_rows_;
  std::vector<TrainMedia> media_;
  int64_t num_patches_ = 0;
};

// Whole documents, longest first, each into the first micro-batch with room (training.md §6). A
// document above the limits has a micro-batch of its own. `which`: of `documents`.
std::vector<std::vector<int32_t>> pack_documents(const std::vector<BatchDocument>& documents,
                                                 std::vector<int32_t> which, int64_t max_tokens,
                                                 int64_t max_patches);
std::vector<int32_t> all_of(const std::vector<BatchDocument>& documents);  // 0, 1, 2 ...

}  // namespace m3::train
