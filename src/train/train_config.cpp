#include "train/train_config.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <set>

#include "base/check.h"
#include "base/file.h"
#include "formats/json_fields.h"
#include "train/synthetic/clips.h"

namespace m3::train {

using nlohmann::json;
using synthetic::ClipAsk;
using synthetic::ClipEvents;
using synthetic::ClipKind;

const char* group_name(Group group) {
  constexpr const char* kNames[kNumGroups] = {"text", "vision", "indexer"};
  return kNames[static_cast<int>(group)];
}

namespace {

constexpr double kHuge = 1e9;
constexpr int64_t kMaxCount = int64_t{1} << 40;

template <typename T>
struct Word {
  const char* word;
  T value;
};

// One word of a list; absent: the default.
template <typename T, size_t N>
T choice(JsonFields& fields, const char* key, T value, const Word<T> (&words)[N]) {
  const auto text = fields.text(key);
  if (!text) return value;
  std::string list;
  for (const Word<T>& word : words) {
    if (*text == word.word) return word.value;
    list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", word.word);
  }
  fields.refuse(key, "want one of " + list);
}

using Family = SourceConfig::Family;
constexpr Word<TrainStage> kStages[] = {{"warmup", TrainStage::kWarmup},
                                        {"sparse", TrainStage::kSparse},
                                        {"full", TrainStage::kFull},
                                        {"window", TrainStage::kWindow},
                                        {"dsa", TrainStage::kDsa}};
constexpr Word<Freeze> kFreezes[] = {{"none", Freeze::kNone},
                                     {"index_only", Freeze::kIndexOnly},
                                     {"frozen_index", Freeze::kFrozenIndex}};
constexpr Word<Family> kFamilies[] = {{"card", Family::kCard},     {"picture", Family::kPicture},
                                      {"clip", Family::kClip},     {"chat", Family::kChat},
                                      {"repeat", Family::kRepeat}, {"facts", Family::kFacts},
                                      {"text", Family::kText},     {"shards", Family::kShards}};
constexpr Word<ClipKind> kClipKinds[] = {{"any", ClipKind::kAny},
                                         {"one_object", ClipKind::kOneObject},
                                         {"two_objects", ClipKind::kTwoObjects},
                                         {"order", ClipKind::kOrder}};
constexpr Word<ClipAsk> kClipAsks[] = {
    {"any", ClipAsk::kAny}, {"describe", ClipAsk::kDescribe}, {"event", ClipAsk::kEvent}};
constexpr Word<ClipEvents> kClipEvents[] = {{"any", ClipEvents::kAny},
                                            {"moves", ClipEvents::kMoves}};
constexpr Word<DType> kDTypes[] = {{"f32", DType::kF32}, {"bf16", DType::kBF16}};
constexpr Word<GuardConfig::Action> kActions[] = {{"skip", GuardConfig::Action::kSkip},
                                                  {"stop", GuardConfig::Action::kStop}};

double number(JsonFields& fields, const char* key, double value, double low, double high) {
  return fields.number(key, low, high).value_or(value);
}
int64_t integer(JsonFields& fields, const char* key, int64_t value, int64_t low, int64_t high) {
  return fields.integer(key, low, high).value_or(value);
}

InitConfig read_init(JsonFields fields) {
  using Scheme = InitConfig::Scheme;
  constexpr Word<Scheme> kSchemes[] = {
      {"normal", Scheme::kNormal}, {"fan_in", Scheme::kFanIn}, {"checkpoint", Scheme::kCheckpoint}};
  InitConfig init;
  init.scheme = choice(fields, "scheme", init.scheme, kSchemes);
  init.std = number(fields, "std", init.std, 0, 10);
  init.embedding_std = number(fields, "embedding_std", init.embedding_std, 0, 10);
  init.head_std = number(fields, "head_std", init.head_std, 0, 10);
  init.scale_residual = fields.boolean("scale_residual").value_or(init.scale_residual);
  init.positional_start = fields.boolean("positional_start").value_or(false);
  init.checkpoint = fields.text("checkpoint").value_or("");
  if (init.scheme == Scheme::kCheckpoint && init.checkpoint.empty()) fields.missing("checkpoint");
  fields.refuse_unknown();
  return init;
}

GroupConfig read_group(JsonFields fields, GroupConfig group) {
  group.lr_factor = number(fields, "lr_factor", group.lr_factor, 0, 1000);
  group.clip = number(fields, "clip", group.clip, 0, kHuge);
  group.weight_decay = number(fields, "weight_decay", group.weight_decay, 0, 10);
  group.frozen = fields.boolean("frozen").value_or(false);
  fields.refuse_unknown();
  return group;
}

OptimizerConfig read_optimizer(JsonFields fields) {
  OptimizerConfig out;
  out.lr = fields.need_number("lr", 0, 10);
  out.beta1 = number(fields, "beta1", out.beta1, 0, 0.999999);
  out.beta2 = number(fields, "beta2", out.beta2, 0, 0.999999);
  out.eps = number(fields, "eps", out.eps, 1e-20, 1);
  out.embedding_decay = number(fields, "embedding_decay", out.embedding_decay, 0, 10);
  out.head_decay = number(fields, "head_decay", out.head_decay, 0, 10);
  out.moments = choice(fields, "moments", out.moments, kDTypes);
  out.router_bias_step = number(fields, "router_bias_step", out.router_bias_step, 0, 1);
  out.router_bias_in_decay =
      fields.boolean("router_bias_in_decay").value_or(out.router_bias_in_decay);
  out.groups[0].weight_decay = out.groups[1].weight_decay =
      0.1;  // training.md §10; the indexer has none
  for (int i = 0; i < kNumGroups; ++i) {
    if (auto group = fields.object(group_name(static_cast<Group>(i))))
      out.groups[i] = read_group(*group, out.groups[i]);
  }
  fields.refuse_unknown();
  return out;
}

ScheduleConfig read_schedule(JsonFields fields) {
  using Kind = ScheduleConfig::Kind;
  constexpr Word<Kind> kKinds[] = {{"cosine", Kind::kCosine},
                                   {"stable_decay", Kind::kStableDecay},
                                   {"constant", Kind::kConstant}};
  ScheduleConfig out;
  out.kind = choice(fields, "kind", out.kind, kKinds);
  out.warmup_steps = integer(fields, "warmup_steps", 0, 0, kMaxCount);
  out.final_factor = number(fields, "final_factor", 0, 0, 1);
  out.decay_share = number(fields, "decay_share", out.decay_share, 0, 1);
  fields.refuse_unknown();
  return out;
}

std::vector<StageConfig> read_stages(JsonFields& root) {
  std::vector<StageConfig> stages;
  for (JsonFields& fields : root.objects("stages")) {
    StageConfig stage;
    stage.until = number(fields, "until", 1, 0, 1);
    stage.attention = choice(fields, "attention", stage.attention, kStages);
    stage.freeze = choice(fields, "freeze", stage.freeze, kFreezes);
    stage.indexer_lr_factor = number(fields, "indexer_lr_factor", 1, 0, 1000);
    if (!stages.empty() && stage.until <= stages.back().until) {
      fields.refuse("until",
                    fmt::format("stages must end one after another, the one before ends at {}",
                                stages.back().until));
    }
    if (stage.freeze == Freeze::kIndexOnly && !teaches_index(stage.attention)) {
      fields.refuse("freeze",
                    "\"index_only\" needs an attention that teaches the index: \"warmup\", "
                    "\"sparse\" or \"dsa\"");
    }
    fields.refuse_unknown();
    stages.push_back(stage);
  }
  if (stages.empty()) stages.push_back({});
  if (stages.back().until != 1) root.refuse("stages", "the last one must end at 1");
  return stages;
}

void read_range(JsonFields& fields, const char* key, int& low, int& high, int most) {
  const auto values = fields.integers(key, 1, most, 2);
  if (!values) return;
  low = static_cast<int>((*values)[0]);
  high = static_cast<int>((*values)[1]);
  if (low > high) fields.refuse(key, "want [least, most]");
}

void read_clip(JsonFields& fields, SourceConfig& out) {
  out.clip_kind = choice(fields, "kind", out.clip_kind, kClipKinds);
  out.clip_ask = choice(fields, "ask", out.clip_ask, kClipAsks);
  out.clip_events = choice(fields, "events", out.clip_events, kClipEvents);
  out.frames = static_cast<int>(integer(fields, "frames", out.frames, 8, 64));
  out.hold = static_cast<int>(integer(fields, "hold", out.hold, 1, 8));
  out.cells = static_cast<int>(integer(fields, "cells", out.cells, 2, 3));
  out.timestamps = fields.boolean("timestamps").value_or(out.timestamps);
  out.tint = number(fields, "tint", out.tint, 0, 1);
  if (const auto name = fields.text("colour")) {
    const auto found = std::ranges::find(synthetic::kColourNames, *name);
    if (found == synthetic::kColourNames.end())
      fields.refuse("colour", fmt::format("want one of {}", fmt::join(synthetic::kColourNames, ", ")));
    out.colour = static_cast<int>(found - synthetic::kColourNames.begin());
  }
  const bool may_be_order = out.clip_kind == ClipKind::kAny || out.clip_kind == ClipKind::kOrder;
  if (out.clip_ask == ClipAsk::kEvent && may_be_order)
    fields.refuse("ask", "\"event\" needs kind \"one_object\" or \"two_objects\"");
  if (out.frames / out.hold < synthetic::kClipFrames)
    fields.refuse("hold", fmt::format("{} frames show less than {} pictures", out.frames,
                                      synthetic::kClipFrames));
}

void read_fact_words(JsonFields& fields, SourceConfig& out) {
  if (out.family == Family::kRepeat) out.max_facts = 9;
  out.num_names = static_cast<int>(integer(fields, "names", out.num_names, 1, out.num_names));
  out.num_words = static_cast<int>(integer(fields, "words", out.num_words, 1, out.num_words));
  read_range(fields, "facts", out.min_facts, out.max_facts, out.num_names);
  if (out.max_facts > out.num_names)
    fields.refuse("names", fmt::format("want a name for each of {} facts", out.max_facts));
}

SourceConfig read_source(JsonFields& fields) {
  SourceConfig out;
  out.name = fields.need("name", fields.text("name"));
  out.log_as = fields.text("log_as").value_or(out.name);
  fields.need("family", fields.text("family"));
  out.family = choice(fields, "family", out.family, kFamilies);
  out.count = fields.need_integer("count", 0, 1 << 20);
  out.every = integer(fields, "every", 1, 1, kMaxCount);
  out.from = number(fields, "from", 0, 0, 1);
  out.until = number(fields, "until", 1, 0, 1);
  if (out.family != Family::kShards) out.repeat = fields.boolean("repeat").value_or(false);
  const bool picture = out.family == Family::kPicture;
  if (picture || out.family == Family::kClip)
    out.easy_until = number(fields, "easy_until", 0, 0, 1);
  if (out.family != Family::kShards && out.family != Family::kText)
    out.full_prompt = fields.boolean("full_prompt").value_or(false);
  if (out.family == Family::kClip) read_clip(fields, out);
  if (out.family == Family::kText || out.family == Family::kFacts)
    out.tokens = integer(fields, "tokens", out.tokens, 0, 1 << 20);
  if (out.family == Family::kText && out.tokens < 2)
    fields.refuse("tokens", "a row of text needs at least 2");
  if (out.family == Family::kFacts) {
    out.bare_until = number(fields, "bare_until", 0, 0, 1);
    out.bare_min = number(fields, "bare_min", 0, 0, 1);
    out.asked_share = number(fields, "asked_share", 0, 0, 1);
    read_range(fields, "questions", out.min_questions, out.max_questions, 48);
  }
  if (out.family == Family::kFacts || out.family == Family::kRepeat) read_fact_words(fields, out);
  if (out.family == Family::kShards) {
    out.folder = fields.need("folder", fields.text("folder"));
    out.split = fields.text("split").value_or(out.split);
    if (out.split != "train" && out.split != "valid" && out.split != "test")
      fields.refuse("split", "want \"train\", \"valid\" or \"test\"");
  }
  fields.refuse_unknown();
  return out;
}

std::vector<SourceConfig> read_sources(JsonFields& root) {
  std::vector<SourceConfig> sources;
  std::set<std::string> names;
  for (JsonFields& fields : root.objects("sources")) {
    sources.push_back(read_source(fields));
    if (!names.insert(sources.back().name).second)
      fields.refuse("name", "another source has this name already");
  }
  if (sources.empty()) root.missing("sources");
  return sources;
}

ComputeConfig read_compute(JsonFields fields) {
  ComputeConfig out;
  out.dtype = choice(fields, "dtype", out.dtype, kDTypes);
  out.recompute = fields.boolean("recompute").value_or(false);
  out.batch_invariant = fields.boolean("batch_invariant").value_or(true);
  out.micro_batch_tokens =
      integer(fields, "micro_batch_tokens", out.micro_batch_tokens, 1, 1 << 24);
  out.micro_batch_patches =
      integer(fields, "micro_batch_patches", out.micro_batch_patches, 1, 1 << 24);
  out.replicas = static_cast<int>(integer(fields, "replicas", 1, 1, 1024));
  out.threads = static_cast<int>(integer(fields, "threads", 0, 0, 4096));
  fields.refuse_unknown();
  return out;
}

GuardConfig read_guard(JsonFields fields) {
  GuardConfig out;
  out.non_finite = choice(fields, "non_finite", out.non_finite, kActions);
  out.spike_factor = number(fields, "spike_factor", 0, 0, kHuge);
  out.spike = choice(fields, "spike", out.spike, kActions);
  out.max_skipped = integer(fields, "max_skipped", out.max_skipped, 1, kMaxCount);
  fields.refuse_unknown();
  return out;
}

void read_operation(JsonFields& root, TrainConfig& out) {
  if (auto fields = root.object("save")) {
    out.save.every = integer(*fields, "every", out.save.every, 1, kMaxCount);
    out.save.keep = static_cast<int>(integer(*fields, "keep", out.save.keep, 1, 1000));
    out.save.keep_every = integer(*fields, "keep_every", 0, 0, kMaxCount);
    fields->refuse_unknown();
  }
  if (auto fields = root.object("log")) {
    out.log.every = integer(*fields, "every", out.log.every, 1, kMaxCount);
    out.log.attention_every = integer(*fields, "attention_every", 0, 0, kMaxCount);
    fields->refuse_unknown();
  }
}

// --- overrides
json parse_value(const std::string& text) {
  json value = json::parse(text, nullptr, false);
  return value.is_discarded() ? json(text) : value;
}

// The member `word` of an object, or of a list by number or by its "name".
json& step_into(json& at, const std::string& word, const std::string& override_text) {
  if (at.is_null()) at = json::object();
  if (at.is_object()) return at[word];
  M3_CHECK(at.is_array(), "--set {}: nothing lies below the value before '{}'", override_text,
           word);
  size_t index = at.size();
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), index);
  if (error != std::errc() || end != word.data() + word.size()) {
    for (index = 0; index < at.size(); ++index) {
      if (at[index].is_object() && at[index].value("name", json()) == word) break;
    }
  }
  M3_CHECK(index < at.size(),
           "--set {}: the list has no member '{}' (want a number below {} or a member's name)",
           override_text, word, at.size());
  return at[index];
}

