// Goldens of whole models (tests/golden/README.md, models/NAME): a folder with a checkpoint, golden.json and
// golden.safetensors. Each case runs in one piece, then row by row as the last row of a prefix, in chunks of several
// sizes and token by token; every way must give the listed rows.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "model/sequence_runner.h"
#include "ops/embed/embed.h"
#include "ops/sampling/sampling.h"
#include "verify/golden_input.h"
#include "verify/suites.h"

namespace m3::verify {
namespace {

using nlohmann::ordered_json;

// tests/golden/README.md, models: per row, relative to the row's norm.
struct Tolerance {
  double mean, each;
};
Tolerance tolerance_of(DType dtype) { return dtype == DType::kF32 ? Tolerance{2e-5, 2e-5} : Tolerance{1.6e-2, 5e-2}; }

// Errors of rows of one quantity.
class RowErrors {
 public:
  RowErrors(std::string what, DType dtype) : what_(std::move(what)), tolerance_(tolerance_of(dtype)) {}

  void add(std::span<const float> got, std::span<const float> want, int64_t row) {
    double difference = 0, norm = 0;
    for (size_t i = 0; i < want.size(); ++i) {
      difference += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      norm += double{want[i]} * want[i];
    }
    const double error = std::sqrt(difference / norm);
    M3_CHECK(error <= tolerance_.each, "{} of row {}: relative error {:.2e}, allowed {:.2e}", what_, row, error,
             tolerance_.each);
    sum_ += error;
    worst_ = std::max(worst_, error);
    ++count_;
  }
  std::string finish() const {
    if (count_ == 0) return {};
    const double mean = sum_ / count_;
    M3_CHECK(mean <= tolerance_.mean, "{}: mean relative error {:.2e}, allowed {:.2e}", what_, mean, tolerance_.mean);
    return fmt::format("{} {:.1e}/{:.1e} ", what_, mean, worst_);
  }

 private:
  std::string what_;
  Tolerance tolerance_;
  double sum_ = 0, worst_ = 0;
  int count_ = 0;
};

std::span<const float> row_of(const Tensor& tensor, int64_t row) {
  return {tensor[row].ptr<float>(), static_cast<size_t>(tensor[row].numel())};
}

// A case with its expected tensors.
class ModelCase {
 public:
  ModelCase(const Checkpoint& checkpoint, const SafetensorsFile& tensors, const ordered_json& entry, DType dtype)
      : config_(checkpoint.config()),
        tensors_(tensors),
        name_(entry.at("name")),
        dtype_(dtype),
        ids_(golden_ids(entry.at("ids"))),
        model_(checkpoint, options(entry)) {
    if (entry.contains("media")) load_media(entry.at("media"));
  }

  Tensor want(const std::string& what) const { return tensors_.get(name_ + "." + what); }
  std::vector<int32_t> rows() const {
    const Tensor rows = want("rows");
    return {rows.ptr<int32_t>(), rows.ptr<int32_t>() + rows.numel()};
  }
  const std::vector<int32_t>& ids() const { return ids_; }

  SequenceRunner runner(int64_t max_tokens) {
    SequenceRunner runner(model_, max_tokens);
    if (features_.defined()) runner.set_features(placeholders_, features_);
    return runner;
  }

  std::string one_piece();
  std::string prefixes();
  std::string pieces(std::span<const int64_t> sizes);
  std::string media_errors;  // of tower and features

 private:
  ModelOptions options(const ordered_json& entry) const {
    ModelOptions options;
    options.decoder.dtype = dtype_;
    const auto count = static_cast<int64_t>(ids_.size());
    options.step = {count, 1, count, count + 64};
    for (const ordered_json& item : entry.value("media", ordered_json::array())) {
      M3_CHECK(config_.vision.has_value(), "the case has media, the model no vision_config");
      options.max_vision_patches =
          std::max(options.max_vision_patches, vision_pass_patches(*config_.vision, grid_of(item)));
    }
    return options;
  }
  static VisionGrid grid_of(const ordered_json& item) {
    const ordered_json& grid = item.at("grid");
    return {grid.at(0), grid.at(1), grid.at(2)};
  }
  void load_media(const ordered_json& media);
  void compare_inside(const StepTrace::Layer& layer, std::span<const int32_t> rows, RowErrors& errors);
  std::string compare_argmax(const Tensor& logits_TV) const;

