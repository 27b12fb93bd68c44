// models/NAME/training.json (tests/golden/README.md): losses, gradients and AdamW steps of the fp64
// oracle through TrainableModel. The gradients of the first step are also taken document by
// document and with recomputation: the same sums, the same tolerance. In bf16 the weights are bf16;
// activations are f32 in models of this size (decoder.h), where one flipped expert would change the
// gradient of a whole matrix.
#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "model/model.h"
#include "model/trainable_model.h"
#include "ops/adamw/adamw.h"
#include "ops/elementwise/elementwise.h"
#include "ops/moe_router/moe_router.h"
#include "verify/golden_input.h"
#include "verify/suites.h"

namespace m3::verify {
namespace {

using nlohmann::ordered_json;

struct Tolerances {
  double loss, gradient;
};
Tolerances tolerances_of(DType dtype) {
  return dtype == DType::kF32 ? Tolerances{1e-6, 1e-5} : Tolerances{1e-2, 5e-2};
}

enum class Group { kBackbone, kVision, kIndexer };
Group group_of(const std::string& name) {
  if (name.find("index_") != std::string::npos) return Group::kIndexer;
  for (const char* part : {"vision_tower.", "multi_modal_projector.", "patch_merge_mlp."}) {
    if (name.starts_with(part)) return Group::kVision;
  }
  return Group::kBackbone;
}
constexpr const char* kGroupNames[] = {"backbone", "vision", "indexer"};
bool is_router_bias(const std::string& name) {
  return name.ends_with("e_score_correction_bias");
}

double relative_error(std::span<const float> got, std::span<const float> want) {
  double miss = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    miss += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
    norm += double{want[i]} * want[i];
  }
  return miss == 0 ? 0 : std::sqrt(miss / norm);
}

std::span<const float> elements(const Tensor& t) {
  return {t.ptr<float>(), static_cast<size_t>(t.numel())};
}

// A document with its media, as training takes it.
struct Document {
  std::vector<int32_t> ids, targets;
  struct Media {
    VisionGrid grid;
    std::vector<float> patches;
    std::vector<int32_t> rows;
  };
  std::vector<Media> media;
};

Document load_document(const ModelConfig& config, const ordered_json& entry,
                       const SafetensorsFile& tensors) {
  Document document;
  document.ids = golden_ids(entry.at("ids"));
  const auto& counts = entry.at("target");
  for (size_t t = 0; t < document.ids.size(); ++t) {
    const bool counted = t < counts.size() && counts[t] != 0;
    document.targets.push_back(counted ? document.ids[t + 1] : -1);
  }
  std::vector<PlaceholderItem> items;
  for (const ordered_json& item : entry.value("media", ordered_json::array())) {
    const ordered_json& grid = item.at("grid");
    Document::Media media;
    media.grid = {grid.at(0), grid.at(1), grid.at(2)};
    media.patches =
        golden_input(item.at("patches"), {media.grid.num_patches(), config.vision->patch_numel()},
                     DType::kF32, &tensors);
    items.push_back(
        {item.at("type") == "video", media.grid.num_patches() / config.vision->merge_factor()});
    document.media.push_back(std::move(media));
  }
  const PlaceholderMap map = map_placeholders(config, document.ids, items);
  std::vector<int32_t> row_of_feature(map.order.size());
  for (size_t i = 0; i < map.order.size(); ++i) row_of_feature[map.order[i]] = map.positions[i];
  auto next = row_of_feature.begin();
  for (size_t i = 0; i < items.size(); ++i) {
    document.media[i].rows.assign(next, next + items[i].num_features);
    next += items[i].num_features;
  }
  return document;
}

// Several documents as one micro-batch.
struct Pack {
  std::vector<int32_t> ids, cu_seqlens = {0}, targets;
  std::vector<std::vector<int32_t>> rows;
  std::vector<TrainMedia> media;

