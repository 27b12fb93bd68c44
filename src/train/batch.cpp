#include "train/batch.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/sha256.h"
#include "train/schedule.h"
#include "train/synthetic/clips.h"
#include "train/synthetic/pictures.h"

namespace m3::train {
namespace {

using Family = SourceConfig::Family;

bool takes_text(const SourceConfig& source) {
  return source.family == Family::kText || source.family == Family::kFacts;
}

int64_t num_patches_of(const data::Sample& sample) {
  int64_t sum = 0;
  for (const MediaRows& media : sample.media) sum += media.grid.num_rows();
  return sum;
}

}  // namespace

std::shared_ptr<const synthetic::TextPool> load_text_pool(const std::filesystem::path& corpus,
                                                          bool held_out,
                                                          const Tokenizer& tokenizer) {
  std::vector<synthetic::TextPool::Page> pages;
  for (const data::Split split : {data::Split::kTrain, data::Split::kValid, data::Split::kTest}) {
    const data::ShardSet set(corpus, split);
    for (int64_t i = 0; i < set.num_documents(); ++i) {
      const data::Document document = set.read(i);
      synthetic::TextPool::Page page{document.item.empty() ? document.id : document.item, {}};
      for (const data::Segment& segment : document.segments) page.text += segment.text;
      if (!page.text.empty()) pages.push_back(std::move(page));
    }
  }
  auto pool = std::make_shared<const synthetic::TextPool>(pages, held_out, tokenizer);
  M3_CHECK(!pool->empty(), "{}: no {} page of text in it", corpus.string(),
           held_out ? "held-out" : "training");
  return pool;
}

namespace {

data::Document bare_document(const SourceConfig& source, uint64_t seed, uint64_t index, double f,
                             synthetic::Draw draw, const synthetic::TextPool& pool) {
  using namespace synthetic;
  const FactWords words = {source.num_names, source.num_words};
  switch (source.family) {
    case Family::kCard:
      return picture_document(seed, index, {.kind = PictureKind::kCard, .draw = draw});
    case Family::kPicture:
      return picture_document(seed, index, {.draw = draw, .easy_share = easy_share(source, f)});
    case Family::kClip: {
      ClipOptions clip{.kind = source.clip_kind,
                       .draw = draw,
                       .ask = source.clip_ask,
                       .num_frames = source.frames,
                       .easy_share = easy_share(source, f),
                       .events = source.clip_events,
                       .hold = source.hold,
                       .cells = source.cells,
                       .timestamps = source.timestamps,
                       .tint = static_cast<float>(source.tint)};
      if (source.colour >= 0) clip.colour = static_cast<Colour>(source.colour);
      return clip_document(seed, index, clip);
    }
    case Family::kChat:
      return chat_document(seed, index, draw);
    case Family::kRepeat:
      return repeat_document(seed, index, {source.min_facts, source.max_facts, words});
    case Family::kFacts: {
      FactOptions facts;
      facts.num_tokens = source.tokens;
      facts.min_facts = source.min_facts;
      facts.max_facts = source.max_facts;
      facts.min_questions = source.min_questions;
      facts.max_questions = source.max_questions;
      facts.asked_share = source.asked_share;
      facts.draw = draw;
      facts.bare_share = bare_share(source, f);
      facts.words = words;
      return fact_document(seed, index, facts, pool);
    }
    default:
      M3_FAIL("source '{}' is not generated", source.name);
  }
}

}  // namespace

data::Document generated_document(const SourceConfig& source, uint64_t seed, uint64_t index, double f,
                                  synthetic::Draw draw, const synthetic::TextPool& pool) {
  data::Document document = bare_document(source, seed, index, f, draw, pool);
  return source.full_prompt ? synthetic::behind_full_prompt(std::move(document)) : document;
}

// All sources of a run; used by one thread, in the order of steps.
class BatchMaker::Sources {
 public:
  Sources(const TrainConfig& config, const Tokenizer& tokenizer, const StreamStates& states)
      : config_(config),
        tokenizer_(tokenizer),
        builder_(std::make_shared<data::SampleBuilder>(tokenizer)) {
    const bool needs_pool = std::any_of(config.sources.begin(), config.sources.end(), takes_text);
    if (needs_pool && !config.corpus.empty()) {
      pool_ = load_text_pool(config.corpus, false, tokenizer);
    } else {
      pool_ = std::make_shared<const synthetic::TextPool>(std::vector<synthetic::TextPool::Page>(),
                                                          false, tokenizer);
    }
    for (const SourceConfig& source : config.sources) {
      // Sources of equal families differ by their names, so adding one leaves the documents of the
      // others alone.
      seeds_.push_back(sha256_u64(fmt::format("{}:{}", config.seed, source.name)));
      rows_.push_back(source.family == Family::kText ? std::make_unique<synthetic::TextRows>(
                                                           pool_, source.tokens, seeds_.back())
                                                     : nullptr);
      streams_.push_back(
          source.family == Family::kShards ? open_stream(source, seeds_.back(), states) : nullptr);
    }
  }

