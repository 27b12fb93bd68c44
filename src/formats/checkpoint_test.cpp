#include "formats/checkpoint.h"

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/fp8.h"
#include "formats/random_init.h"
#include "formats/test_support.h"

namespace m3 {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kLayer1 = "language_model.model.layers.1.";

std::vector<float> values(const StoredWeight& weight) {
  std::vector<float> out(weight.data.numel());
  const int64_t columns = weight.data.dim(weight.data.rank() - 1);
  for (size_t i = 0; i < out.size(); ++i) {
    switch (weight.data.dtype()) {
      case DType::kF32: out[i] = weight.data.ptr<float>()[i]; break;
      case DType::kBF16: out[i] = to_float(weight.data.ptr<bf16>()[i]); break;
      default: {
        const int64_t row = i / columns, group = i % columns / kMxBlock;
        const uint8_t scale = weight.scales.ptr<uint8_t>()[row * weight.scales.dim(1) + group];
        out[i] = e4m3_decode(static_cast<const uint8_t*>(weight.data.data())[i]) * e8m0_decode(scale);
      }
    }
  }
  return out;
}

TEST(Checkpoint, opens_every_golden_model) {
  struct Case { const char* name; const char* form; int files; bool mxfp8; };
  for (const Case& c : {Case{"tiny-text", "released", 1, false}, Case{"tiny-vl", "released", 1, false},
                        Case{"tiny-small", "released", 3, false}, Case{"tiny-small-mxfp8", "released", 2, true},
                        Case{"tiny-small-transformers", "transformers save", 1, false},
                        Case{"tiny-small-transformers-native", "transformers native", 1, false}}) {
    SCOPED_TRACE(c.name);
    const Checkpoint model = Checkpoint::open(golden_model(c.name));
    EXPECT_EQ(model.form(), c.form);
    EXPECT_EQ(model.num_files(), c.files);
    for (const TensorEntry& entry : model.table()) {
      const StoredWeight& weight = model.weight(entry.name);
      EXPECT_EQ(weight.data.shape(), entry.shape) << entry.name;
      EXPECT_EQ(weight.is_mxfp8(), c.mxfp8 && entry.is_quantisable()) << entry.name;
      if (!weight.is_mxfp8()) { EXPECT_EQ(weight.data.dtype(), entry.dtype) << entry.name; }
    }
    expect_error([&] { model.weight("lm_head.weight"); }, {c.name, "'lm_head.weight'"});
  }
}

// The same model saved by transformers in two forms: every part must be found in both places.
TEST(Checkpoint, the_two_forms_of_transformers_hold_equal_weights) {
  const Checkpoint a = Checkpoint::open(golden_model("tiny-small-transformers"));
  const Checkpoint b = Checkpoint::open(golden_model("tiny-small-transformers-native"));
  ASSERT_EQ(a.table().size(), b.table().size());
  for (const TensorEntry& entry : a.table()) {
    EXPECT_EQ(std::memcmp(a.weight(entry.name).data.data(), b.weight(entry.name).data.data(), entry.bytes()), 0) << entry.name;
  }
  EXPECT_GT(a.widened_bytes(), 0);
}

TEST(Checkpoint, transformers_form_equals_the_released_one_it_was_saved_from) {
  const Checkpoint released = Checkpoint::open(golden_model("tiny-small"));
  const Checkpoint saved = Checkpoint::open(golden_model("tiny-small-transformers"));
  for (const TensorEntry& entry : released.table()) {
    const std::vector<float> a = values(released.weight(entry.name)), b = values(saved.weight(entry.name));
    // Routers and their bias were F32 and went through bf16.
    for (size_t i = 0; i < a.size(); ++i) ASSERT_EQ(to_float(bf16(a[i])), b[i]) << entry.name << " element " << i;
  }
}

// e4m3 has 4 significant bits and the group's largest value scales to at most 448: the error of an element is at most
// 2^-4 of it, or half the smallest subnormal, 2^-10, times the group's scale (<= largest / 224).
TEST(Checkpoint, mxfp8_decodes_to_the_bf16_weights) {
  const Checkpoint exact = Checkpoint::open(golden_model("tiny-small"));
  const Checkpoint coded = Checkpoint::open(golden_model("tiny-small-mxfp8"));
  for (const TensorEntry& entry : exact.table()) {
    const std::vector<float> a = values(exact.weight(entry.name)), b = values(coded.weight(entry.name));
    float largest = 0;
    for (const float x : a) largest = std::max(largest, std::abs(x));
    for (size_t i = 0; i < a.size(); ++i) {
      const float bound = entry.is_quantisable() ? std::abs(a[i]) / 16 + largest / 224 * 0x1p-10f : 0.0f;
      ASSERT_LE(std::abs(a[i] - b[i]), bound) << entry.name << " element " << i;
    }
  }
}

// --- broken checkpoints: a good one, changed in one place

class BrokenCheckpoint {
 public:
  // A copy of a golden model, as one file or in its shards.
  explicit BrokenCheckpoint(const char* golden) {
    for (const auto& file : fs::directory_iterator(golden_model(golden))) {
      const std::string name = file.path().filename().string();
      if (name.starts_with("model") || name == "config.json") fs::copy_file(file.path(), path(name));
    }
  }
  fs::path path(const std::string& name) const { return folder_.path() / name; }
  void edit(const std::function<void(EditableTensors&)>& change, const std::string& file = "model.safetensors") {
    EditableTensors tensors(path(file));
    change(tensors);
    tensors.save(path(file));
  }
  void edit_json(const std::string& file, const std::function<void(json&)>& change) {
    json document = json::parse(read_file(path(file)));
    change(document);
    write_file_atomic(path(file), document.dump());
  }
  void expect_refused(const std::vector<std::string>& message) const {
    expect_error([&] { Checkpoint::open(folder_.path()); }, message);
  }