void apply_override(json& root, const std::string& text) {
  const size_t equals = text.find('=');
  M3_CHECK(equals != std::string::npos && equals > 0, "--set wants KEY=VALUE, got '{}'", text);
  json* at = &root;
  for (size_t begin = 0; begin <= equals;) {
    const size_t end = std::min(text.find('.', begin), equals);
    M3_CHECK(end > begin, "--set {}: an empty part of the key", text);
    at = &step_into(*at, text.substr(begin, end - begin), text);
    begin = end + 1;
  }
  *at = parse_value(text.substr(equals + 1));
}

void read_model(const json& root, TrainConfig& out) {
  const std::string file = out.file.string();
  const auto model = root.find("model");
  M3_CHECK(model != root.end() && (model->is_string() || model->is_object()),
           "{}: model must be the path of a config.json or its object", file);
  if (model->is_object()) {
    out.model_json = model->dump(1);
    out.model = parse_model_config(out.model_json, file + ": model");
  } else {
    const std::filesystem::path path = model->get<std::string>();
    out.model_json =
        read_file(std::filesystem::is_directory(path) ? path / "config.json" : path, kMaxJsonBytes);
    out.model = parse_model_config(out.model_json, path.string());
  }
}

std::string identity_of(json root, const std::string& model_json) {
  for (const char* key : {"output", "save", "log"}) root.erase(key);
  if (root.contains("compute")) {
    root["compute"].erase("threads");
    if (root["compute"].value("replicas", 1) == 1) root["compute"].erase("replicas");
  }
  root["model"] = json::parse(model_json);
  return root.dump();
}

