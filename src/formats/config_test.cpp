#include "formats/config.h"

#include <nlohmann/json.hpp>

#include "formats/test_support.h"

namespace m3 {
namespace {

using nlohmann::json;

json load(const std::filesystem::path& path) { return json::parse(read_file(path)); }
json m3_json() { return load(std::filesystem::path(M3_SOURCE_DIR) / "configs/minimax-m3.json"); }
json new_spelling() { return load(golden_model("tiny-small-transformers") / "config.json"); }
ModelConfig parse(const json& document) { return parse_model_config(document.dump(), "config.json"); }

TEST(Config, m3_values) {
  const ModelConfig config = parse(m3_json());
  const TextConfig& t = config.text;
  EXPECT_EQ(t.hidden_size, 6144);
  EXPECT_EQ(t.num_layers, 60);
  EXPECT_EQ(t.num_heads, 64);
  EXPECT_EQ(t.heads_per_group(), 16);
  EXPECT_EQ(t.max_position_embeddings, 1048576);
  EXPECT_EQ(t.rotary_dim, 64);
  EXPECT_EQ(t.rope_theta, 5e6f);
  EXPECT_EQ(t.swiglu_beta, 1.0f);  // absent from the released file
  EXPECT_EQ(t.num_sparse_layers(), 57);
  EXPECT_EQ(t.num_moe_layers(), 57);
  EXPECT_EQ(t.is_sparse[2], 0);
  EXPECT_EQ(t.is_sparse[3], 1);
  EXPECT_EQ(t.topk_blocks, 16);
  EXPECT_EQ(t.block_size, 128);
  EXPECT_EQ(config.num_mtp_modules, 7);
  EXPECT_EQ(config.image_token_id, 200025);
  ASSERT_TRUE(config.vision.has_value());
  EXPECT_EQ(config.vision->head_dim(), 80);
  EXPECT_EQ(config.vision->patch_numel(), 1176);
  EXPECT_TRUE(config.ignored_keys.empty()) << config.ignored_keys[0];
}

// tiny-small was saved by transformers from a model with these very numbers.
TEST(Config, both_spellings_say_the_same) {
  const TextConfig a = read_model_config(golden_model("tiny-small")).text;
  const ModelConfig newer = parse(new_spelling());
  const TextConfig& b = newer.text;
  EXPECT_EQ(a.hidden_size, b.hidden_size);
  EXPECT_EQ(a.num_layers, b.num_layers);
  EXPECT_EQ(a.num_kv_heads, b.num_kv_heads);
  EXPECT_EQ(a.rotary_dim, b.rotary_dim);
  EXPECT_EQ(a.rope_theta, b.rope_theta);
  EXPECT_EQ(a.is_moe, b.is_moe);
  EXPECT_EQ(a.is_sparse, b.is_sparse);
  EXPECT_EQ(a.index_dim, b.index_dim);
  EXPECT_EQ(a.block_size, b.block_size);
  EXPECT_EQ(a.topk_blocks, b.topk_blocks);
  EXPECT_EQ(a.local_blocks, b.local_blocks);
  EXPECT_EQ(a.num_experts, b.num_experts);
  EXPECT_EQ(a.expert_intermediate_size, b.expert_intermediate_size);
  EXPECT_TRUE(newer.ignored_keys.empty()) << newer.ignored_keys[0];
  EXPECT_EQ(newer.vision->rope_theta, 10000.0f);
}

TEST(Config, unknown_keys_are_listed_not_refused) {
  json document = m3_json();
  document["tokens_per_cake"] = 3;
  document["text_config"]["zeal"] = {{"a", 1}};
  document["text_config"]["sparse_attention_config"]["sparse_humour"] = true;
  const ModelConfig config = parse(document);
  EXPECT_EQ(config.ignored_keys, (std::vector<std::string>{"text_config.sparse_attention_config.sparse_humour",
                                                           "text_config.zeal", "tokens_per_cake"}));
}

TEST(Config, a_dense_model_says_so) {
  json document = m3_json();
  document["text_config"]["sparse_attention_config"] = {{"use_sparse_attention", false}};
  EXPECT_EQ(parse(document).text.num_sparse_layers(), 0);
  EXPECT_EQ(parse(document).text.block_size, 128);  // the cache still has pages
}

TEST(Config, mxfp8_is_recognised) {
  EXPECT_EQ(read_model_config(golden_model("tiny-small-mxfp8")).quantization, Quantization::kMxfp8);
  json document = m3_json();
  document["quantization_config"] = {{"quant_method", "modelopt"}, {"quant_algo", "MXFP8"}};
  EXPECT_EQ(parse(document).quantization, Quantization::kMxfp8);
}

struct BrokenConfig {
  const char* pointer;  // the place that is changed
  json value;           // null: as if the key were absent
  std::vector<std::string> message;
};

void expect_refused(const json& good, const std::vector<BrokenConfig>& cases) {
  parse(good);
  for (const BrokenConfig& broken : cases) {
    SCOPED_TRACE(broken.pointer + (" = " + broken.value.dump()));
    json document = good;
    document[json::json_pointer(broken.pointer)] = broken.value;
    std::vector<std::string> wanted = broken.message;
    wanted.push_back("config.json");
    expect_error([&] { parse(document); }, wanted);
  }
}

TEST(Config, every_unsupported_value_is_refused_by_name) {
  const json freq_wrong_length = std::vector<int>(59, 1), freq_of_two = std::vector<int>(60, 2);
  json disabled = m3_json()["text_config"]["sparse_attention_config"]["sparse_disable_index_value"];
  disabled[7] = 0;
  expect_refused(m3_json(), {
      {"/architectures/0", "MiniMaxM2ForCausalLM", {"MiniMaxM2ForCausalLM", "MiniMaxM3SparseForConditionalGeneration"}},
      {"/model_type", "llama", {"model_type", "\"llama\"", "\"minimax_m3_vl\""}},
      {"/model_type", nullptr, {"model_type is missing"}},
      {"/text_config", nullptr, {"text_config is missing"}},
      {"/text_config", 5, {"text_config is 5", "an object"}},
      {"/text_config/hidden_size", 0, {"text_config.hidden_size is 0", "from 1 to 65536"}},
      {"/text_config/hidden_size", "6144", {"text_config.hidden_size is \"6144\""}},
      {"/text_config/hidden_size", 6144.5, {"text_config.hidden_size is 6144.5"}},
      {"/text_config/hidden_size", uint64_t{1} << 63, {"text_config.hidden_size is 9223372036854775808"}},
      {"/text_config/num_hidden_layers", 1'000'000'000, {"text_config.num_hidden_layers is 1000000000", "1024"}},
      {"/text_config/num_hidden_layers", nullptr, {"text_config.num_hidden_layers is missing"}},
      {"/text_config/num_key_value_heads", 5, {"num_attention_heads is 64", "num_key_value_heads 5"}},
      {"/text_config/num_attention_heads", -64, {"num_attention_heads is -64"}},
      {"/text_config/head_dim", 1 << 20, {"head_dim is 1048576", "1024"}},
      {"/text_config/vocab_size", int64_t{1} << 40, {"vocab_size is 1099511627776"}},
      {"/text_config/max_position_embeddings", 0, {"max_position_embeddings is 0"}},
      {"/text_config/rms_norm_eps", 0, {"rms_norm_eps is 0"}},
      {"/text_config/rms_norm_eps", "1e-6", {"rms_norm_eps is \"1e-6\""}},
      {"/text_config/rope_theta", -1, {"rope_theta is -1"}},
      {"/text_config/rope_theta", nullptr, {"rope_theta is missing"}},
      {"/text_config/rope_scaling", {{"type", "yarn"}}, {"rope_scaling", "yarn", "not supported"}},
      {"/text_config/rotary_dim", 32, {"rotary_dim is 32", "partial_rotary_factor 0.5", "64"}},
      {"/text_config/rotary_dim", 256, {"rotary_dim is 256", "from 2 to 128"}},
      {"/text_config/use_gemma_norm", false, {"use_gemma_norm is false", "only true"}},
      {"/text_config/use_gemma_norm", 1, {"use_gemma_norm is 1", "true or false"}},
      {"/text_config/use_qk_norm", false, {"use_qk_norm is false"}},
      {"/text_config/qk_norm_type", "per_layer", {"qk_norm_type is \"per_layer\"", "\"per_head\""}},
      {"/text_config/attention_output_gate", true, {"attention_output_gate is true"}},
      {"/text_config/attention_bias", true, {"attention_bias is true"}},
      {"/text_config/attention_dropout", 0.1, {"attention_dropout is 0.1"}},
      {"/text_config/hidden_act", "silu", {"hidden_act is \"silu\"", "\"swigluoai\""}},
      {"/text_config/scoring_func", "softmax", {"scoring_func is \"softmax\"", "\"sigmoid\""}},
      {"/text_config/use_routing_bias", false, {"use_routing_bias is false"}},
      {"/text_config/n_shared_experts", 2, {"n_shared_experts is 2", "only 1"}},
      {"/text_config/n_group", 8, {"n_group is 8"}},
      {"/text_config/num_experts_per_tok", 129, {"num_experts_per_tok is 129", "from 1 to 128"}},
      {"/text_config/num_local_experts", 4096, {"num_local_experts is 4096", "57 layers", "65536"}},
      {"/text_config/moe_layer_freq", freq_wrong_length, {"moe_layer_freq has 59 entries", "60"}},
      {"/text_config/moe_layer_freq", freq_of_two, {"moe_layer_freq[0] is 2"}},
      {"/text_config/moe_layer_freq", nullptr, {"moe_layer_freq is missing", "mlp_layer_types"}},
      {"/text_config/tie_word_embeddings", true, {"tie_word_embeddings is true"}},
      {"/text_config/sliding_window", 4096, {"sliding_window is 4096", "not supported"}},
      {"/text_config/num_mtp_modules", -1, {"num_mtp_modules is -1"}},
      {"/text_config/sparse_attention_config", nullptr, {"sparse_attention_config is missing", "layer_types"}},
      {"/text_config/sparse_attention_config/sparse_disable_index_value", disabled,
       {"sparse_disable_index_value[7] is 0", "want 1"}},
      {"/text_config/sparse_attention_config/sparse_disable_index_value", nullptr, {"sparse_disable_index_value is missing"}},
      {"/text_config/sparse_attention_config/sparse_score_type", "mean", {"sparse_score_type is \"mean\"", "\"max\""}},
      {"/text_config/sparse_attention_config/sparse_block_size", 0, {"sparse_block_size is 0"}},
      {"/text_config/sparse_attention_config/sparse_block_size", nullptr, {"sparse_block_size is missing"}},
      {"/text_config/sparse_attention_config/sparse_local_block", 17, {"sparse_topk_blocks", "16", "17 local"}},
      {"/text_config/sparse_attention_config/sparse_init_block", 16, {"sparse_topk_blocks", "1 local and 16 initial"}},
      {"/text_config/sparse_attention_config/sparse_num_index_heads", 8,
       {"sparse_num_index_heads", "is 8", "num_key_value_heads is 4"}},
      {"/text_config/sparse_attention_config/sparse_index_dim", 32, {"sparse_index_dim", "32", "rotary_dim 64"}},
      {"/text_config/sparse_attention_config/sparse_attention_freq", "all", {"sparse_attention_freq", "\"all\""}},
      {"/vision_config/num_attention_heads", 17, {"vision_config.hidden_size is 1280", "17"}},
      {"/vision_config/num_attention_heads", 256, {"vision_config.hidden_size", "head dim 5"}},
      {"/vision_config/hidden_act", "gelu_pytorch_tanh", {"vision_config.hidden_act", "gelu_pytorch_tanh"}},
      {"/vision_config/patch_size", 16, {"vision_config.patch_size is 16", "only 14"}},
      {"/vision_config/spatial_merge_size", 3, {"vision_config.spatial_merge_size is 3", "only 2"}},
      {"/vision_config/rope_mode", "2d", {"vision_config.rope_mode", "\"2d\""}},
      {"/vision_config/projection_dim", 4096, {"vision_config.projection_dim is 4096", "6144"}},
      {"/vision_config/vision_segment_max_frames", 0, {"vision_segment_max_frames is 0"}},
      {"/vision_feature_layer", -2, {"vision_feature_layer is -2", "only -1"}},
      {"/vision_feature_select_strategy", "default", {"vision_feature_select_strategy is \"default\""}},
      {"/multimodal_projector_bias", false, {"multimodal_projector_bias is false"}},
      {"/projector_hidden_act", "relu", {"projector_hidden_act is \"relu\""}},
      {"/projector_hidden_size", 5120, {"projector_hidden_size is 5120", "6144"}},
      {"/img_token_compression_config/image_token_compression_method", "pool", {"image_token_compression_method", "pool"}},
      {"/image_token_index", 200064, {"image_token_index is 200064", "200063"}},
      {"/image_token_index", nullptr, {"image_token_index is missing"}},
      {"/video_token_index", 200025, {"image_token_index", "both 200025"}},
      {"/quantization_config", {{"quant_method", "fp8"}}, {"quantization_config.quant_method is \"fp8\"", "\"mxfp8\""}},
      {"/quantization_config", {{"quant_method", "compressed-tensors"}}, {"compressed-tensors", "\"mxfp8\""}},
      {"/quantization_config", {{"bits", 4}}, {"quantization_config.quant_method is missing"}},
      {"/quantization_config", {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}}, {"quant_algo is \"NVFP4\"", "MXFP8"}},
      {"/quantization_config", {{"quant_method", "mxfp8"}, {"weight_block_size", {128, 128}}},
       {"weight_block_size is [128,128]", "[1, 32]"}},
  });
}

TEST(Config, every_unsupported_value_of_the_newer_spelling_is_refused_by_name) {
  expect_refused(new_spelling(), {
      {"/text_config/layer_types/1", "sliding_attention", {"layer_types[1]", "sliding_attention", "minimax_m3_sparse"}},
      {"/text_config/layer_types", {"full_attention"}, {"layer_types has 1 entries", "3"}},
      {"/text_config/layer_types", nullptr, {"layer_types"}},
      {"/text_config/mlp_layer_types/0", "moe", {"mlp_layer_types[0]", "\"moe\"", "\"sparse\""}},
      {"/text_config/rope_parameters/rope_type", "yarn", {"rope_parameters.rope_type is \"yarn\"", "\"default\""}},
      {"/text_config/rope_parameters/factor", 4.0, {"factor", "RoPE scaling"}},
      {"/text_config/rope_parameters/partial_rotary_factor", 1.0, {"partial_rotary_factor", "must agree"}},
      {"/text_config/index_n_heads", 4, {"index_n_heads", "4", "num_key_value_heads is 2"}},
      {"/text_config/index_topk_blocks", 0, {"index_topk_blocks is 0"}},
      {"/text_config/index_block_size", nullptr, {"index_block_size"}},
      {"/text_config/hidden_act", "gelu", {"hidden_act is \"gelu\"", "\"silu\""}},
      {"/text_config/moe_layer_freq", {1, 1, 1}, {"moe_layer_freq", "mlp_layer_types", "contradict"}},
      {"/text_config/router_jitter_noise", 0.1, {"router_jitter_noise is 0.1"}},
      {"/vision_config/rope_parameters/rope_type", "linear", {"vision_config.rope_parameters.rope_type"}},
  });
}

TEST(Config, text_that_is_not_json_is_refused) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"", {"config.json", "not valid JSON"}},
      {"{", {"config.json", "not valid JSON"}},
      {"[]", {"config.json", "want an object"}},
      {"{\"a\":1}x", {"config.json", "not valid JSON"}},
      {R"({"model_type":"minimax_m3_vl","model_type":"llama"})", {"config.json", "\"model_type\"", "twice"}},
      {std::string(100000, '['), {"config.json", "nested deeper than 32"}},
      {"{\"model_type\":\"\xc3\x28\"}", {"config.json", "not valid JSON"}},
      {std::string((16 << 20) + 1, ' '), {"config.json", "16777217 bytes", "limit"}},
  };
  for (const auto& [text, message] : cases) {
    SCOPED_TRACE(text.substr(0, 60));
    expect_error([&] { parse_model_config(text, "config.json"); }, message);
  }
}

TEST(GenerationConfig, values_defaults_and_errors) {
  GenerationConfig c = parse_generation_config(
      R"({"do_sample":true,"temperature":0.7,"top_p":0.9,"bos_token_id":200019,"eos_token_id":[200020,5]})", "g.json");
  EXPECT_EQ(c.temperature, 0.7);
  EXPECT_EQ(c.top_k, 40);  // the model card's
  EXPECT_EQ(c.eos_token_ids, (std::vector<int>{200020, 5}));
  c = parse_generation_config("{}", "g.json");
  EXPECT_EQ(c.top_p, 0.95);
  EXPECT_TRUE(c.eos_token_ids.empty());
  expect_error([] { parse_generation_config(R"({"top_p":1.5})", "g.json"); }, {"g.json", "top_p is 1.5"});
  expect_error([] { parse_generation_config(R"({"eos_token_id":[-3]})", "g.json"); }, {"g.json", "eos_token_id[0] is -3"});
  expect_error([] { parse_generation_config(R"({"temperature":"hot"})", "g.json"); }, {"temperature is \"hot\""});
}

}  // namespace
}  // namespace m3