  const ModelConfig& config_;
  const SafetensorsFile& tensors_;
  std::string name_;
  DType dtype_;
  std::vector<int32_t> ids_;
  Model model_;
  Arena feature_arena_;
  Tensor features_;  // in the order of the placeholders
  std::vector<int32_t> placeholders_;
};

void ModelCase::load_media(const ordered_json& media) {
  const int64_t C = config_.text.hidden_size;
  std::vector<PlaceholderItem> items;
  int64_t total = 0;
  for (const ordered_json& item : media) {
    items.push_back({item.at("type") == "video", model_.num_features(grid_of(item))});
    total += items.back().num_features;
  }
  feature_arena_ = Arena("features", 2 * total * C * 4 + (1 << 20));
  const Tensor encoded = feature_arena_.alloc("features", model_.activation_dtype(), {total, C});
  RowErrors tower_errors("tower", dtype_), feature_errors("features", dtype_);
  int64_t begin = 0;
  for (size_t i = 0; i < media.size(); ++i) {
    const VisionGrid grid = grid_of(media[i]);
    const Shape shape = {grid.num_patches(), config_.vision->patch_numel()};
    std::vector<float> patches = golden_input(media[i].at("patches"), shape, DType::kF32, &tensors_);
    const Tensor want_tower = want("tower." + std::to_string(i)), want_features = want("features." + std::to_string(i));
    const Tensor features = encoded.rows(begin, begin + items[i].num_features);
    int64_t patch = 0;
    model_.encode_media(grid, Tensor(patches.data(), DType::kF32, shape), features, [&](const Tensor& x_NW) {
      for (int64_t n = 0; n < x_NW.dim(0); ++n, ++patch) tower_errors.add(row_of(x_NW, n), row_of(want_tower, patch), patch);
    });
    const std::vector<float> got = to_f32(features);
    for (int64_t n = 0; n < features.dim(0); ++n) feature_errors.add(std::span(got).subspan(n * C, C), row_of(want_features, n), n);
    begin += items[i].num_features;
  }
  const PlaceholderMap map = map_placeholders(config_, ids_, items);
  placeholders_ = map.positions;
  features_ = feature_arena_.alloc("ordered features", model_.activation_dtype(), {total, C});
  std::vector<int32_t> order = map.order;
  gather_rows(Tensor(order.data(), DType::kI32, {total}), encoded, features_);
  media_errors = tower_errors.finish() + feature_errors.finish();
}

// Residual stream, block ids and experts of the listed rows.
void ModelCase::compare_inside(const StepTrace::Layer& layer, std::span<const int32_t> rows, RowErrors& errors) {
  const TextConfig& text = config_.text;
  const Tensor hidden = want("hidden")[layer.index];
  for (size_t i = 0; i < rows.size(); ++i) errors.add(row_of(layer.x_TC, rows[i]), row_of(hidden, i), rows[i]);
  if (dtype_ != DType::kF32) return;
  auto equal = [&](const char* what, const int32_t* got, const int32_t* want, int64_t count, int64_t row) {
    for (int64_t j = 0; j < count; ++j) {
      M3_CHECK(got[j] == want[j], "layer {}: {}[{}] of row {} is {}, want {}", layer.index, what, j, row, got[j], want[j]);
    }
  };
  const auto kind_index = [&](const std::vector<uint8_t>& kinds) {
    return std::accumulate(kinds.begin(), kinds.begin() + layer.index, 0);
  };
  if (layer.lists.defined()) {
    const Tensor ids = want("ids")[kind_index(text.is_sparse)];  // [R, rows, K]
    for (int64_t r = 0; r < ids.dim(0); ++r) {
      for (size_t i = 0; i < rows.size(); ++i) {
        equal("block ids", layer.lists[r][rows[i]].ptr<int32_t>(), ids[r][i].ptr<int32_t>(), ids.dim(2), rows[i]);
      }
    }
  }
  if (layer.expert_ids_TK.defined()) {
    const Tensor experts = want("experts")[kind_index(text.is_moe)];
    for (size_t i = 0; i < rows.size(); ++i) {
      equal("experts", layer.expert_ids_TK[rows[i]].ptr<int32_t>(), experts[i].ptr<int32_t>(), experts.dim(1), rows[i]);
    }
  }
}

std::string ModelCase::compare_argmax(const Tensor& logits_TV) const {
  const Tensor want_argmax = want("argmax"), margin = want("margin");
  int64_t equal = 0, sure = 0, sure_equal = 0;
  const float sure_margin = dtype_ == DType::kF32 ? 2e-3f : 0.1f;
  for (int64_t t = 0; t < logits_TV.dim(0); ++t) {
    const bool same = argmax(row_of(logits_TV, t)) == want_argmax.ptr<int32_t>()[t];
    const bool is_sure = margin.ptr<float>()[t] > sure_margin;
    equal += same;
    sure += is_sure;
    sure_equal += is_sure && same;
  }
  const double share = static_cast<double>(equal) / logits_TV.dim(0);
  const double sure_share = sure > 0 ? static_cast<double>(sure_equal) / sure : 1;
  if (dtype_ == DType::kF32) {
    M3_CHECK(sure_equal == sure, "argmax differs at {} of {} positions with margin > 2e-3", sure - sure_equal, sure);
  } else {
    M3_CHECK(share >= 0.95 && sure_share >= 0.98, "argmax equal at {:.1f} %, at {:.1f} % of those with margin > 0.1; "
             "want 95 and 98", 100 * share, 100 * sure_share);
  }
  return fmt::format("argmax {:.1f} %, sure ones {:.1f} %", 100 * share, 100 * sure_share);
}

std::string ModelCase::one_piece() {
  const std::vector<int32_t> rows = this->rows();
  RowErrors hidden("hidden", dtype_), logits("logits", dtype_);
  StepTrace trace;
  trace.after_layer = [&](const StepTrace::Layer& layer) { compare_inside(layer, rows, hidden); };
  std::vector<int32_t> all(ids_.size());
  std::iota(all.begin(), all.end(), 0);
  SequenceRunner sequence = runner(ids_.size());
  const Tensor logits_TV = sequence.feed(ids_, all, &trace);
  const Tensor want_logits = want("logits");
  for (size_t i = 0; i < rows.size(); ++i) logits.add(row_of(logits_TV, rows[i]), row_of(want_logits, i), rows[i]);
  return logits.finish() + hidden.finish() + media_errors + compare_argmax(logits_TV);
}

std::string ModelCase::prefixes() {
  RowErrors logits("logits", dtype_);
  const std::vector<int32_t> rows = this->rows();
  const Tensor want_logits = want("logits");
  SequenceRunner sequence = runner(ids_.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    sequence.rewind();
    logits.add(row_of(sequence.feed(std::span(ids_).first(rows[i] + 1)), 0), row_of(want_logits, i), rows[i]);
  }
  return logits.finish();
}

std::string ModelCase::pieces(std::span<const int64_t> sizes) {
  RowErrors logits("logits", dtype_);
  const std::vector<int32_t> rows = this->rows();
  const Tensor want_logits = want("logits");
  for (const int64_t size : sizes) {
    SequenceRunner sequence = runner(ids_.size());
    for (int64_t begin = 0; begin < static_cast<int64_t>(ids_.size()); begin += size) {
      const int64_t count = std::min<int64_t>(size, ids_.size() - begin);
      std::vector<int32_t> here;
      std::vector<size_t> listed;
      for (size_t i = 0; i < rows.size(); ++i) {
        if (begin <= rows[i] && rows[i] < begin + count) {
          here.push_back(static_cast<int32_t>(rows[i] - begin));
          listed.push_back(i);
        }
      }
      const Tensor got = sequence.feed(std::span(ids_).subspan(begin, count), here);
      for (size_t i = 0; i < listed.size(); ++i) logits.add(row_of(got, i), row_of(want_logits, listed[i]), rows[listed[i]]);
    }
  }
  return logits.finish();
}

// Greedy over all V, without the margin that would make bf16 comparable.
std::string check_greedy(const Checkpoint& checkpoint, const ordered_json& entry, DType dtype) {
  const std::vector<int32_t> ids = golden_ids(entry.at("ids")), want = entry.at("greedy").get<std::vector<int32_t>>();
  ModelOptions options;
  options.decoder.dtype = dtype;
  const auto count = static_cast<int64_t>(ids.size());
  options.step = {count, 1, 1, count + static_cast<int64_t>(want.size())};
  Model model(checkpoint, options);
  SequenceRunner sequence(model, options.step.max_sequence_tokens);
  int32_t next = argmax(row_of(sequence.feed(ids), 0));
  for (size_t i = 0; i < want.size(); ++i) {
    M3_CHECK(next == want[i], "token {} is {}, want {}", i, next, want[i]);
    next = argmax(row_of(sequence.feed(std::span(&next, 1)), 0));
  }
  return fmt::format("{} tokens equal", want.size());
}

}  // namespace

bool verify_model(const std::filesystem::path& file, const ordered_json& document, Report& report) {
  if (!document.is_object() || document.value("kind", "") != "model" || !document.contains("cases")) return false;
  const std::filesystem::path folder = file.parent_path();
  const DType dtype = report.options().dtype;
  const std::string prefix = "models/" + folder.filename().string() + "/";
  std::optional<Checkpoint> checkpoint;
  std::optional<SafetensorsFile> tensors;
  for (const ordered_json& entry : document.at("cases")) {
    const std::string name = prefix + entry.at("name").get<std::string>();
    const auto run = [&](const std::string& kind, const std::function<std::string()>& body) {
      if (!report.options().device.is_cpu()) return report.skip(name + kind, "whole models run on the CPU so far");
      report.run(name + kind, [&] {
        if (!tensors) {  // the later one: if it cannot be opened, every case says so
          checkpoint.emplace(Checkpoint::open(folder));
          tensors.emplace(folder / "golden.safetensors");
        }
        return body();
      });
    };
    if (entry.contains("greedy")) {
      if (dtype != DType::kF32) {
        report.skip(name, "greedy answers are compared in f32 only");
      } else {
        run("", [&] { return check_greedy(*checkpoint, entry, dtype); });
      }
      continue;
    }
    const auto with_case = [&](const std::string& kind, const std::function<std::string(ModelCase&)>& body) {
      run(kind, [&] {
        ModelCase model_case(*checkpoint, *tensors, entry, dtype);
        return body(model_case);
      });
    };
    with_case("", [](ModelCase& c) { return c.one_piece(); });
    with_case("/prefixes", [](ModelCase& c) { return c.prefixes(); });
    with_case("/chunks", [&](ModelCase& c) {
      const int64_t block = checkpoint->config().text.block_size;
      const int64_t sizes[] = {block - 1, block, block + 1, 2 * block, checkpoint->config().text.topk_blocks * block + 1};
      return c.pieces(sizes);
    });
    with_case("/decode", [](ModelCase& c) {
      const int64_t sizes[] = {1, 3};
      return c.pieces(sizes);
    });
  }
  return true;
}

}  // namespace m3::verify
