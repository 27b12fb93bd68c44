#include "formats/config.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "base/file.h"
#include "formats/json_fields.h"

namespace m3 {
namespace {

// Bounds. Generous against every published model of this family, small enough that products of any few of
// them stay far inside 64 bits and the tensor table (layers x experts names) inside a few megabytes.
constexpr int64_t kMaxLayers = 1024, kMaxWidth = 1 << 16, kMaxHeads = 1024, kMaxHeadDim = 1024;
constexpr int64_t kMaxVocab = 1 << 22, kMaxInner = 1 << 20, kMaxExperts = 4096, kMaxLayersTimesExperts = 1 << 16;
constexpr int64_t kMaxPositions = int64_t{1} << 30, kMaxBlock = 1 << 16;

// A list over layers in either spelling; both may be present if they agree.
std::vector<uint8_t> layer_list(JsonFields& numbers, const char* number_key, JsonFields& words, const char* word_key,
                                const char* word_zero, const char* word_one, int layers) {
  std::optional<std::vector<uint8_t>> from_numbers, from_words;
  if (const auto list = numbers.integers(number_key, 0, 1, layers)) from_numbers.emplace(list->begin(), list->end());
  if (const auto list = words.texts(word_key, layers)) {
    from_words.emplace();
    for (const std::string& word : *list) {
      M3_CHECK(word == word_zero || word == word_one, "{}[{}] is \"{}\"; supported are \"{}\" and \"{}\"",
               words.name(word_key), from_words->size(), word.substr(0, 100), word_zero, word_one);
      from_words->push_back(word == word_one);
    }
  }
  M3_CHECK(from_numbers || from_words, "{} is missing (or {}, the newer spelling)", numbers.name(number_key), word_key);
  M3_CHECK(!from_numbers || !from_words || *from_numbers == *from_words, "{} and {} contradict each other",
           numbers.name(number_key), word_key);
  return from_numbers ? *from_numbers : *from_words;
}

// A number that may stand under two names; both may be present if they agree.
template <typename T>
std::optional<T> either(const JsonFields& fields, const char* key, std::optional<T> a, const char* other_key,
                        std::optional<T> b) {
  M3_CHECK(!a || !b || *a == *b, "{} is {} but {} is {}: they must agree", fields.name(key), *a, other_key, *b);
  return a ? a : b;
}

void parse_rope(JsonFields& text, TextConfig& out) {
  std::optional<double> theta = text.number("rope_theta", 1.0, 1e12);
  std::optional<double> factor = text.number("partial_rotary_factor", 0.0, 1.0);
  if (auto rope = text.object("rope_parameters")) {
    rope->only("rope_type", {"default"});
    theta = either(text, "rope_theta", theta, "rope_parameters.rope_theta", rope->number("rope_theta", 1.0, 1e12));
    factor = either(text, "partial_rotary_factor", factor, "rope_parameters.partial_rotary_factor",
                    rope->number("partial_rotary_factor", 0.0, 1.0));
    std::vector<std::string> unknown;
    rope->list_unknown(unknown);
    if (!unknown.empty()) M3_FAIL("{}: RoPE scaling is not supported", text.name(unknown[0].c_str()));
  }
  text.only_absent("rope_scaling");
  if (!theta) text.missing("rope_theta");
  out.rope_theta = static_cast<float>(*theta);

  std::optional<int64_t> rotary = text.integer("rotary_dim", 2, out.head_dim);
  if (factor) {
    const auto by_factor = static_cast<int64_t>(std::llround(*factor * out.head_dim));
    M3_CHECK(!rotary || *rotary == by_factor, "{} is {} but partial_rotary_factor {} of head_dim {} gives {}",
             text.name("rotary_dim"), *rotary, *factor, out.head_dim, by_factor);
    rotary = by_factor;
  }
  if (!rotary) text.missing("rotary_dim");
  M3_CHECK(*rotary >= 2 && *rotary % 2 == 0, "{} is {}; want an even number of at least 2", text.name("rotary_dim"),
           *rotary);
  out.rotary_dim = static_cast<int>(*rotary);
}

void parse_sparse_attention(JsonFields& text, TextConfig& out, std::vector<std::string>& unknown) {
  static const nlohmann::json kEmpty = nlohmann::json::object();
  auto released = text.object("sparse_attention_config");
  JsonFields sparse = released ? *released : JsonFields(kEmpty, text.name("sparse_attention_config"));
  if (!sparse.boolean("use_sparse_attention").value_or(true)) {  // a dense model says so explicitly
    out.is_sparse.assign(out.num_layers, 0);
    out.block_size = static_cast<int>(sparse.integer("sparse_block_size", 1, kMaxBlock).value_or(out.block_size));
    return;
  }
  M3_CHECK(released || text.has("layer_types"),
           "{} is missing, and so is layer_types, the newer spelling; a model without sparse attention says "
           "\"use_sparse_attention\": false there", text.name("sparse_attention_config"));
  out.is_sparse = layer_list(sparse, "sparse_attention_freq", text, "layer_types", "full_attention",
                             "minimax_m3_sparse", out.num_layers);
  const auto pick = [&](const char* key, const char* new_key, int64_t low, int64_t high) {
    return either(text, key, sparse.integer(key, low, high), new_key, text.integer(new_key, low, high));
  };
  const auto need = [&](const char* key, const char* new_key, int64_t low, int64_t high) {
    const auto value = pick(key, new_key, low, high);
    M3_CHECK(value, "{}.{} is missing (or {}, the newer spelling)", text.name("sparse_attention_config"), key, new_key);
    return static_cast<int>(*value);
  };
  const int index_heads = need("sparse_num_index_heads", "index_n_heads", 1, kMaxHeads);
  M3_CHECK(index_heads == out.num_kv_heads,
           "{} (or index_n_heads) is {} but num_key_value_heads is {}: each KV head has one index head",
           text.name("sparse_attention_config.sparse_num_index_heads"), index_heads, out.num_kv_heads);
  out.index_dim = need("sparse_index_dim", "index_head_dim", 1, kMaxHeadDim);
  M3_CHECK(out.index_dim >= out.rotary_dim, "{} (or index_head_dim) is {}, less than rotary_dim {}",
           text.name("sparse_attention_config.sparse_index_dim"), out.index_dim, out.rotary_dim);
  out.block_size = need("sparse_block_size", "index_block_size", 1, kMaxBlock);
  out.topk_blocks = need("sparse_topk_blocks", "index_topk_blocks", 1, kMaxBlock);
  out.local_blocks = static_cast<int>(pick("sparse_local_block", "index_local_blocks", 0, kMaxBlock).value_or(1));
  out.init_blocks = static_cast<int>(sparse.integer("sparse_init_block", 0, kMaxBlock).value_or(0));
  M3_CHECK(out.local_blocks + out.init_blocks <= out.topk_blocks,
           "{} (or index_topk_blocks) is {}, but {} local and {} initial blocks are always chosen",
           text.name("sparse_attention_config.sparse_topk_blocks"), out.topk_blocks, out.local_blocks, out.init_blocks);
  sparse.only("sparse_score_type", {"max"});
  if (released) {
    const auto disabled = sparse.need("sparse_disable_index_value",
                                      sparse.integers("sparse_disable_index_value", 0, 1, out.num_layers));
    for (int layer = 0; layer < out.num_layers; ++layer) {
      M3_CHECK(!out.is_sparse[layer] || disabled[layer] == 1,
               "{}[{}] is 0: an index branch with its own values is not supported; want 1 in every sparse layer",
               sparse.name("sparse_disable_index_value"), layer);
    }
    sparse.list_unknown(unknown);
  }
}

void parse_experts(JsonFields& text, TextConfig& out) {
  out.is_moe = layer_list(text, "moe_layer_freq", text, "mlp_layer_types", "dense", "sparse", out.num_layers);
  const int num_moe = out.num_moe_layers();
  if (num_moe < out.num_layers) {
    out.dense_intermediate_size = static_cast<int>(text.need_integer("dense_intermediate_size", 1, kMaxInner));
  }
  if (num_moe > 0) {
    out.expert_intermediate_size = static_cast<int>(text.need_integer("intermediate_size", 1, kMaxInner));
    out.shared_intermediate_size = static_cast<int>(text.need_integer("shared_intermediate_size", 1, kMaxInner));
    out.num_experts = static_cast<int>(text.need_integer("num_local_experts", 1, kMaxExperts));
    out.num_experts_per_token = static_cast<int>(text.need_integer("num_experts_per_tok", 1, out.num_experts));
    M3_CHECK(num_moe * int64_t{out.num_experts} <= kMaxLayersTimesExperts,
             "{} is {} in {} layers: {} experts in all exceed the limit of {}", text.name("num_local_experts"),
             out.num_experts, num_moe, num_moe * int64_t{out.num_experts}, kMaxLayersTimesExperts);
    text.only("n_shared_experts", 1.0);
    out.routed_scaling_factor = static_cast<float>(text.number("routed_scaling_factor", 1e-3, 1e3).value_or(2.0));
  }
  // The same keys may be present, without meaning, in a model that has no such layer.
  text.skip({"dense_intermediate_size", "intermediate_size", "shared_intermediate_size", "num_local_experts",
             "num_experts_per_tok", "n_shared_experts", "routed_scaling_factor"});
  text.only("scoring_func", {"sigmoid"});
  text.only("use_routing_bias", true);
  text.only("norm_topk_prob", true);
  text.only("router_jitter_noise", 0.0);
  text.only("n_group", 1.0);
  text.only("topk_group", 1.0);
}

TextConfig parse_text(JsonFields& text, ModelConfig& model) {
  TextConfig out;
  text.only("model_type", {"minimax_m3_vl_text", "minimax_m3_vl", "minimax_m3"});
  out.hidden_size = static_cast<int>(text.need_integer("hidden_size", 1, kMaxWidth));
  out.num_layers = static_cast<int>(text.need_integer("num_hidden_layers", 1, kMaxLayers));
  out.num_heads = static_cast<int>(text.need_integer("num_attention_heads", 1, kMaxHeads));
  out.num_kv_heads = static_cast<int>(text.need_integer("num_key_value_heads", 1, kMaxHeads));
  M3_CHECK(out.num_heads % out.num_kv_heads == 0, "{} is {}, not a multiple of num_key_value_heads {}",
           text.name("num_attention_heads"), out.num_heads, out.num_kv_heads);
  out.head_dim = static_cast<int>(text.need_integer("head_dim", 2, kMaxHeadDim));
  out.vocab_size = static_cast<int>(text.need_integer("vocab_size", 1, kMaxVocab));
  out.max_position_embeddings = text.need_integer("max_position_embeddings", 1, kMaxPositions);
  out.rms_norm_eps = static_cast<float>(text.number("rms_norm_eps", 1e-12, 0.1).value_or(1e-6));
  parse_rope(text, out);
  out.swiglu_alpha = static_cast<float>(text.number("swiglu_alpha", 1e-3, 1e3).value_or(1.702));
  out.swiglu_limit = static_cast<float>(text.number("swiglu_limit", 1e-3, 1e6).value_or(7.0));
  out.swiglu_beta = static_cast<float>(text.number("swiglu_beta", -1e3, 1e3).value_or(1.0));
  parse_sparse_attention(text, out, model.ignored_keys);
  parse_experts(text, out);
  // transformers writes "silu" into the configs that it saves and means the clamped form all the same.
  const bool new_spelling = text.has("layer_types") && !text.has("sparse_attention_config");
  if (new_spelling) {
    text.only("hidden_act", {"swigluoai", "silu"});
  } else {
    text.only("hidden_act", {"swigluoai"});
  }

  text.only("use_gemma_norm", true);
  text.only("use_qk_norm", true);
  text.only("qk_norm_type", {"per_head"});
  text.only("attention_output_gate", false);
  text.only("attention_bias", false);
  text.only("mlp_bias", false);
  text.only("tie_word_embeddings", false);
  text.only("attention_dropout", 0.0);
  for (const char* key : {"sliding_window", "final_logit_softcapping", "attn_logit_softcapping"}) text.only_absent(key);
  model.num_mtp_modules = static_cast<int>(text.integer("num_mtp_modules", 0, kMaxLayers).value_or(0));
  text.skip({"num_nextn_predict_layers", "bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype",
             "initializer_range", "output_router_logits", "router_aux_loss_coef", "use_cache", "architectures"});
  text.list_unknown(model.ignored_keys);
  return out;
}

void check_compression(JsonFields& fields, ModelConfig& model) {
  if (auto compression = fields.object("img_token_compression_config")) {
    compression->only("image_token_compression_method", {"patch_merge"});
    compression->only("spatial_merge_size", 2.0);
    compression->only("temporal_patch_size", 2.0);
    compression->list_unknown(model.ignored_keys);
  }
}

VisionConfig parse_vision(JsonFields& vision, ModelConfig& model) {
  VisionConfig out;
  out.hidden_size = static_cast<int>(vision.need_integer("hidden_size", 1, kMaxWidth));
  out.num_layers = static_cast<int>(vision.need_integer("num_hidden_layers", 1, kMaxLayers));
  out.num_heads = static_cast<int>(vision.need_integer("num_attention_heads", 1, kMaxHeads));
  M3_CHECK(out.hidden_size % out.num_heads == 0, "{} is {}, not a multiple of num_attention_heads {}",
           vision.name("hidden_size"), out.hidden_size, out.num_heads);
  M3_CHECK(out.head_dim() >= 6 && out.head_dim() % 2 == 0 && out.head_dim() <= kMaxHeadDim,
           "{} {} over {} heads gives head dim {}; want an even number from 6 to {} (three axes of RoPE)",
           vision.name("hidden_size"), out.hidden_size, out.num_heads, out.head_dim(), kMaxHeadDim);
  out.intermediate_size = static_cast<int>(vision.need_integer("intermediate_size", 1, kMaxInner));
  out.projection_dim = static_cast<int>(vision.need_integer("projection_dim", 1, kMaxWidth));
  M3_CHECK(out.projection_dim == model.text.hidden_size, "{} is {}, but text_config.hidden_size is {}",
           vision.name("projection_dim"), out.projection_dim, model.text.hidden_size);
  // The picture and video processors are written for exactly these (model.md §12).
  vision.only("patch_size", 14.0);
  vision.only("num_channels", 3.0);
  vision.only("temporal_patch_size", 2.0);
  vision.only("spatial_merge_size", 2.0);
  out.segment_max_frames = static_cast<int>(vision.integer("vision_segment_max_frames", 1, 1024).value_or(4));
  out.layer_norm_eps = static_cast<float>(vision.number("layer_norm_eps", 1e-12, 0.1).value_or(1e-5));
  std::optional<double> theta = vision.number("rope_theta", 1.0, 1e12);
  if (auto rope = vision.object("rope_parameters")) {
    rope->only("rope_type", {"axial", "default"});
    theta = either(vision, "rope_theta", theta, "rope_parameters.rope_theta", rope->number("rope_theta", 1.0, 1e12));
  }
  out.rope_theta = static_cast<float>(theta.value_or(10000.0));
  vision.only("hidden_act", {"gelu"});
  vision.only("position_embedding_type", {"rope"});
  vision.only("rope_mode", {"3d"});
  vision.only("attention_dropout", 0.0);
  check_compression(vision, model);
  vision.skip({"model_type", "image_size", "vocab_size", "dtype", "torch_dtype", "initializer_range"});
  vision.list_unknown(model.ignored_keys);
  return out;
}

Quantization parse_quantization(JsonFields& root) {
  auto fields = root.object("quantization_config");
  if (!fields) return Quantization::kNone;
  const std::string method = fields->need("quant_method", fields->text("quant_method"));
  if (method == "modelopt") {
    fields->need("quant_algo", fields->text("quant_algo"));
    fields->only("quant_algo", {"MXFP8"});
  } else {
    fields->only("quant_method", {"mxfp8"});
  }
  const auto block = fields->integers("weight_block_size", 1, 1 << 20);
  if (block && *block != std::vector<int64_t>{1, 32}) fields->refuse("weight_block_size", "only [1, 32] is supported");
  return Quantization::kMxfp8;
}

}  // namespace

int TextConfig::num_sparse_layers() const {
  return static_cast<int>(std::count(is_sparse.begin(), is_sparse.end(), 1));
}
int TextConfig::num_moe_layers() const { return static_cast<int>(std::count(is_moe.begin(), is_moe.end(), 1)); }

int64_t TextConfig::cache_bytes_per_token(int bytes_per_element) const {
  const int64_t key_value = int64_t{2} * num_layers * num_kv_heads * head_dim;
  const int64_t index = int64_t{num_sparse_layers()} * index_dim;
  return (key_value + index) * bytes_per_element;
}

ModelConfig parse_model_config(std::string_view json, const std::string& file) {
  const nlohmann::json document = parse_json(json, file);
  JsonFields root(document, file);
  ModelConfig model;
  if (const auto classes = root.texts("architectures")) {
    for (const std::string& name : *classes) {
      M3_CHECK(name == "MiniMaxM3SparseForConditionalGeneration",
               "{} names the class \"{}\"; supported is MiniMaxM3SparseForConditionalGeneration",
               root.name("architectures"), name.substr(0, 100));
    }
  }
  root.need("model_type", root.text("model_type"));
  root.only("model_type", {"minimax_m3_vl"});
  auto text = root.object("text_config");
  if (!text) root.missing("text_config");
  model.text = parse_text(*text, model);
  model.quantization = parse_quantization(root);
  root.only("tie_word_embeddings", false);
  root.only("vision_feature_layer", -1.0);
  root.only("vision_feature_select_strategy", {"full"});
  root.only("projector_hidden_act", {"gelu"});
  root.only("multimodal_projector_bias", true);
  root.only("process_image_mode", {"dynamic_res"});
  check_compression(root, model);
  if (auto vision = root.object("vision_config")) {
    model.vision = parse_vision(*vision, model);
    const auto token = [&](const char* key, const char* other) {
      const int64_t high = model.text.vocab_size - 1;
      const auto id = either(root, key, root.integer(key, 0, high), other, root.integer(other, 0, high));
      if (!id) root.missing(key);
      return static_cast<int>(*id);
    };
    model.image_token_id = token("image_token_index", "image_token_id");
    model.video_token_id = token("video_token_index", "video_token_id");
    M3_CHECK(model.image_token_id != model.video_token_id, "{} and video_token_index are both {}",
             root.name("image_token_index"), model.image_token_id);
    const auto projector = root.integer("projector_hidden_size", 1, kMaxWidth);
    M3_CHECK(!projector || *projector == model.text.hidden_size, "{} is {}, but text_config.hidden_size is {}",
             root.name("projector_hidden_size"), *projector, model.text.hidden_size);
  }
  model.eos_token_id = static_cast<int>(root.integer("eos_token_id", 0, kMaxVocab).value_or(-1));
  root.skip({"image_token_index", "image_token_id", "video_token_index", "video_token_id", "projector_hidden_size",
             "torch_dtype", "dtype", "transformers_version", "image_seq_length", "image_grid_pinpoints",
             "num_reward_heads", "merged_hidden_size", "auto_map", "bos_token_id", "pad_token_id", "use_cache"});
  root.list_unknown(model.ignored_keys);
  std::sort(model.ignored_keys.begin(), model.ignored_keys.end());
  return model;
}

GenerationConfig parse_generation_config(std::string_view json, const std::string& file) {
  const nlohmann::json document = parse_json(json, file);
  JsonFields root(document, file);
  GenerationConfig out;
  out.do_sample = root.boolean("do_sample").value_or(out.do_sample);
  out.temperature = root.number("temperature", 0.0, 100.0).value_or(out.temperature);
  out.top_p = root.number("top_p", 1e-6, 1.0).value_or(out.top_p);
  out.top_k = static_cast<int>(root.integer("top_k", 0, kMaxVocab).value_or(out.top_k));
  out.bos_token_id = static_cast<int>(root.integer("bos_token_id", 0, kMaxVocab).value_or(-1));
  if (document.contains("eos_token_id") && document["eos_token_id"].is_array()) {
    const auto ids = root.integers("eos_token_id", 0, kMaxVocab);
    out.eos_token_ids.assign(ids->begin(), ids->end());
  } else if (const auto id = root.integer("eos_token_id", 0, kMaxVocab)) {
    out.eos_token_ids = {static_cast<int>(*id)};
  }
  return out;
}

ModelConfig read_model_config(const std::filesystem::path& path) {
  const auto file = std::filesystem::is_directory(path) ? path / "config.json" : path;
  return parse_model_config(read_file(file, kMaxJsonBytes), file.string());
}

GenerationConfig read_generation_config(const std::filesystem::path& folder) {
  const auto file = folder / "generation_config.json";
  if (!std::filesystem::exists(file)) return {};
  return parse_generation_config(read_file(file, kMaxJsonBytes), file.string());
}

}  // namespace m3
