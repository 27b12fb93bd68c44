// m3 inspect: what a model folder, or a config alone, holds and needs.
#include <fmt/core.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/check.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "engine/session.h"
#include "formats/checkpoint.h"
#include "model/decoder.h"
#include "model/kv_cache.h"

namespace m3::cli {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

namespace {

struct Group {
  int64_t count = 0, bytes = 0;
};

// What the command prints, in both forms.
struct Inspection {
  ModelConfig config;
  std::vector<TensorEntry> table;
  ParameterCounts parameters;
  std::optional<Checkpoint> checkpoint;  // absent if only a config was given
  std::map<std::string, Group> by_type;
  int64_t context = 0;

  // The stored size of table[i], scales included.
  void add_tensor(DType dtype, int64_t bytes) {
    Group& group = by_type[dtype_name(dtype)];
    ++group.count;
    group.bytes += bytes;
  }
  void count_tensors() {
    for (size_t i = 0; i < table.size(); ++i) {
      if (!checkpoint) {
        add_tensor(table[i].dtype, table[i].bytes());
        continue;
      }
      const StoredWeight& stored = checkpoint->weight(i);
      add_tensor(stored.data.dtype(), stored.data.bytes());
      if (stored.is_mxfp8()) add_tensor(stored.scales.dtype(), stored.scales.bytes());
    }
  }

  MemoryPlan memory_plan() const {
    MemoryPlan plan;
    plan.add("weights (mapped)", checkpoint ? checkpoint->mapped_bytes() : total_bytes(table));
    if (checkpoint && checkpoint->widened_bytes() > 0) plan.add("weights widened to f32", checkpoint->widened_bytes());
    const int64_t page = config.text.block_size, num_pages = (context + page - 1) / page;
    plan.add("KV cache (bf16)", KvCache::bytes(config.text, num_pages, DType::kBF16));
    StepSizes step;
    step.max_tokens = std::min(SessionOptions::kDefaultStepTokens, context);
    step.max_sequence_tokens = context;
    plan.add("activations", decoder_step_bytes(config.text, {}, step));
    return plan;
  }

  std::vector<const TensorEntry*> largest(size_t count) const {
    std::vector<const TensorEntry*> order;
    for (const TensorEntry& entry : table) order.push_back(&entry);
    std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->shape.numel() > b->shape.numel(); });
    order.resize(std::min(count, order.size()));
    return order;
  }
};

constexpr size_t kLargest = 5;

void line(const char* what, const std::string& value) { fmt::print("  {:<24} {}\n", what, value); }

void print_architecture(const TextConfig& t, const std::optional<VisionConfig>& v) {
  fmt::print("text model\n");
  line("layers", fmt::format("{} ({} sparse, {} with experts), hidden {}, vocabulary {}", t.num_layers,
                             t.num_sparse_layers(), t.num_moe_layers(), t.hidden_size, t.vocab_size));
  line("attention", fmt::format("{} query heads in {} groups of {}, head dim {}, {} rotated, theta {}", t.num_heads,
                                t.num_kv_heads, t.heads_per_group(), t.head_dim, t.rotary_dim, t.rope_theta));
  if (t.num_sparse_layers() > 0) {
    line("block selection", fmt::format("{} of blocks of {} tokens ({} local, {} initial), index dim {}", t.topk_blocks,
                                        t.block_size, t.local_blocks, t.init_blocks, t.index_dim));
  }
  if (t.num_moe_layers() > 0) {
    line("experts", fmt::format("{} of {}, width {}; shared {}", t.num_experts_per_token, t.num_experts,
                                t.expert_intermediate_size, t.shared_intermediate_size));
  }
  if (t.num_moe_layers() < t.num_layers) line("dense MLP", fmt::format("width {}", t.dense_intermediate_size));
  line("positions", fmt::format("{}", t.max_position_embeddings));
  if (!v) return;
  fmt::print("vision tower\n");
  line("layers", fmt::format("{}, hidden {}, {} heads of {}, MLP {}", v->num_layers, v->hidden_size, v->num_heads,
                             v->head_dim(), v->intermediate_size));
  line("patches", fmt::format("{0} x {0} x {1} frames, merged {2} x {2}, segments of {3}", v->patch_size,
                              v->temporal_patch_size, v->spatial_merge_size, v->segment_max_frames));
}

