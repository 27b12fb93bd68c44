#include "train/eval/evaluator.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/file.h"
#include "formats/random_init.h"
#include "text/chat.h"
#include "text/json_value.h"
#include "text/utf8.h"
#include "train/synthetic/clips.h"
#include "train/synthetic/pictures.h"

namespace m3::eval {

using namespace synthetic;

const char* attention_name(Attention attention) {
  constexpr const char* kNames[] = {"msa", "random index", "window", "dense", "dsa"};
  return kNames[static_cast<int>(attention)];
}

namespace {

constexpr int64_t kPackTokens = 8192, kPackPatches = 16384;
constexpr uint64_t kRandomIndexSeed = 17;

struct DocumentScore {
  bool exact = true;     // every answer token is the arg-max
  double loss = 0;       // nats over the answer's tokens
  double text_loss = 0;  // nats over all targets
};

// Weights with other index projections, in memory of their own.
ModelWeights with_random_index(const ModelConfig& config, ModelWeights weights, Arena& arena) {
  for (int layer = 0; layer < config.text.num_layers; ++layer) {
    if (!config.text.is_sparse[layer]) continue;
    AttentionWeights& attention = weights.text.layers[layer].attention;
    for (Weight* weight : {&attention.index_q, &attention.index_k}) {
      const Tensor drawn = arena.alloc("random index", DType::kF32, weight->values.shape());
      const std::string name =
          fmt::format("{} {}", layer, weight == &attention.index_q ? "q" : "k");
      fill_normal(kRandomIndexSeed, name, 0,
                  {drawn.ptr<float>(), static_cast<size_t>(drawn.numel())});
      *weight = Weight(drawn);
    }
  }
  return weights;
}

int64_t index_bytes(const TextConfig& config) {
  return int64_t{4} * config.num_sparse_layers() * config.hidden_size * config.index_dim *
             (config.num_kv_heads + 1) +
         (1 << 16);
}

}  // namespace

// Documents through the model, in packs.
class Evaluator::Runner {
 public:
  explicit Runner(const Checkpoint& checkpoint)
      : config_(checkpoint.config()),
        weights_(weights_of(checkpoint)),
        gradients_arena_("gradients (untouched)", parameter_bytes(config_, DType::kF32)),
        index_arena_("random index", index_bytes(config_.text)),
        gradients_(alloc_parameters(config_, DType::kF32, gradients_arena_)),
        random_weights_(with_random_index(config_, weights_, index_arena_)) {}

  const ModelConfig& config() const { return config_; }

  std::vector<DocumentScore> score(std::vector<data::Sample> samples, Attention attention) {
    std::vector<train::BatchDocument> documents;
    for (data::Sample& sample : samples) documents.push_back({std::move(sample), 0});
    std::vector<DocumentScore> scores(documents.size());
    for (std::vector<int32_t>& group :
         train::pack_documents(documents, train::all_of(documents), kPackTokens, kPackPatches)) {
      const train::PackedDocuments pack(config_, documents, std::move(group));
      const MicroBatchResult result = model(attention, pack).forward_only(pack.micro_batch());
      for (size_t i = 0; i < pack.documents().size(); ++i) {
        const int32_t idx = pack.documents()[i];
        add(documents[idx].sample, pack.cu_seqlens()[i], result, scores[idx]);
      }
    }
    return scores;
  }

 private:
  static void add(const data::Sample& sample, int32_t first, const MicroBatchResult& result,
                  DocumentScore& score) {
    for (size_t i = 1; i < sample.ids.size(); ++i) {
      if (sample.weights[i] <= 0) continue;
      const size_t row = static_cast<size_t>(first) + i - 1;
      score.text_loss += result.loss_T[row];
      if (sample.weights[i] <= 1) continue;
      score.loss += result.loss_T[row];
      score.exact = score.exact && result.argmax_T[row] == sample.ids[i];
    }
  }