  Batch make(int64_t step) {
    Batch batch;
    batch.step = step;
    const double f = run_share(step, config_.steps);
    for (size_t i = 0; i < config_.sources.size(); ++i) {
      const SourceConfig& source = config_.sources[i];
      const int64_t count = documents_at(source, step, config_.steps);
      for (int64_t slot = 0; slot < count; ++slot) {
        const int64_t index = (source.repeat ? 0 : step / source.every * source.count) + slot;
        batch.documents.push_back({make_sample(i, index, f), static_cast<int>(i)});
      }
      if (streams_[i]) batch.streams[source.name] = streams_[i]->state();
    }
    return batch;
  }

 private:
  std::unique_ptr<data::SampleStream> open_stream(const SourceConfig& source, uint64_t seed,
                                                  const StreamStates& states) const {
    const data::Split split = source.split == "train"   ? data::Split::kTrain
                              : source.split == "valid" ? data::Split::kValid
                                                        : data::Split::kTest;
    auto set = std::make_shared<const data::ShardSet>(source.folder, split);
    M3_CHECK(set->num_documents() > 0, "source '{}': {} has no {} documents", source.name,
             source.folder, source.split);
    auto documents = std::make_shared<const data::ShardSource>(set, source.name, seed);
    const auto found = states.find(source.name);
    data::StreamOptions options;
    options.workers = 0;  // this object already works ahead of the model
    return std::make_unique<data::SampleStream>(
        std::make_shared<const data::DocumentSamples>(documents, builder_),
        found == states.end() ? data::StreamState{} : found->second, options);
  }

  data::Sample make_sample(size_t i, int64_t position, double f) {
    const SourceConfig& source = config_.sources[i];
    if (source.family == Family::kText) return rows_[i]->sample(position);
    if (source.family == Family::kShards) return streams_[i]->next();
    return builder_->build(generated_document(source, seeds_[i], static_cast<uint64_t>(position), f,
                                              synthetic::Draw::kTrain, *pool_));
  }