void check_whole(const TrainConfig& config) {
  const std::string file = config.file.string();
  const bool has_vision = config.model.vision.has_value();
  for (const SourceConfig& source : config.sources) {
    const bool needs_vision = source.family == Family::kCard || source.family == Family::kPicture ||
                              source.family == Family::kClip;
    M3_CHECK(!needs_vision || has_vision,
             "{}: source '{}' has pictures, but the model has no vision_config", file, source.name);
    const bool needs_text =
        source.family == Family::kText ||
        (source.family == Family::kFacts && source.tokens > 0 && source.bare_min < 1);
    M3_CHECK(
        !needs_text || !config.corpus.empty(),
        "{}: source '{}' takes text from the corpus; give \"corpus\": a folder made by m3 data",
        file, source.name);
  }
  M3_CHECK(config.model.quantization == Quantization::kNone,
           "{}: a model in MXFP8 cannot be trained; remove quantization_config", file);
  M3_CHECK(config.schedule.warmup_steps <= config.steps,
           "{}: schedule.warmup_steps is {}; want at most steps = {}", file,
           config.schedule.warmup_steps, config.steps);
}

}  // namespace

const char* freeze_name(Freeze freeze) {
  for (const auto& word : kFreezes) {
    if (word.value == freeze) return word.word;
  }
  return "?";
}