void print_text(const Inspection& model) {
  print_architecture(model.config.text, model.config.vision);
  const ParameterCounts& p = model.parameters;
  const auto count = [](int64_t n) { return fmt::format("{} ({})", format_count(static_cast<double>(n)), n); };
  fmt::print("parameters\n");
  line("total", count(p.total));
  line("active per text token", count(p.active) + ", without embedding and head");
  line("  with head", count(p.active + p.head));
  line("routed experts", count(p.experts));
  if (model.config.vision) line("tower, projector", count(p.tower) + ", " + count(p.projector));
  fmt::print("tensors\n");
  if (model.checkpoint) {
    line("form", fmt::format("{}, {} files", model.checkpoint->form(), model.checkpoint->num_files()));
  } else {
    line("form", "derived from the config; no weights were read");
  }
  for (const auto& [type, group] : model.by_type) {
    line(type.c_str(), fmt::format("{:>6} tensors  {}", group.count, format_bytes(static_cast<double>(group.bytes))));
  }
  for (const TensorEntry* entry : model.largest(kLargest)) line(entry->shape.str().c_str(), entry->name);
  if (model.checkpoint) {
    for (const auto& skipped : model.checkpoint->skipped()) fmt::print("  skipped {}: {}\n", skipped.name, skipped.reason);
  }
  for (const std::string& key : model.config.ignored_keys) fmt::print("  ignored config key {}\n", key);
  fmt::print("memory for a context of {} ({} cache bytes per token)\n", model.context,
             model.config.text.cache_bytes_per_token());
  const MemoryPlan plan = model.memory_plan();
  for (const auto& entry : plan.entries()) line(entry.name.c_str(), format_bytes(static_cast<double>(entry.bytes)));
  line("total", format_bytes(static_cast<double>(plan.total_bytes())));
}

ordered_json to_json(const Inspection& model) {
  const TextConfig& t = model.config.text;
  ordered_json json;
  json["text"] = {{"layers", t.num_layers}, {"sparse_layers", t.num_sparse_layers()}, {"moe_layers", t.num_moe_layers()},
                  {"hidden_size", t.hidden_size}, {"heads", t.num_heads}, {"kv_heads", t.num_kv_heads},
                  {"head_dim", t.head_dim}, {"vocab_size", t.vocab_size}, {"block_size", t.block_size},
                  {"topk_blocks", t.topk_blocks}, {"experts", t.num_experts},
                  {"experts_per_token", t.num_experts_per_token}, {"max_positions", t.max_position_embeddings}};
  if (const auto& v = model.config.vision) {
    json["vision"] = {{"layers", v->num_layers}, {"hidden_size", v->hidden_size}, {"heads", v->num_heads}};
  }
  const ParameterCounts& p = model.parameters;
  json["parameters"] = {{"total", p.total}, {"active", p.active}, {"experts", p.experts}, {"embedding", p.embedding},
                        {"head", p.head}, {"tower", p.tower}, {"projector", p.projector}};
  json["form"] = model.checkpoint ? ordered_json(model.checkpoint->form()) : ordered_json(nullptr);
  for (const auto& [type, group] : model.by_type) {
    json["tensors"][type] = {{"count", group.count}, {"bytes", group.bytes}};
  }
  for (const TensorEntry* entry : model.largest(kLargest)) json["largest"].push_back(entry->name);
  json["ignored_keys"] = model.config.ignored_keys;
  json["skipped"] = ordered_json::array();
  if (model.checkpoint) {
    for (const auto& skipped : model.checkpoint->skipped()) json["skipped"].push_back(skipped.name);
  }
  json["context"] = model.context;
  json["cache_bytes_per_token"] = t.cache_bytes_per_token();
  const MemoryPlan plan = model.memory_plan();
  for (const auto& entry : plan.entries()) json["memory"][entry.name] = entry.bytes;
  json["memory_total"] = plan.total_bytes();
  return json;
}

}  // namespace

int command_inspect(const Args& args) {
  std::string path;
  std::optional<int64_t> context;
  bool json = false;
  Options options("inspect",
                  "Shows the architecture of a model, its tensors, its parameters in total and active per token, and the "
                  "memory that a context needs. Given a folder, the whole checkpoint is checked as for loading; given a "
                  "config.json, everything is derived from it.",
                  "m3 inspect MODEL --context 131072");
  options.positional("MODEL", path, "a model folder, or a config.json");
  options.add("--context", context, "tokens of context for the memory plan (default: the model's limit)");
  options.flag("--json", json, "print one JSON object");
  options.parse(args);
  if (context && *context < 1) throw UsageError{"--context must be at least 1 (see m3 inspect --help)"};

  Inspection model;
  if (fs::is_regular_file(path)) {
    model.config = read_model_config(path);
    M3_CHECK(model.config.quantization == Quantization::kNone,
             "{}: a quantised model; give its folder, since each tensor's type stands in the weight files", path);
    model.table = tensor_table(model.config);
  } else {
    model.checkpoint = Checkpoint::open(path);
    model.config = model.checkpoint->config();
    model.table = model.checkpoint->table();
  }
  const int64_t limit = model.config.text.max_position_embeddings;
  M3_CHECK(context.value_or(limit) <= limit, "--context {} exceeds the model's max_position_embeddings {}",
           context.value_or(limit), limit);
  model.context = context.value_or(limit);
  model.parameters = count_parameters(model.config, model.table);
  model.count_tensors();
  if (json) {
    fmt::print("{}\n", to_json(model).dump(1));
  } else {
    print_text(model);
  }
  return 0;
}

}  // namespace m3::cli
