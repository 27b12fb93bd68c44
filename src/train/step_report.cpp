#include "train/step_report.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/file.h"
#include "text/json_value.h"

namespace m3::train {

void LossSum::add(double loss, bool is_answer) {
  (is_answer ? answer : plain) += loss;
  ++(is_answer ? answers : plains);
}

void LossSum::add(const LossSum& other) {
  answer += other.answer;
  plain += other.plain;
  answers += other.answers;
  plains += other.plains;
}

double LossSum::mean() const {
  return answers + plains > 0 ? (answer + plain) / static_cast<double>(answers + plains) : 0;
}

void add_losses(const TrainConfig& config, const std::vector<BatchDocument>& batch,
                const PackedDocuments& pack, const std::vector<float>& loss_T, StepReport& report) {
  for (size_t i = 0; i < pack.documents().size(); ++i) {
    const BatchDocument& document = batch[pack.documents()[i]];
    const data::Sample& sample = document.sample;
    LossSum& source = report.by_source[config.sources[document.source].log_as];
    const char* context = "text";
    const float* loss = loss_T.data() + pack.cu_seqlens()[i];
    for (size_t at = 1; at < sample.ids.size(); ++at) {
      if (sample.ids[at - 1] == config.model.image_token_id) context = "image";
      if (sample.ids[at - 1] == config.model.video_token_id) context = "video";
      if (sample.weights[at] <= 0) continue;
      const bool is_answer = sample.weights[at] > 1;
      source.add(loss[at - 1], is_answer);
      report.by_context[context].add(loss[at - 1], is_answer);
    }
  }
}

namespace {

// JSON has no infinities: a value that is not finite is null.
JsonValue number(double value) {
  return std::isfinite(value) ? JsonValue::number(value) : JsonValue();
}

JsonValue losses_json(const LossSums& sums) {
  JsonValue out = JsonValue::object();
  for (const auto& [name, sum] : sums) {
    JsonValue entry = JsonValue::object();
    if (sum.answers > 0) {
      entry.append_member("answer", number(sum.answer_mean()));
      entry.append_member("answers", JsonValue::integer(sum.answers));
    }
    if (sum.plains > 0) {
      entry.append_member("plain", number(sum.plain / static_cast<double>(sum.plains)));
      entry.append_member("plains", JsonValue::integer(sum.plains));
    }
    out.append_member(name, std::move(entry));
  }
  return out;
}

// Largest share of the mean load, and experts without a token, of one layer.
JsonValue load_json(const int64_t* load_E, int num_experts) {
  int64_t total = 0, largest = 0;
  int dead = 0;
  for (int e = 0; e < num_experts; ++e) {
    total += load_E[e];
    largest = std::max(largest, load_E[e]);
    dead += load_E[e] == 0;
  }
  JsonValue out = JsonValue::object();
  out.append_member("max_over_mean", number(total > 0 ? static_cast<double>(largest) * num_experts /
                                                            static_cast<double>(total)
                                                      : 0));
  out.append_member("dead", JsonValue::integer(int64_t{dead}));
  return out;
}

// At most so many names of parameters without gradient: of many experts most may be idle.
constexpr size_t kMostNames = 20;

JsonValue gradients_json(const GradientNorms& norms, bool with_names) {
  JsonValue out = JsonValue::object(), layers = JsonValue::array();
  for (const double norm : norms.layers) layers.push_back(number(norm));
  out.append_member("layers", std::move(layers));
  out.append_member("embedding", number(norms.embedding));
  out.append_member("head", number(norms.head));
  out.append_member("routers", number(norms.routers));
  out.append_member("tower", number(norms.tower));
  out.append_member("projector", number(norms.projector));
  out.append_member("zeros", JsonValue::integer(static_cast<int64_t>(norms.zeros.size())));
  if (!with_names) return out;
  JsonValue names = JsonValue::array();
  for (size_t i = 0; i < std::min(norms.zeros.size(), kMostNames); ++i)
    names.push_back(JsonValue::string(norms.zeros[i]));
  out.append_member("zero_names", std::move(names));
  return out;
}

JsonValue experts_json(const TextConfig& config, const TrainSums& sums) {
  JsonValue out = JsonValue::array();
  for (int layer = 0; layer < config.num_layers; ++layer) {
    if (!config.is_moe[layer] || sums.text_experts_LE.empty()) continue;
    const int64_t at = int64_t{layer} * config.num_experts;
    JsonValue entry = JsonValue::object();
    entry.append_member("layer", JsonValue::integer(int64_t{layer}));
    entry.append_member("text", load_json(sums.text_experts_LE.data() + at, config.num_experts));
    entry.append_member("media", load_json(sums.media_experts_LE.data() + at, config.num_experts));
    out.push_back(std::move(entry));
  }
  return out;
}

}  // namespace

std::string StepReport::to_json(const ModelConfig& config, double ceiling_gflops) const {
  JsonValue root = JsonValue::object();
  const auto add = [](JsonValue& object, const char* key, double value) {
    object.append_member(key, number(value));
  };
  const auto count = [](JsonValue& object, const char* key, int64_t value) {
    object.append_member(key, JsonValue::integer(value));
  };
  count(root, "step", step);
  root.append_member("stage", JsonValue::string(stage));
  if (!skipped.empty()) root.append_member("skipped", JsonValue::string(skipped));
  JsonValue parts = JsonValue::object();
  add(parts, "total", loss.total());
  add(parts, "ce", loss.ce);
  add(parts, "kl", loss.kl);
  add(parts, "balance", loss.balance);
  add(parts, "z", loss.z);
  root.append_member("loss", std::move(parts));
  root.append_member("by_source", losses_json(by_source));
  root.append_member("by_context", losses_json(by_context));
  JsonValue kl = JsonValue::array();
  const double rows = static_cast<double>(sums.counts.kl_queries) * config.text.num_kv_heads;
  for (const double value : sums.kl_L) kl.push_back(number(rows > 0 ? value / rows : 0));
  root.append_member("kl_by_layer", std::move(kl));
  const double targets = static_cast<double>(std::max<int64_t>(sums.num_targets, 1));
  add(root, "logz_mean", sums.logz / targets);
  add(root, "logz_max", sums.num_targets > 0 ? sums.logz_max : 0);
  JsonValue updates = JsonValue::object();
  for (int i = 0; i < kNumGroups; ++i) {
    JsonValue group = JsonValue::object();
    add(group, "norm", groups[i].norm);
    add(group, "clip", groups[i].clip_factor);
    add(group, "lr", groups[i].lr);
    if (groups[i].update_ratio >= 0) add(group, "update_ratio", groups[i].update_ratio);
    group.append_member("updated", JsonValue::boolean(groups[i].updated));
    updates.append_member(group_name(static_cast<Group>(i)), std::move(group));
  }
  root.append_member("groups", std::move(updates));
  root.append_member("gradients", gradients_json(gradients, zeros_changed));
  root.append_member("experts", experts_json(config.text, sums));
  JsonValue data = JsonValue::object();
  count(data, "tokens", num_tokens);
  count(data, "media_tokens", num_media_tokens);
  count(data, "documents", num_documents);
  count(data, "micro_batches", num_micro_batches);
  count(data, "patches", num_patches);
  count(data, "targets", sums.num_targets);
  count(data, "broken", num_broken);
  root.append_member("data", std::move(data));
  JsonValue speed = JsonValue::object();
  add(speed, "load_s", load_seconds);
  add(speed, "model_s", model_seconds);
  add(speed, "update_s", update_seconds);
  add(speed, "tokens_per_s", static_cast<double>(num_tokens) / std::max(seconds(), 1e-9));
  add(speed, "flops", flops.total());
  add(speed, "gflops_per_s", flops.total() / std::max(seconds(), 1e-9) * 1e-9);
  if (ceiling_gflops > 0)
    add(speed, "mfu", flops.total() / std::max(seconds(), 1e-9) * 1e-9 / ceiling_gflops);
  root.append_member("speed", std::move(speed));
  if (!selection.empty()) {
    JsonValue list = JsonValue::array();
    for (const SelectionQuality& quality : selection) {
      JsonValue entry = JsonValue::object();
      count(entry, "layer", quality.layer);
      add(entry, "captured", quality.captured);
      add(entry, "oracle", quality.oracle);
      add(entry, "block_recall", quality.block_recall);
      add(entry, "score_recall", quality.score_recall);
      list.push_back(std::move(entry));
    }
    root.append_member("selection", std::move(list));
  }
  if (!layers.empty()) {
    JsonValue list = JsonValue::array();
    for (const LayerActivity& activity : layers) {
      JsonValue entry = JsonValue::object();
      count(entry, "layer", activity.layer);
      add(entry, "text_rms", activity.text_rms);
      add(entry, "media_rms", activity.media_rms);
      add(entry, "clamped", activity.clamped);
      add(entry, "entropy", activity.entropy);
      add(entry, "first_mass", activity.first_mass);
      add(entry, "own_block_mass", activity.own_block_mass);
      add(entry, "largest_logit", activity.largest_logit);
      add(entry, "largest_q", activity.largest_q);
      add(entry, "largest_k", activity.largest_k);
      if (activity.media_mass >= 0) {
        add(entry, "media_mass", activity.media_mass);
        add(entry, "media_share", activity.media_share);
      }
      list.push_back(std::move(entry));
    }
    root.append_member("layers", std::move(list));
  }
  if (!changes.empty()) {
    JsonValue list = JsonValue::array();
    for (const ConfigChange& change : changes) list.push_back(change.to_json());
    root.append_member("changes", std::move(list));
  }
  if (!documents.empty()) {
    JsonValue ids = JsonValue::array();
    for (const std::string& id : documents) ids.push_back(JsonValue::string(id));
    root.append_member("documents", std::move(ids));
  }
  return root.dump() + "\n";
}

StepLog::StepLog(const std::filesystem::path& file, int64_t first_step) : path_(file) {
  if (std::filesystem::exists(file)) {
    const std::string text = read_file(file);
    std::string kept;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = text.find('\n', begin);
      if (end == std::string::npos) break;  // a line that a kill cut short
      const std::string line = text.substr(begin, end - begin);
      const auto record = JsonValue::try_parse(line);
      const JsonValue* step = record ? record->find("step") : nullptr;
      if (step != nullptr && step->is_integer() &&
          step->as_double() < static_cast<double>(first_step))
        kept += line + "\n";
      begin = end + 1;
    }
    write_file_atomic(file, kept);
  }
  fd_ = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  M3_CHECK(fd_ >= 0, "{}: cannot open: {}", file.string(), std::strerror(errno));
}

StepLog::~StepLog() {
  ::close(fd_);
}

void StepLog::write(const std::string& line) {
  const ssize_t put = ::write(fd_, line.data(), line.size());
  M3_CHECK(put == static_cast<ssize_t>(line.size()), "{}: cannot write: {}", path_.string(),
           put < 0 ? std::strerror(errno) : "the disk is full");
}

}  // namespace m3::train