  Pack(const ModelConfig& config, std::span<Document> documents) {
    for (Document& document : documents) {
      const auto begin = static_cast<int32_t>(ids.size());
      ids.insert(ids.end(), document.ids.begin(), document.ids.end());
      targets.insert(targets.end(), document.targets.begin(), document.targets.end());
      cu_seqlens.push_back(static_cast<int32_t>(ids.size()));
      for (Document::Media& item : document.media) {
        rows.push_back(item.rows);
        for (int32_t& row : rows.back()) row += begin;
        const Shape shape = {item.grid.num_patches(), config.vision->patch_numel()};
        media.push_back({item.grid, Tensor(item.patches.data(), DType::kF32, shape), {}});
      }
    }
    for (size_t i = 0; i < media.size(); ++i) media[i].rows = rows[i];
  }
  MicroBatch batch() const { return {ids, cu_seqlens, targets, {}, media}; }
};

class TrainingCase {
 public:
  TrainingCase(const Checkpoint& checkpoint, const SafetensorsFile& tensors,
               const ordered_json& document, DType dtype)
      : config_(checkpoint.config()),
        tensors_(tensors),
        document_(document),
        dtype_(dtype),
        tolerances_(tolerances_of(dtype)),
        arena_("golden training",
               4 * parameter_bytes(config_, DType::kF32) + parameter_bytes(config_, dtype)) {
    masters_ = alloc_parameters(config_, DType::kF32, arena_);
    gradients_ = alloc_parameters(config_, DType::kF32, arena_);
    first_moments_ = alloc_parameters(config_, DType::kF32, arena_);
    second_moments_ = alloc_parameters(config_, DType::kF32, arena_);
    weights_ = dtype == DType::kF32 ? masters_ : alloc_parameters(config_, dtype, arena_);
    const ModelWeights stored = weights_of(checkpoint);
    for (const ModelWeights* to : {&masters_, &weights_}) {
      std::vector<Tensor> from;
      for_each_parameter(config_, stored,
                         [&](const std::string&, const Tensor& t) { from.push_back(t); });
      size_t i = 0;
      for_each_parameter(config_, *to,
                         [&](const std::string&, const Tensor& t) { cast(from[i++], t); });
    }
    for (const ordered_json& entry : document.at("documents")) {
      documents_.push_back(load_document(config_, entry, tensors));
    }
    options_.dtype = dtype;
    options_.lambda = document.at("lambda");
  }

  std::string steps(const std::string& stage);
  std::string one_step();

 private:
  // Gradients of all documents, as one micro-batch or one each.
  TrainSums gradients(bool one_pack, Recompute recompute);
  void check_close(const char* what, double got, double want) const {
    M3_CHECK(std::abs(got - want) <= tolerances_.loss * std::abs(want),
             "{} is {:.9g}, want {:.9g} (relative {:.0e})", what, got, want, tolerances_.loss);
  }
  void check_losses(const ordered_json& want, const TrainSums& sums) const;
  void check_counts(const ordered_json& want, const TrainSums& sums) const;
  std::map<Group, double> gradient_norms() const;
  void adamw_step(int step, const std::map<Group, double>& norms);
  void balance_step(const TrainSums& sums);
  double worst_gradient(const std::string& prefix) const;
  std::string compare_weights(const std::string& prefix) const;