 private:
  TemporaryFolder folder_;
};

struct TensorCase {
  const char* name;
  const char* golden;
  std::function<void(EditableTensors&)> change;
  std::vector<std::string> message;
};

TEST(Checkpoint, every_wrong_tensor_is_refused_by_name) {
  const std::string q = kLayer1 + "self_attn.q_proj.weight", router = kLayer1 + "block_sparse_moe.gate.weight",
                    norm = kLayer1 + "input_layernorm.weight", w1 = kLayer1 + "block_sparse_moe.experts.5.w1.weight",
                    bias = kLayer1 + "block_sparse_moe.e_score_correction_bias",
                    patch = "vision_tower.vision_model.embeddings.patch_embedding.weight",
                    native = "model.language_model.layers.1.mlp.";
  const std::string file = "model.safetensors";
  const std::vector<TensorCase> cases = {
      {"missing", "tiny-vl", [&](auto& t) { t.items.erase(q); }, {file, "1 of 127 tensors missing", q, "bf16 [128, 64]"}},
      {"two missing", "tiny-vl", [&](auto& t) { t.items.erase(q); t.items.erase(w1); }, {"2 of 127", q}},
      {"missing norm", "tiny-vl", [&](auto& t) { t.items.erase(norm); }, {norm, "bf16 [64]"}},
      {"missing vision tensor", "tiny-vl", [&](auto& t) { t.items.erase(patch); }, {patch, "f32 [160, 3, 2, 14, 14]"}},
      {"renamed", "tiny-vl", [&](auto& t) { t.rename(q, kLayer1 + "self_attn.qq.weight"); },
       {q, "missing", kLayer1 + "self_attn.qq.weight", "renamed"}},
      {"fused qkv", "tiny-vl", [&](auto& t) { t.rename(q, kLayer1 + "self_attn.qkv_proj.weight"); }, {q, "qkv_proj"}},
      {"one name of the other form", "tiny-vl", [&](auto& t) { t.rename("language_model.lm_head.weight", "lm_head.weight"); },
       {"language_model.lm_head.weight", "'lm_head.weight'", "form released"}},
      {"extra", "tiny-vl", [&](auto& t) { t.items["surprise.weight"] = t.items.at(norm); },
       {file, "1 tensors that the model does not have", "'surprise.weight'", "BF16 [64]"}},
      {"extra expert", "tiny-vl", [&](auto& t) { t.items[kLayer1 + "block_sparse_moe.experts.6.w1.weight"] = t.items.at(w1); },
       {"experts.6.w1.weight"}},
      {"index tensor in a dense layer", "tiny-vl",
       [&](auto& t) { t.items["language_model.model.layers.0.self_attn.index_k_norm.weight"] = t.items.at(norm); },
       {"layers.0.self_attn.index_k_norm.weight"}},
      {"transposed", "tiny-vl", [&](auto& t) { t.retype(q, DType::kBF16, {64, 128}); },
       {file, q, "BF16 [64, 128]", "config.json asks for [128, 64]"}},
      {"one row short", "tiny-vl", [&](auto& t) { t.retype(w1, DType::kBF16, {31, 64}); }, {w1, "[31, 64]", "[32, 64]"}},
      {"one axis more", "tiny-vl", [&](auto& t) { t.retype(norm, DType::kBF16, {64, 1}); }, {norm, "[64, 1]", "[64]"}},
      {"flat patch embedding", "tiny-vl", [&](auto& t) { t.retype(patch, DType::kF32, {160, 1176}); },
       {patch, "[160, 1176]", "[160, 3, 2, 14, 14]"}},
      {"matrix in F32", "tiny-vl", [&](auto& t) { t.retype(q, DType::kF32, {128, 64}); }, {q, "F32 [128, 64]", "want BF16"}},
      {"norm in F32", "tiny-vl", [&](auto& t) { t.retype(norm, DType::kF32, {64}); }, {norm, "F32 [64]", "want BF16"}},
      {"router in F64", "tiny-vl", [&](auto& t) { t.retype(router, DType::kF64, {6, 64}); },
       {router, "F64 [6, 64]", "F32 or BF16"}},
      {"bias of integers", "tiny-vl", [&](auto& t) { t.retype(bias, DType::kI32, {6}); }, {bias, "I32 [6]", "F32 or BF16"}},
      {"4-bit matrix", "tiny-vl", [&](auto& t) { t.retype(w1, DType::kU8, {32, 32}); }, {w1, "U8 [32, 32]", "NVFP4", "MXFP8"}},
      {"8-bit matrix without scales", "tiny-vl", [&](auto& t) { t.retype(q, DType::kE4M3, {128, 64}); },
       {q, "F8_E4M3", "weight_scale_inv", "U8 [128, 2]", "missing"}},
      {"8-bit norm", "tiny-vl", [&](auto& t) { t.retype(norm, DType::kE4M3, {64}); }, {norm, "F8_E4M3 [64]", "want BF16"}},
      {"8-bit router", "tiny-vl", [&](auto& t) { t.retype(router, DType::kE4M3, {6, 64}); }, {router, "F8_E4M3"}},
      {"8-bit head", "tiny-vl", [&](auto& t) { t.retype("language_model.lm_head.weight", DType::kE4M3, {1088, 64}); },
       {"lm_head.weight", "F8_E4M3", "want BF16"}},
      {"scales for a bf16 matrix", "tiny-vl",
       [&](auto& t) { t.items[q + "_scale_inv"] = {DType::kU8, {128, 2}, std::string(256, '\x7f'), ""}; },
       {"'" + q + "_scale_inv'", "no 8-bit matrix uses these scales"}},
      {"native: experts misshapen", "tiny-small-transformers-native",
       [&](auto& t) { t.retype(native + "experts.gate_up_proj", DType::kBF16, {6, 32, 64}); },
       {native + "experts.gate_up_proj", "[6, 32, 64]", "[6, 64, 64]"}},
      {"native: an expert too few", "tiny-small-transformers-native",
       [&](auto& t) { t.retype(native + "experts.down_proj", DType::kBF16, {5, 64, 32}); },
       {native + "experts.down_proj", "[5, 64, 32]", "[6, 64, 32]"}},
      {"native: shared expert unfused", "tiny-small-transformers-native",
       [&](auto& t) { t.rename(native + "shared_experts.gate_up_proj.weight", native + "shared_experts.gate_proj.weight"); },
       {native + "shared_experts.gate_up_proj.weight", "missing", "shared_experts.gate_proj.weight"}},
      {"native: 8-bit experts", "tiny-small-transformers-native",
       [&](auto& t) { t.retype(native + "experts.down_proj", DType::kE4M3, {6, 64, 32}); },
       {native + "experts.down_proj", "F8_E4M3", "released names"}},
      {"save form: fc1 missing", "tiny-small-transformers",
       [&](auto& t) { t.items.erase("vision_tower.vision_model.encoder.layers.0.block_sparse_moe.fc1.weight"); },
       {"encoder.layers.0.block_sparse_moe.fc1.weight", "missing", "transformers save"}},
  };
  for (const TensorCase& c : cases) {
    SCOPED_TRACE(c.name);
    BrokenCheckpoint model(c.golden);
    model.edit(c.change);
    model.expect_refused(c.message);
  }
}

TEST(Checkpoint, every_wrong_scale_is_refused_by_name) {
  const std::string file = "model-00001-of-00002.safetensors", index = "model.safetensors.index.json";
  const std::string q = kLayer1 + "self_attn.index_q_proj.weight", scale = q + "_scale_inv";
  const auto change_names = [&](BrokenCheckpoint& model, const std::string& from, const std::string& to) {
    model.edit([&](auto& t) { t.rename(from, to); }, file);
    model.edit_json(index, [&](json& j) {
      j["weight_map"].erase(from);
      j["weight_map"][to] = file;
    });
  };
  {
    BrokenCheckpoint model("tiny-small-mxfp8");
    change_names(model, scale, q + "_scales");
    model.expect_refused({file, "'" + q + "' is F8_E4M3", scale, "U8 [64, 2]", "missing"});
  }
  {
    BrokenCheckpoint model("tiny-small-mxfp8");
    change_names(model, scale, q + "_scale");  // ModelOpt's name is as good
    const Checkpoint opened = Checkpoint::open(model.path(""));
    EXPECT_TRUE(opened.weight(q).is_mxfp8());
  }
  struct Case { const char* name; DType dtype; Shape shape; std::vector<std::string> message; };
  for (const Case& c : {Case{"per row", DType::kU8, {64, 1}, {scale, "U8 [64, 1]", "[64, 2]"}},
                        Case{"128 x 128 blocks in F32", DType::kF32, {1, 1}, {scale, "F32 [1, 1]", "U8 or F8_E8M0 [64, 2]"}},
                        Case{"scales as e4m3", DType::kE4M3, {64, 2}, {scale, "F8_E4M3 [64, 2]", "U8 or F8_E8M0"}},
                        Case{"groups of 16", DType::kU8, {64, 4}, {scale, "[64, 4]", "[64, 2]"}}}) {
    SCOPED_TRACE(c.name);
    BrokenCheckpoint model("tiny-small-mxfp8");
    model.edit([&](auto& t) { t.retype(scale, c.dtype, c.shape); }, file);
    std::vector<std::string> wanted = c.message;
    wanted.push_back(file);
    model.expect_refused(wanted);
  }
  {
    BrokenCheckpoint model("tiny-small-mxfp8");  // the matrix alone went back to bf16: its scales are left over
    model.edit([&](auto& t) { t.retype(q, DType::kBF16, {64, 64}); }, file);
    model.expect_refused({scale, "no 8-bit matrix uses these scales"});
  }
  {
    BrokenCheckpoint model("tiny-small-mxfp8");  // both names of the scales
    model.edit([&](auto& t) { t.items[q + "_scale"] = t.items.at(scale); }, file);
    model.edit_json(index, [&](json& j) { j["weight_map"][q + "_scale"] = file; });
    model.expect_refused({q, "two scales", scale});
  }
}

TEST(Checkpoint, a_matrix_may_be_bf16_among_8_bit_ones) {  // decided per tensor
  const std::string file = "model-00001-of-00002.safetensors", q = kLayer1 + "self_attn.index_q_proj.weight";
  BrokenCheckpoint model("tiny-small-mxfp8");
  model.edit([&](auto& t) {
    t.retype(q, DType::kBF16, {64, 64});
    t.items.erase(q + "_scale_inv");
  }, file);
  model.edit_json("model.safetensors.index.json", [&](json& j) { j["weight_map"].erase(q + "_scale_inv"); });
  const Checkpoint opened = Checkpoint::open(model.path(""));
  EXPECT_FALSE(opened.weight(q).is_mxfp8());
  EXPECT_TRUE(opened.weight(kLayer1 + "self_attn.q_proj.weight").is_mxfp8());
}

TEST(Checkpoint, mtp_tensors_are_skipped_and_listed) {
  BrokenCheckpoint model("tiny-vl");
  const std::string name = "language_model.model.mtp.layers.0.enorm.weight";
  model.edit([&](auto& t) { t.items[name] = t.items.at(kLayer1 + "input_layernorm.weight"); });
  const Checkpoint opened = Checkpoint::open(model.path(""));
  ASSERT_EQ(opened.skipped().size(), 1u);
  EXPECT_EQ(opened.skipped()[0].name, name);
  EXPECT_NE(opened.skipped()[0].reason, "");
}

struct FolderCase {
  const char* name;
  const char* golden;
  std::function<void(BrokenCheckpoint&)> change;
  std::vector<std::string> message;
};

TEST(Checkpoint, every_broken_folder_is_refused_by_name) {
  const std::string index = "model.safetensors.index.json", second = "model-00002-of-00003.safetensors";
  const std::string head = "language_model.lm_head.weight";
  const auto cut = [](const fs::path& path, uint64_t bytes) { fs::resize_file(path, fs::file_size(path) - bytes); };
  const std::vector<FolderCase> cases = {
      {"no config", "tiny-small", [&](auto& m) { fs::remove(m.path("config.json")); }, {"no config.json", "model folder"}},
      {"config cut", "tiny-small", [&](auto& m) { cut(m.path("config.json"), 1); }, {"config.json", "not valid JSON"}},
      {"no weights", "tiny-vl", [&](auto& m) { fs::remove(m.path("model.safetensors")); }, {"neither model.safetensors", index}},
      {"no index", "tiny-small", [&](auto& m) { fs::remove(m.path(index)); }, {"neither", index}},
      {"index and single file", "tiny-small", [&](auto& m) { fs::copy_file(m.path(second), m.path("model.safetensors")); },
       {"both model.safetensors and", index}},
      {"shard missing", "tiny-small", [&](auto& m) { fs::remove(m.path(second)); }, {second, "missing", index}},
      {"shard empty", "tiny-small", [&](auto& m) { fs::resize_file(m.path(second), 0); }, {second, "too short"}},
      {"shard cut by a byte", "tiny-small", [&](auto& m) { cut(m.path(second), 1); }, {second, "ends at byte", "cut short"}},
      {"shard cut inside its header", "tiny-small", [&](auto& m) { fs::resize_file(m.path(second), 1000); },
       {second, "header length", "cut short"}},
      {"shard is a folder", "tiny-small", [&](auto& m) { fs::remove(m.path(second)); fs::create_directory(m.path(second)); },
       {second, "not a regular file"}},
      {"shard is a page of HTML", "tiny-small", [&](auto& m) { write_file_atomic(m.path(second), "<!DOCTYPE html><html>"); },
       {second, "limit", "not a safetensors file"}},
      {"shard is an LFS pointer", "tiny-small",
       [&](auto& m) { write_file_atomic(m.path(second), "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"); },
       {second, "not a safetensors file"}},
      {"shards swapped", "tiny-small",
       [&](auto& m) {
         fs::rename(m.path(second), m.path("x"));
         fs::rename(m.path("model-00003-of-00003.safetensors"), m.path(second));
         fs::rename(m.path("x"), m.path("model-00003-of-00003.safetensors"));
       }, {"tensor '", "model-00003-of-00003.safetensors", second, index}},
      {"index is not JSON", "tiny-small", [&](auto& m) { write_file_atomic(m.path(index), "{"); }, {index, "not valid JSON"}},
      {"index without weight_map", "tiny-small", [&](auto& m) { m.edit_json(index, [](json& j) { j.erase("weight_map"); }); },
       {index, "weight_map is missing"}},
      {"index with an empty weight_map", "tiny-small",
       [&](auto& m) { m.edit_json(index, [](json& j) { j["weight_map"] = json::object(); }); }, {index, "empty"}},
      {"weight_map is a list", "tiny-small",
       [&](auto& m) { m.edit_json(index, [](json& j) { j["weight_map"] = json::array(); }); }, {index, "weight_map"}},
      {"index names a number", "tiny-small",
       [&](auto& m) { m.edit_json(index, [&](json& j) { j["weight_map"][head] = 3; }); }, {index, head}},
      {"index leaves the folder", "tiny-small",
       [&](auto& m) { m.edit_json(index, [&](json& j) { j["weight_map"][head] = "../model.safetensors"; }); },
       {index, head, "../model.safetensors"}},
      {"index names another kind of file", "tiny-small",
       [&](auto& m) { m.edit_json(index, [&](json& j) { j["weight_map"][head] = "config.json"; }); }, {index, head, "config.json"}},
      {"index lacks a tensor", "tiny-small",
       [&](auto& m) { m.edit_json(index, [&](json& j) { j["weight_map"].erase(head); }); },
       {"model-00001-of-00003.safetensors", head, index}},
      {"index names a tensor that is not there", "tiny-small",
       [&](auto& m) { m.edit_json(index, [&](json& j) { j["weight_map"]["ghost"] = second; }); }, {second, "'ghost'", index}},
      {"tensor in two shards", "tiny-small",
       [&](auto& m) {
         const EditableTensors first(m.path("model-00001-of-00003.safetensors"));
         m.edit([&](auto& t) { t.items[head] = first.items.at(head); }, second);
       }, {head, "model-00001-of-00003.safetensors", second}},
      {"config asks for more layers", "tiny-small",
       [&](auto& m) {
         m.edit_json("config.json", [](json& j) {
           auto& t = j["text_config"];
           t["num_hidden_layers"] = 4;
           for (json* list : {&t["moe_layer_freq"], &t["sparse_attention_config"]["sparse_attention_freq"],
                              &t["sparse_attention_config"]["sparse_disable_index_value"]}) list->push_back(1);
         });
       }, {index, "tensors missing", "language_model.model.layers.3.", "no tensor is left over"}},
      {"config asks for fewer experts", "tiny-small",
       [&](auto& m) { m.edit_json("config.json", [](json& j) { j["text_config"]["num_local_experts"] = 5; }); },
       {"block_sparse_moe.gate.weight", "[6, 64]", "[5, 64]"}},
      {"config asks for another width", "tiny-small",
       [&](auto& m) { m.edit_json("config.json", [](json& j) { j["text_config"]["hidden_size"] = 128; }); },
       {"embed_tokens.weight", "[160, 64]", "[160, 128]"}},
      {"config without the tower", "tiny-vl",
       [&](auto& m) { m.edit_json("config.json", [](json& j) { j.erase("vision_config"); }); }, {"no vision_config"}},
      {"config with a tower that has no weights", "tiny-small",
       [&](auto& m) {
         m.edit_json("config.json", [](json& j) {
           const json vl = json::parse(read_file(golden_model("tiny-vl") / "config.json"));
           for (const char* key : {"vision_config", "projector_hidden_size"}) j[key] = vl[key];
           j["image_token_index"] = 158;
           j["video_token_index"] = 159;
         });
       }, {"tensors missing", "vision_tower.vision_model.embeddings.patch_embedding.weight"}},
      {"mixed precision by ModelOpt", "tiny-small",
       [&](auto& m) { write_file_atomic(m.path("hf_quant_config.json"), R"({"quantization":{"quant_algo":"MIXED_PRECISION"}})"); },
       {"hf_quant_config.json", "quant_algo is \"MIXED_PRECISION\"", "MXFP8"}},
      {"broken generation config", "tiny-small",
       [&](auto& m) { write_file_atomic(m.path("generation_config.json"), R"({"temperature":-1})"); },
       {"generation_config.json", "temperature is -1"}},
  };
  for (const FolderCase& c : cases) {
    SCOPED_TRACE(c.name);
    BrokenCheckpoint model(c.golden);
    c.change(model);
    model.expect_refused(c.message);
  }
  expect_error([] { Checkpoint::open("/no/such/model"); }, {"/no/such/model", "no such folder"});
}

// --- writing

TEST(CheckpointWriter, shards_and_their_index_read_back) {
  TemporaryFolder folder;
  const Checkpoint source = Checkpoint::open(golden_model("tiny-vl"));
  const std::string config = read_file(golden_model("tiny-vl") / "config.json");
  struct Case { int64_t shard_bytes; int least_files, most_files; };  // 2.17 MB; the largest tensor has 0.75
  for (const auto [shard_bytes, least_files, most_files] :
       {Case{CheckpointWriter::kShardBytes, 1, 1}, Case{300'000, 5, 20}, Case{1, 127, 127}}) {
    SCOPED_TRACE(shard_bytes);
    const fs::path out = folder.path() / fmt::format("{}", shard_bytes);
    CheckpointWriter writer(out, config, source.table(), shard_bytes);
    for (const TensorEntry& entry : writer.order()) writer.write(entry.name, source.weight(entry.name).data);
    EXPECT_FALSE(fs::exists(out));
    writer.finish();
    EXPECT_FALSE(fs::exists(out.string() + ".partial"));
    const Checkpoint copy = Checkpoint::open(out);
    EXPECT_GE(copy.num_files(), least_files);
    EXPECT_LE(copy.num_files(), most_files);
    for (const TensorEntry& entry : source.table()) {
      ASSERT_EQ(std::memcmp(source.weight(entry.name).data.data(), copy.weight(entry.name).data.data(), entry.bytes()), 0)
          << entry.name;
    }
  }
}

TEST(CheckpointWriter, an_incomplete_checkpoint_never_appears) {
  TemporaryFolder folder;
  const Checkpoint source = Checkpoint::open(golden_model("tiny-vl"));
  const fs::path out = folder.path() / "m";
  {
    CheckpointWriter writer(out, "{}", source.table(), 300'000);
    writer.write(writer.order()[0].name, source.weight(writer.order()[0].name).data);
    expect_error([&] { writer.finish(); }, {"1 of", "shards"});
  }
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace m3
