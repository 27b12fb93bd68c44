#include "formats/tensor_table.h"

#include <algorithm>

#include "formats/test_support.h"

namespace m3 {
namespace {

ModelConfig m3_config() { return read_model_config(std::filesystem::path(M3_SOURCE_DIR) / "configs/minimax-m3.json"); }

// model.md §0.3 and §17, first acceptance test.
TEST(TensorTable, m3_has_the_published_counts) {
  const ModelConfig config = m3_config();
  const std::vector<TensorEntry> table = tensor_table(config);
  EXPECT_EQ(table.size(), 23416u);
  EXPECT_EQ(std::count_if(table.begin(), table.end(), [](const auto& e) { return e.dtype == DType::kF32; }), 115);
  EXPECT_EQ(std::count_if(table.begin(), table.end(), [](const auto& e) { return e.is_vision(); }), 523);
  EXPECT_EQ(total_bytes(table), 854'172'958'720);
  const ParameterCounts counts = count_parameters(config, table);
  EXPECT_EQ(counts.total, 427'040'140'160);
  EXPECT_EQ(counts.text, 426'174'572'928);
  EXPECT_EQ(counts.tower, 631'185'920);
  EXPECT_EQ(counts.projector, 234'381'312);
  EXPECT_EQ(counts.experts, 413'122'166'784);
  EXPECT_EQ(counts.active, 23'503'306'752);
  EXPECT_EQ(counts.active + counts.head, 24'732'499'968);
  EXPECT_EQ(counts.active + counts.head + counts.embedding, 25'961'693'184);
  std::vector<std::string> names;
  for (const auto& entry : table) names.push_back(entry.name);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << "a name appears twice";
}

TEST(TensorTable, m3_in_mxfp8_has_the_published_counts) {
  const std::vector<TensorSpec> stored = mxfp8_tensors(tensor_table(m3_config()));
  EXPECT_EQ(stored.size(), 45838u);
  int64_t bytes = 0;
  for (const TensorSpec& tensor : stored) bytes += tensor.bytes();
  EXPECT_EQ(bytes, 443'742'085'120);
  const auto find = [&](const std::string& name) {
    return *std::find_if(stored.begin(), stored.end(), [&](const auto& t) { return t.name == name; });
  };
  const std::string layer = "language_model.model.layers.3.";
  EXPECT_EQ(find(layer + "self_attn.q_proj.weight_scale_inv").shape, (Shape{8192, 192}));
  EXPECT_EQ(find(layer + "self_attn.k_proj.weight_scale_inv").shape, (Shape{512, 192}));
  EXPECT_EQ(find(layer + "self_attn.o_proj.weight_scale_inv").shape, (Shape{6144, 256}));
  EXPECT_EQ(find(layer + "block_sparse_moe.experts.127.w2.weight_scale_inv").shape, (Shape{6144, 96}));
  EXPECT_EQ(find(layer + "block_sparse_moe.gate.weight").dtype, DType::kF32);
}

TEST(TensorTable, m3_cache_takes_the_published_bytes) {  // model.md §5.4
  EXPECT_EQ(m3_config().text.cache_bytes_per_token(), 137'472);
}

// The goldens' files were written by a program that shares nothing with ours.
TEST(TensorTable, equals_the_files_of_the_goldens) {
  for (const char* name : {"tiny-text", "tiny-vl"}) {
    SCOPED_TRACE(name);
    const std::vector<TensorEntry> table = tensor_table(read_model_config(golden_model(name)));
    const SafetensorsFile file(golden_model(name) / "model.safetensors");
    EXPECT_EQ(table.size(), file.entries().size());
    for (const TensorEntry& entry : table) {
      ASSERT_TRUE(file.contains(entry.name)) << entry.name;
      EXPECT_EQ(file.get(entry.name).shape(), entry.shape) << entry.name;
      EXPECT_EQ(file.get(entry.name).dtype(), entry.dtype) << entry.name;
    }
  }
}

TEST(TensorTable, mxfp8_needs_whole_groups_of_columns) {
  ModelConfig config = m3_config();
  config.text.hidden_size = 6145;
  expect_error([&] { mxfp8_tensors(tensor_table(config)); }, {"q_proj.weight", "6145", "32"});
}

}  // namespace
}  // namespace m3
