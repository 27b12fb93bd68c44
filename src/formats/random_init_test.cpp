#include "formats/random_init.h"

#include <cmath>
#include <cstring>

#include "base/threads.h"
#include "formats/checkpoint.h"
#include "formats/test_support.h"

namespace m3 {
namespace {

std::string vl_config() { return read_file(golden_model("tiny-vl") / "config.json"); }

TEST(RandomInit, kinds_get_their_values) {
  TemporaryFolder folder;
  write_random_checkpoint(vl_config(), "config.json", folder.path() / "m", init_normal(7));
  const Checkpoint model = Checkpoint::open(folder.path() / "m");
  EXPECT_EQ(model.form(), "released");
  for (const TensorEntry& entry : model.table()) {
    const Tensor tensor = model.weight(entry.name).data;
    ASSERT_EQ(tensor.dtype(), entry.dtype) << entry.name;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < tensor.numel(); ++i) {
      const double x = entry.dtype == DType::kF32 ? tensor.ptr<float>()[i] : to_float(tensor.ptr<bf16>()[i]);
      sum += x;
      squares += x * x;
    }
    const double n = static_cast<double>(tensor.numel()), mean = sum / n, deviation = std::sqrt(squares / n);
    switch (entry.kind) {
      case TensorKind::kNorm:
      case TensorKind::kBias:
      case TensorKind::kRouterBias: EXPECT_EQ(squares, 0) << entry.name; break;
      case TensorKind::kLayerNorm: EXPECT_EQ(sum, n) << entry.name; break;
      default:  // five standard errors of mean and deviation
        EXPECT_NEAR(mean, 0, 5 * 0.02 / std::sqrt(n)) << entry.name;
        EXPECT_NEAR(deviation, 0.02, 5 * 0.02 / std::sqrt(2 * n)) << entry.name;
    }
  }
}

TEST(RandomInit, depends_on_seed_and_name_only) {
  std::vector<float> whole(1000), piece(333), other(1000);
  fill_normal(1, "a", 0, whole);
  for (int64_t begin : {0, 1, 2, 501}) {
    fill_normal(1, "a", begin, piece);
    EXPECT_EQ(std::memcmp(piece.data(), whole.data() + begin, piece.size() * sizeof(float)), 0) << begin;
  }
  fill_normal(2, "a", 0, other);
  EXPECT_NE(whole, other);
  fill_normal(1, "b", 0, other);
  EXPECT_NE(whole, other);

  // The text part of a model is the same whether or not there is a tower, on one thread and on several.
  TemporaryFolder folder;
  const std::string text_config = read_file(golden_model("tiny-small") / "config.json");
  const int threads = num_threads();
  set_num_threads(1);
  write_random_checkpoint(text_config, "config.json", folder.path() / "a", init_normal(7));
  set_num_threads(3);
  write_random_checkpoint(read_file(golden_model("tiny-small-transformers") / "config.json"), "config.json",
                          folder.path() / "b", init_normal(7));
  set_num_threads(threads);
  const Checkpoint a = Checkpoint::open(folder.path() / "a"), b = Checkpoint::open(folder.path() / "b");
  for (const TensorEntry& entry : a.table()) {
    EXPECT_EQ(std::memcmp(a.weight(entry.name).data.data(), b.weight(entry.name).data.data(), entry.bytes()), 0) << entry.name;
  }
}

TEST(RandomInit, takes_another_scheme_and_copies_files) {
  TemporaryFolder folder;
  const auto extra = golden_model("tiny-text") / "tokenizer.json";
  const InitScheme position = [](const TensorEntry&, int64_t begin, std::span<float> values) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>((begin + static_cast<int64_t>(i)) % 128);
  };
  write_random_checkpoint(vl_config(), "config.json", folder.path() / "m", position, {extra});
  EXPECT_EQ(read_file(folder.path() / "m/tokenizer.json"), read_file(extra));
  EXPECT_EQ(read_file(folder.path() / "m/config.json"), vl_config());
  const Checkpoint model = Checkpoint::open(folder.path() / "m");
  const Tensor head = model.weight("language_model.lm_head.weight").data;
  for (int64_t i = 0; i < head.numel(); ++i) ASSERT_EQ(to_float(head.ptr<bf16>()[i]), static_cast<float>(i % 128));
}

TEST(RandomInit, never_overwrites_and_leaves_nothing_behind) {
  TemporaryFolder folder;
  const auto out = folder.path() / "m";
  write_random_checkpoint(vl_config(), "config.json", out, init_normal(7));
  expect_error([&] { write_random_checkpoint(vl_config(), "config.json", out, init_normal(7)); }, {"/m exists"});
  const InitScheme failing = [](const TensorEntry& t, int64_t, std::span<float>) { M3_FAIL("{} cannot be", t.name); };
  expect_error([&] { write_random_checkpoint(vl_config(), "config.json", folder.path() / "n", failing); }, {"cannot be"});
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "n"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "n.partial"));
  expect_error([&] {
    write_random_checkpoint(read_file(golden_model("tiny-small-mxfp8") / "config.json"), "config.json", folder.path() / "n",
                            init_normal(7));
  }, {"config.json", "quantization_config"});
}

}  // namespace
}  // namespace m3