  const ModelConfig& config_;
  const SafetensorsFile& tensors_;
  const ordered_json& document_;
  const DType dtype_;
  const Tolerances tolerances_;
  Arena arena_;
  ModelWeights masters_, gradients_, first_moments_, second_moments_, weights_;
  std::vector<Document> documents_;
  TrainOptions options_;
};

TrainSums TrainingCase::gradients(bool one_pack, Recompute recompute) {
  for_each_parameter(config_, gradients_,
                     [](const std::string&, const Tensor& t) { fill_zero(t); });
  std::vector<Pack> packs;
  if (one_pack) {
    packs.emplace_back(config_, documents_);
  } else {
    for (Document& document : documents_) packs.emplace_back(config_, std::span(&document, 1));
  }
  options_.recompute = recompute;
  Normalisers global;
  TrainSizes sizes;
  for (const Pack& pack : packs) {
    global.add(normalisers_of(pack.batch(), options_));
    sizes.max_tokens = std::max<int64_t>(sizes.max_tokens, pack.ids.size());
    int64_t patches = 0;
    for (const TrainMedia& item : pack.media) patches += item.grid.num_patches();
    sizes.max_patches = std::max(sizes.max_patches, patches);
  }
  TrainableModel model(config_, weights_, gradients_, options_, sizes);
  TrainSums sums;
  for (const Pack& pack : packs) sums.add(model.forward_backward(pack.batch(), global).sums);
  return sums;
}

void TrainingCase::check_losses(const ordered_json& want, const TrainSums& sums) const {
  const TrainLoss loss = train_loss(config_.text, options_, sums);
  check_close("loss", loss.total(), want.at("loss"));
  check_close("ce", loss.ce, want.at("ce"));
  size_t i = 0;
  for (int l = 0; l < config_.text.num_layers; ++l) {
    if (config_.text.is_sparse[l] == 0) continue;
    const double queries = static_cast<double>(sums.counts.kl_queries) * config_.text.num_kv_heads;
    check_close(fmt::format("kl of layer {}", l).c_str(), sums.kl_L[l] / queries,
                want.at("kl").at(i++));
  }
}

void TrainingCase::check_counts(const ordered_json& want, const TrainSums& sums) const {
  const int E = config_.text.num_experts;
  size_t i = 0;
  for (int l = 0; l < config_.text.num_layers; ++l) {
    if (config_.text.is_moe[l] == 0) continue;
    const ordered_json& row = want.at("expert_counts").at(i++);
    for (int e = 0; e < E; ++e) {
      const int64_t got = sums.text_experts_LE[l * E + e] + sums.media_experts_LE[l * E + e];
      M3_CHECK(got == row.at(e).get<int64_t>(), "layer {}: expert {} has {} tokens, want {}", l, e,
               got, row.at(e).get<int64_t>());
    }
  }
}

std::map<Group, double> TrainingCase::gradient_norms() const {
  std::map<Group, double> squares;
  for_each_parameter(config_, gradients_, [&](const std::string& name, const Tensor& g) {
    squares[group_of(name)] += grad_sum_of_squares(g);
  });
  for (auto& [group, square] : squares) square = std::sqrt(square);
  return squares;
}

void TrainingCase::adamw_step(int step, const std::map<Group, double>& norms) {
  std::vector<std::pair<std::string, Tensor>> w;
  std::vector<Tensor> g, m, v, copy;
  for_each_parameter(config_, masters_, [&](const std::string& name, const Tensor& t) {
    w.push_back({name, t});
  });
  const auto list = [&](const ModelWeights& from, std::vector<Tensor>& to) {
    for_each_parameter(config_, from,
                       [&](const std::string&, const Tensor& t) { to.push_back(t); });
  };
  list(gradients_, g);
  list(first_moments_, m);
  list(second_moments_, v);
  list(weights_, copy);
  for (size_t i = 0; i < w.size(); ++i) {
    const auto& [name, master] = w[i];
    if (is_router_bias(name)) continue;
    const Group group = group_of(name);
    AdamW config;
    config.step = step;
    config.eps = document_.at("eps");
    config.lr = document_.at("learning_rate");
    if (group == Group::kIndexer) config.lr *= document_.at("index_lr_factor").get<float>();
    const bool decays =
        master.rank() >= 2 && group != Group::kIndexer && !name.ends_with("embed_tokens.weight");
    config.weight_decay = decays ? document_.at("weight_decay").get<float>() : 0.0f;
    config.grad_factor = clip_factor(norms.at(group), document_.at("clip"));
    const bool own_copy = copy[i].data() != master.data();
    adamw(master, g[i], m[i], v[i],
          own_copy && copy[i].dtype() == DType::kBF16 ? copy[i] : Tensor(), config);
    if (own_copy && copy[i].dtype() == DType::kF32) m3::copy(master, copy[i]);
  }
}

void TrainingCase::balance_step(const TrainSums& sums) {
  const int E = config_.text.num_experts;
  for (int l = 0; l < config_.text.num_layers; ++l) {
    if (config_.text.is_moe[l] == 0) continue;
    std::vector<int64_t> counts(E);
    for (int e = 0; e < E; ++e)
      counts[e] = sums.text_experts_LE[l * E + e] + sums.media_experts_LE[l * E + e];
    const Tensor counts_E(counts.data(), DType::kI64, {E});
    for (ModelWeights* w : {&masters_, &weights_}) {
      moe_balance_step(counts_E, document_.at("bias_step"), w->text.layers[l].ffn.router_bias_E);
      if (weights_.text.layers[l].ffn.router_bias_E.data() ==
          masters_.text.layers[l].ffn.router_bias_E.data())
        break;
    }
  }
}

// Of all gradients stored under `prefix`; they may hold the first rows only. Checks each.
double TrainingCase::worst_gradient(const std::string& prefix) const {
  double worst = 0;
  int count = 0;
  for_each_parameter(config_, gradients_, [&](const std::string& name, const Tensor& g) {
    const SafetensorsEntry* entry = tensors_.find(prefix + name);
    if (entry == nullptr) {
      M3_CHECK(is_router_bias(name), "the golden has no gradient of {}", name);
      M3_CHECK(grad_sum_of_squares(g) == 0, "{} has a gradient", name);
      return;
    }
    const Tensor want = tensors_.tensor(*entry);
    const double error = relative_error(elements(g).first(want.numel()), elements(want));
    M3_CHECK(error <= tolerances_.gradient, "gradient of {}: relative error {:.2e}, allowed {:.0e}",
             name, error, tolerances_.gradient);
    worst = std::max(worst, error);
    ++count;
  });
  M3_CHECK(count > 0, "the golden stores no gradients under {}", prefix);
  return worst;
}

std::string TrainingCase::compare_weights(const std::string& prefix) const {
  const double limit = 0.02 * document_.at("learning_rate").get<double>();
  int64_t total = 0, close = 0;
  for_each_parameter(config_, masters_, [&](const std::string& name, const Tensor& w) {
    const SafetensorsEntry* entry = tensors_.find(prefix + name);
    if (entry == nullptr) return;
    const Tensor want = tensors_.tensor(*entry);
    M3_CHECK(want.shape() == w.shape(), "{}{} is {}", prefix, name, want.shape().str());
    for (int64_t i = 0; i < want.numel(); ++i) {
      close += std::abs(double{w.ptr<float>()[i]} - want.ptr<float>()[i]) <= limit;
    }
    total += want.numel();
  });
  M3_CHECK(total > 0, "the golden stores no weights under {}", prefix);
  const double share = static_cast<double>(close) / static_cast<double>(total);
  M3_CHECK(
      share >= 0.999,
      "after three steps {:.3f} % of {} weights are within 2 % of the learning rate, want 99.9",
      100 * share, total);
  return fmt::format(", {:.4f} % of the weights after three steps", 100 * share);
}

std::string TrainingCase::steps(const std::string& stage) {
  options_.stage = stage == "warmup" ? TrainStage::kWarmup : TrainStage::kSparse;
  M3_CHECK(stage == "warmup" || stage == "sparse", "stage {} is unknown, want sparse or warmup",
           stage);
  double worst = 0;
  // The same sums in other ways first; the last one goes on to the step.
  for (const auto& [one_pack, recompute] :
       {std::pair{false, Recompute::kNone}, {true, Recompute::kLayer}, {true, Recompute::kNone}}) {
    const TrainSums sums = gradients(one_pack, recompute);
    check_losses(document_.at("stages").at(stage).at(0), sums);
    worst = std::max(worst, worst_gradient(stage + ".grad."));
  }
  for (const ordered_json& want : document_.at("stages").at(stage)) {
    const TrainSums sums = gradients(true, Recompute::kNone);
    check_losses(want, sums);
    const std::map<Group, double> norms = gradient_norms();
    for (const auto& [group, norm] : norms) {
      const std::string name = kGroupNames[static_cast<int>(group)];
      if (!want.at("grad_norm").contains(name)) continue;
      const double expected = want.at("grad_norm").at(name);
      M3_CHECK(std::abs(norm - expected) <= tolerances_.gradient * expected,
               "gradient norm of the {} is {:.8g}, want {:.8g}", name, norm, expected);
    }
    if (dtype_ == DType::kF32) check_counts(want, sums);
    adamw_step(want.at("step"), norms);
    balance_step(sums);
  }
  std::string detail = fmt::format("gradients {:.1e} (limit {:.0e})", worst, tolerances_.gradient);
  if (dtype_ == DType::kF32) detail += compare_weights(stage + ".after3.");
  return detail;
}

std::string TrainingCase::one_step() {
  options_.stage = TrainStage::kSparse;
  double worst = 0;
  for (const auto& [one_pack, recompute] :
       {std::pair{false, Recompute::kNone}, {true, Recompute::kLayer}, {true, Recompute::kNone}}) {
    const TrainSums sums = gradients(one_pack, recompute);
    check_losses(document_, sums);
    if (dtype_ == DType::kF32) check_counts(document_, sums);
    worst = std::max(worst, worst_gradient("grad."));
    for_each_parameter(config_, gradients_, [&](const std::string& name, const Tensor& g) {
      if (is_router_bias(name)) return;
      const double want = document_.at("grad_norms").at(name),
                   got = std::sqrt(grad_sum_of_squares(g));
      M3_CHECK(std::abs(got - want) <= tolerances_.gradient * want,
               "gradient norm of {} is {:.8g}, want {:.8g}", name, got, want);
    });
  }
  return fmt::format("gradients {:.1e} (limit {:.0e})", worst, tolerances_.gradient);
}

}  // namespace

bool verify_training(const std::filesystem::path& file, const ordered_json& document,
                     Report& report) {
  if (!document.is_object() || !document.value("kind", "").starts_with("training")) return false;
  const std::filesystem::path folder = file.parent_path();
  const std::string prefix = "models/" + folder.filename().string() + "/training";
  const auto run = [&](const std::string& name,
                       const std::function<std::string(TrainingCase&)>& body) {
    if (!report.options().device.is_cpu())
      return report.skip(name, "training runs on the CPU so far");
    report.run(name, [&] {
      const Checkpoint checkpoint = Checkpoint::open(folder);
      const SafetensorsFile tensors(folder / "training.safetensors");
      TrainingCase training(checkpoint, tensors, document, report.options().dtype);
      return body(training);
    });
  };
  if (document.contains("stages")) {
    for (const auto& [stage, steps] : document.at("stages").items()) {
      run(prefix + "/" + stage, [&stage = stage](TrainingCase& c) { return c.steps(stage); });
    }
  } else {
    run(prefix, [](TrainingCase& c) { return c.one_step(); });
  }
  return true;
}

}  // namespace m3::verify