SourceConfig parse_source(const std::string& text) {
  json root = parse_json(text, "the source");
  if (root.is_object() && !root.contains("count")) root["count"] = 1;
  JsonFields fields(root, "the source");
  return read_source(fields);
}

TrainConfig parse_train_config(const std::string& text, const std::filesystem::path& file,
                               const std::vector<std::string>& overrides) {
  json root = parse_json(text, file.string());
  for (const std::string& override_text : overrides) apply_override(root, override_text);
  JsonFields fields(root, file.string());
  TrainConfig out;
  out.file = file;
  fields.skip({"model", "about"});
  read_model(root, out);
  out.tokenizer = fields.need("tokenizer", fields.text("tokenizer"));
  out.output = fields.need("output", fields.text("output"));
  out.corpus = fields.text("corpus").value_or("");
  out.seed = static_cast<uint64_t>(integer(fields, "seed", 0, 0, INT64_MAX));
  out.steps = fields.need_integer("steps", 1, kMaxCount);
  if (auto init = fields.object("init")) out.init = read_init(*init);
  out.optimizer = read_optimizer(fields.need("optimizer", fields.object("optimizer")));
  if (auto schedule = fields.object("schedule")) out.schedule = read_schedule(*schedule);
  out.stages = read_stages(fields);
  if (auto loss = fields.object("loss")) {
    out.loss.kl_weight = number(*loss, "kl_weight", 0, 0, kHuge);
    out.loss.kl_min_tokens = integer(*loss, "kl_min_tokens", 0, 0, kMaxCount);
    out.loss.z_weight = number(*loss, "z_weight", 0, 0, 1);
    out.loss.balance_alpha = number(*loss, "balance_alpha", 0, 0, 1);
    out.loss.detach_index_input = loss->boolean("detach_index_input").value_or(true);
    loss->refuse_unknown();
  }
  out.sources = read_sources(fields);
  if (auto compute = fields.object("compute")) out.compute = read_compute(*compute);
  if (auto guard = fields.object("guard")) out.guard = read_guard(*guard);
  read_operation(fields, out);
  fields.refuse_unknown();
  check_whole(out);
  out.identity = identity_of(root, out.model_json);
  out.resolved = root.dump(1);
  return out;
}

TrainConfig read_train_config(const std::filesystem::path& file,
                              const std::vector<std::string>& overrides) {
  return parse_train_config(read_file(file, kMaxJsonBytes), file, overrides);
}

}  // namespace m3::train