  TrainableModel& model(Attention attention, const train::PackedDocuments& pack) {
    const bool fits =
        pack.num_tokens() <= sizes_.max_tokens && pack.num_patches() <= sizes_.max_patches;
    if (model_ && fits && attention == attention_) return *model_;
    model_.reset();
    sizes_.max_tokens = std::max({sizes_.max_tokens, pack.num_tokens(), kPackTokens});
    if (config_.vision)
      sizes_.max_patches = std::max({sizes_.max_patches, pack.num_patches(), kPackPatches});
    attention_ = attention;
    TrainOptions options;
    options.stage = attention == Attention::kWindow  ? TrainStage::kWindow
                    : attention == Attention::kDense ? TrainStage::kFull
                    : attention == Attention::kDsa   ? TrainStage::kDsa
                                                     : TrainStage::kSparse;
    options.freeze = Freeze::kFrozenIndex;
    options.recompute = Recompute::kLayer;  // least memory
    const ModelWeights& weights = attention == Attention::kRandomIndex ? random_weights_ : weights_;
    model_ = std::make_unique<TrainableModel>(config_, weights, gradients_, options, sizes_);
    return *model_;
  }

  ModelConfig config_;
  ModelWeights weights_;
  Arena gradients_arena_, index_arena_;
  ModelWeights gradients_, random_weights_;
  TrainSizes sizes_;
  Attention attention_ = Attention::kMsa;
  std::unique_ptr<TrainableModel> model_;
};

Evaluator::Evaluator(const Checkpoint& checkpoint, const EvalOptions& options)
    : options_(options),
      tokenizer_(Tokenizer::load(checkpoint.folder())),
      builder_(tokenizer_),
      runner_(std::make_unique<Runner>(checkpoint)) {
  if (!options_.corpus.empty()) pool_ = train::load_text_pool(options_.corpus, true, tokenizer_);
}

Evaluator::~Evaluator() = default;

bool Evaluator::wants(const std::string& name) const {
  return options_.filters.empty() ||
         std::ranges::any_of(options_.filters, [&](const std::string& filter) {
           return name.find(filter) != std::string::npos;
         });
}

void Evaluator::report(Measure measure) {
  if (on_measure_) on_measure_(measure);
  measures_.push_back(std::move(measure));
}

void Evaluator::exact(const std::string& name, double chance, const Sampler& sampler) {
  exact(name, chance, sampler, options_.attention);
}

void Evaluator::exact(const std::string& name, double chance, const Sampler& sampler,
                      Attention attention) {
  if (!wants(name)) return;
  std::vector<data::Sample> samples;
  for (int64_t i = 0; i < options_.count; ++i) samples.push_back(sampler(static_cast<uint64_t>(i)));
  int64_t exact = 0;
  for (const DocumentScore& score : runner_->score(std::move(samples), attention))
    exact += score.exact;
  report({name, attention_name(attention),
          100.0 * static_cast<double>(exact) / static_cast<double>(options_.count), "%", chance,
          options_.count});
}

// Fresh cards of items that training draws too: the first that a model learns (nano.md §5).
void Evaluator::measure_cards() {
  const auto cards = [this](Ask ask) {
    return [this, ask](uint64_t index) {
      return builder_.build(
          picture_document(options_.seed, index, {.kind = PictureKind::kCard, .ask = ask}));
    };
  };
  exact("card: describe", 0, cards(Ask::kDescribe));
  exact("card: colour", 50, cards(Ask::kColour));
  measure_image_gap("card: gap of a foreign picture", cards(Ask::kDescribe));
}

void Evaluator::measure_pictures() {
  const auto pictures = [this](Draw draw, Ask ask, bool full_prompt = false) {
    return [this, draw, ask, full_prompt](uint64_t index) {
      data::Document document =
          picture_document(options_.seed, index, {.draw = draw, .ask = ask});
      if (full_prompt) document = behind_full_prompt(std::move(document));
      return builder_.build(document);
    };
  };
  exact("picture: describe", 0, pictures(Draw::kHeldOut, Ask::kDescribe));
  exact("picture: describe, unseen pair of colour and shape", 0,
        pictures(Draw::kStrong, Ask::kDescribe));
  exact("picture: count", 35, pictures(Draw::kHeldOut, Ask::kCount));
  exact("picture: colour", 50, pictures(Draw::kHeldOut, Ask::kColour));
  exact("picture: number", 0, pictures(Draw::kHeldOut, Ask::kNumber));
  exact("picture: position", 50, pictures(Draw::kHeldOut, Ask::kPosition));
  exact("picture: describe, full prompt", 0,
        pictures(Draw::kHeldOut, Ask::kDescribe, true));
  measure_image_gap("picture: gap of a foreign picture",
                    pictures(Draw::kHeldOut, Ask::kDescribe));
}

void Evaluator::measure_clips() {
  const auto clips = [this](ClipKind kind, ClipAsk ask) {
    return [this, kind, ask](uint64_t index) {
      return builder_.build(clip_document(
          options_.seed, index,
          {.kind = kind, .draw = Draw::kHeldOut, .ask = ask, .num_frames = options_.clip_frames}));
    };
  };
  exact("clip: order of appearance", 50, clips(ClipKind::kOrder, ClipAsk::kDescribe));
  exact("clip: event of one object", 12.5, clips(ClipKind::kOneObject, ClipAsk::kDescribe));
  exact("clip: event of the object named", 12.5, clips(ClipKind::kOneObject, ClipAsk::kEvent));
  exact("clip: events of two objects", 0, clips(ClipKind::kTwoObjects, ClipAsk::kDescribe));
}

// One fact among so many in a document: 6, 8, 10, 13, 16 from 256 to 4096 tokens (nano.md §1); 12 without
// filler (0 tokens).
void Evaluator::measure_facts() {
  if (!pool_) return;
  const auto facts_in = [](int64_t tokens) {
    return tokens == 0 ? 12 : tokens <= 256 ? 6 : tokens <= 512 ? 8 : tokens <= 1024 ? 10 : tokens <= 2048 ? 13 : 16;
  };
  std::vector<Attention> attentions = {options_.attention};
  if (options_.compare_attention && options_.attention == Attention::kMsa && runner_->config().text.num_sparse_layers() > 0) {
    attentions.insert(attentions.end(),
                      {Attention::kRandomIndex, Attention::kWindow, Attention::kDense});
  }
  for (const Attention attention : attentions) {
    for (const int64_t tokens : options_.fact_tokens) {
      const int num_facts = facts_in(tokens);
      const Sampler sampler = [&](uint64_t index) {
        FactOptions facts;
        facts.num_tokens = tokens;
        facts.min_facts = facts.max_facts = num_facts;
        facts.draw = Draw::kHeldOut;
        facts.depth = (static_cast<double>(index) + .5) / static_cast<double>(options_.count);
        return builder_.build(fact_document(options_.seed, index, facts, *pool_));
      };
      const std::string where = tokens == 0 ? "without filler" : fmt::format("in {} tokens", tokens);
      exact(fmt::format("facts: one of {} {}", num_facts, where), 100.0 / num_facts, sampler,
            attention);
    }
  }
}

// What a guess among what the document shows gives.
double chance_of(const train::SourceConfig& source) {
  using Family = train::SourceConfig::Family;
  if (source.family == Family::kFacts && source.min_facts == source.max_facts) return 100.0 / source.min_facts;
  if (source.family == Family::kClip && source.clip_ask == ClipAsk::kEvent)
    return source.clip_events == ClipEvents::kMoves ? 25 : 12.5;
  return -1;
}

void Evaluator::measure_source(const train::SourceConfig& source) {
  const bool needs_text = source.family == train::SourceConfig::Family::kFacts && source.tokens > 0;
  M3_CHECK(!needs_text || pool_, "source '{}' hides facts in text: give a corpus", source.name);
  const TextPool no_text({}, true, tokenizer_);
  const TextPool& pool = pool_ ? *pool_ : no_text;
  exact("source: " + source.name, chance_of(source), [&](uint64_t index) {
    const Draw draw = options_.fresh_sources ? Draw::kTrain : Draw::kHeldOut;
    return builder_.build(train::generated_document(source, options_.seed, index, 1, draw, pool));
  });
}

void Evaluator::measure_text() {
  std::string text;
  for (const std::filesystem::path& file : options_.texts) text += read_file(file);
  if (text.empty() && pool_) {
    Philox random(options_.seed);
    for (const std::string& line : pool_->take(options_.max_text_bytes / 2, random)) text += line;
  }
  if (text.empty()) return;
  text.resize(std::min(text.size(), static_cast<size_t>(options_.max_text_bytes)));
  while (!text.empty() && (static_cast<uint8_t>(text.back()) & 0x80) != 0)
    text.pop_back();  // no cut character
  const std::vector<int32_t> ids = tokenizer_.encode(text, {.added_tokens = false});
  const int32_t start = tokenizer_.require_added_id(chat_token::kConversationStart);
  for (const int64_t context : {int64_t{256}, int64_t{1024}}) {
    const std::string name = fmt::format("text: bits per byte, context {}", context);
    if (!wants(name)) continue;
    std::vector<data::Sample> rows;
    for (size_t begin = 0; begin < ids.size(); begin += static_cast<size_t>(context - 1)) {
      data::Sample row;
      row.ids = {start};
      const size_t end = std::min(ids.size(), begin + static_cast<size_t>(context - 1));
      row.ids.insert(row.ids.end(), ids.begin() + static_cast<int64_t>(begin),
                     ids.begin() + static_cast<int64_t>(end));
      row.weights.assign(row.ids.size(), 1);
      row.weights[0] = 0;
      rows.push_back(std::move(row));
    }
    double nats = 0;
    for (const DocumentScore& score : runner_->score(std::move(rows), options_.attention))
      nats += score.text_loss;
    const double uniform = std::log2(static_cast<double>(tokenizer_.size())) *
                           static_cast<double>(ids.size()) / static_cast<double>(text.size());
    report({name, attention_name(options_.attention), nats / std::numbers::ln2 / static_cast<double>(text.size()), "bits/byte",
            uniform, static_cast<int64_t>(text.size())});
  }
}

// Bits that a description costs more with another document's picture, of the same size, than with
// its own.
void Evaluator::measure_image_gap(const std::string& name, const Sampler& describe) {
  if (!wants(name) || options_.count < 2) return;
  std::vector<data::Sample> own, foreign;
  for (int64_t i = 0; i < options_.count; ++i) own.push_back(describe(static_cast<uint64_t>(i)));
  foreign = own;
  for (size_t i = 0; i < own.size(); ++i) foreign[i].media = own[(i + 1) % own.size()].media;
  double bits = 0;
  for (const DocumentScore& score : runner_->score(std::move(foreign), options_.attention))
    bits += score.loss;
  for (const DocumentScore& score : runner_->score(std::move(own), options_.attention))
    bits -= score.loss;
  report({name, attention_name(options_.attention), bits / std::numbers::ln2 / static_cast<double>(options_.count), "bits", 0,
          options_.count});
}

std::vector<Measure> Evaluator::run(const std::function<void(const Measure&)>& on_measure) {
  measures_.clear();
  on_measure_ = on_measure;
  if (runner_->config().vision) {
    measure_cards();
    measure_pictures();
    measure_clips();
  }
  measure_facts();
  for (const train::SourceConfig& source : options_.sources) measure_source(source);
  measure_text();
  exact("chat: held-out wordings", -1, [this](uint64_t index) {
    return builder_.build(chat_document(options_.seed, index, Draw::kHeldOut));
  });
  return measures_;
}

std::string measures_table(const std::vector<Measure>& measures) {
  std::string out = fmt::format("{:<52}{:<14}{:>10}{:>10}{:>9}\n", "measure", "attention", "value",
                                "chance", "of");
  for (const Measure& m : measures) {
    const std::string chance = m.chance < 0                     ? "-"
                               : m.unit == "%" && m.chance == 0 ? "< 1"
                                                                : fmt::format("{:.4g}", m.chance);
    out +=
        fmt::format("{:<52}{:<14}{:>10}{:>10}{:>9} {}\n", m.name, m.attention,
                    m.unit == "%" ? fmt::format("{:.1f}", m.value) : fmt::format("{:.3f}", m.value),
                    chance, m.count, m.unit);
  }
  return out;
}

std::string measures_json(const std::vector<Measure>& measures) {
  JsonValue list = JsonValue::array();
  for (const Measure& m : measures) {
    JsonValue entry = JsonValue::object();
    entry.append_member("name", JsonValue::string(m.name));
    entry.append_member("attention", JsonValue::string(m.attention));
    entry.append_member("value", JsonValue::number(m.value));
    entry.append_member("unit", JsonValue::string(m.unit));
    entry.append_member("chance", m.chance < 0 ? JsonValue() : JsonValue::number(m.chance));
    entry.append_member("count", JsonValue::integer(m.count));
    list.push_back(std::move(entry));
  }
  return list.dump() + "\n";
}

}  // namespace m3::eval