  TrainConfig config_;
  const Tokenizer& tokenizer_;
  std::shared_ptr<const data::SampleBuilder> builder_;
  std::shared_ptr<const synthetic::TextPool> pool_;
  std::vector<uint64_t> seeds_;
  std::vector<std::unique_ptr<synthetic::TextRows>> rows_;
  std::vector<std::unique_ptr<data::SampleStream>> streams_;
};

BatchMaker::BatchMaker(const TrainConfig& config, const Tokenizer& tokenizer, int64_t first,
                       const StreamStates& states)
    : sources_(std::make_unique<Sources>(config, tokenizer, states)) {
  // One worker: shards must be read in the order of steps.
  prefetcher_ = std::make_unique<data::Prefetcher<Batch>>(
      [this](int64_t step) { return sources_->make(step); }, first, 1, 2);
}

BatchMaker::~BatchMaker() = default;

Batch BatchMaker::next() {
  return prefetcher_->next();
}

PackedDocuments::PackedDocuments(const ModelConfig& config, const std::vector<BatchDocument>& batch,
                                 std::vector<int32_t> documents)
    : documents_(std::move(documents)) {
  size_t num_media = 0;
  for (const int32_t idx : documents_) num_media += batch[idx].sample.media.size();
  media_rows_.reserve(num_media);  // media_ points into it
  for (const int32_t idx : documents_) add(config, batch[idx].sample);
}

void PackedDocuments::add(const ModelConfig& config, const data::Sample& sample) {
  const int32_t first = static_cast<int32_t>(ids_T_.size());
  const size_t count = sample.ids.size();
  ids_T_.insert(ids_T_.end(), sample.ids.begin(), sample.ids.end());
  // Row t predicts id t + 1 of its document.
  for (size_t i = 0; i < count; ++i) {
    const bool is_target = i + 1 < count && sample.weights[i + 1] > 0;
    targets_T_.push_back(is_target ? sample.ids[i + 1] : -1);
    weights_T_.push_back(is_target ? sample.weights[i + 1] : 0);
  }
  cu_seqlens_.push_back(static_cast<int32_t>(ids_T_.size()));

  size_t at = 0;
  for (const MediaRows& media : sample.media) {
    std::vector<int32_t> rows;
    for (; static_cast<int64_t>(rows.size()) < media.grid.num_tokens(); ++at) {
      M3_CHECK(at < count, "document {}: its pictures need more placeholders than it has",
               sample.id);
      if (sample.ids[at] == config.image_token_id || sample.ids[at] == config.video_token_id) {
        rows.push_back(first + static_cast<int32_t>(at));
      }
    }
    media_rows_.push_back(std::move(rows));
    TrainMedia item;
    item.grid = {media.grid.t, media.grid.h, media.grid.w};
    item.patches_NP = Tensor(const_cast<float*>(media.rows.data()), DType::kF32,
                             {media.grid.num_rows(), kPatchValues});
    item.rows = media_rows_.back();
    media_.push_back(item);
    num_patches_ += media.grid.num_rows();
  }
}

MicroBatch PackedDocuments::micro_batch() const {
  return {ids_T_, cu_seqlens_, targets_T_, weights_T_, media_};
}

std::vector<int32_t> all_of(const std::vector<BatchDocument>& documents) {
  std::vector<int32_t> which(documents.size());
  std::iota(which.begin(), which.end(), 0);
  return which;
}

std::vector<std::vector<int32_t>> pack_documents(const std::vector<BatchDocument>& documents,
                                                 std::vector<int32_t> which, int64_t max_tokens,
                                                 int64_t max_patches) {
  struct Bin {
    int64_t tokens, patches;
    std::vector<int32_t> documents;
  };
  std::stable_sort(which.begin(), which.end(), [&](int32_t a, int32_t b) {
    return documents[a].sample.num_tokens() > documents[b].sample.num_tokens();
  });
  std::vector<Bin> bins;
  for (const int32_t idx : which) {
    const int64_t tokens = documents[idx].sample.num_tokens(),
                  patches = num_patches_of(documents[idx].sample);
    const auto fits = [&](const Bin& bin) {
      return bin.tokens + tokens <= max_tokens && bin.patches + patches <= max_patches;
    };
    auto bin = std::find_if(bins.begin(), bins.end(), fits);
    if (bin == bins.end()) bin = bins.insert(bins.end(), {0, 0, {}});
    bin->tokens += tokens;
    bin->patches += patches;
    bin->documents.push_back(idx);
  }
  std::vector<std::vector<int32_t>> packs;
  for (Bin& bin : bins) packs.push_back(std::move(bin.documents));
  return packs;
}

}  // namespace m3::train
