#include "train/eval/evaluator.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/file.h"
#include "train/eval/attention_map.h"
#include "train/test_support.h"
#include "train/trainer.h"

namespace m3::eval {
namespace {

// An untrained model with a head of zeros: every token is equally likely, and the arg-max is always
// id 0.
TEST(Evaluator, AUniformModelHasTheBitsOfChance) {
  const train::TestFolder folder("eval");
  const train::TrainConfig config =
      train::parse_train_config(train::tiny_config_json(folder.str()), "run.json",
                                {"steps=2", "optimizer.lr=0", "init.head_std=0"});
  train::Trainer trainer(config, {});
  trainer.run();
  const Checkpoint checkpoint = Checkpoint::open(trainer.checkpoint_folder());
  const std::filesystem::path text = folder.path() / "text.txt";
  std::string page;
  for (int i = 0; i < 200; ++i) page += "A page of text, line " + std::to_string(i) + ".\n";
  write_file_atomic(text, page);

  EvalOptions options;
  options.count = 4;
  options.texts = {text};
  options.sources = {train::parse_source(
      R"({"name": "moves", "family": "clip", "kind": "one_object", "ask": "event", "events": "moves"})")};
  Evaluator evaluator(checkpoint, options);
  const std::vector<Measure> measures = evaluator.run();
  int texts = 0, sources = 0;
  for (const Measure& m : measures) {
    if (m.name == "source: moves") {
      EXPECT_EQ(m.chance, 25);
      ++sources;
    }
    if (m.unit == "%") {
      EXPECT_EQ(m.value, 0) << m.name;
    } else if (m.unit == "bits") {
      EXPECT_NEAR(m.value, 0, 1e-4) << m.name;
    }
    if (m.unit == "bits/byte") {
      ++texts;
      EXPECT_EQ(m.count, static_cast<int64_t>(page.size()));
      // All 1088 rows of the head take part, the tokenizer has 1085 ids.
      EXPECT_NEAR(m.value, m.chance * std::log2(1088.0) / std::log2(1085.0), 1e-3) << m.name;
    }
  }
  EXPECT_EQ(texts, 2);
  EXPECT_EQ(sources, 1);
  EXPECT_GT(measures.size(), 10u);
  EXPECT_NE(measures_table(measures).find("clip: order of appearance"), std::string::npos);
}

// Matrices of zeros give queries of zeros, so every visible key gets the same probability.
TEST(AttentionMap, AUniformModelHasTheRatioOne) {
  const train::TestFolder folder("map");
  const train::TrainConfig config =
      train::parse_train_config(train::tiny_config_json(folder.str()), "run.json",
                                {"steps=2", "optimizer.lr=0", "init.scheme=normal", "init.std=0"});
  train::Trainer trainer(config, {});
  trainer.run();
  const AttentionMap map = map_attention(Checkpoint::open(trainer.checkpoint_folder()), 3, 5);
  ASSERT_EQ(map.vision_ratio_LH.size(), 4u);  // 2 layers, 2 heads
  EXPECT_NEAR(map.vision_ratio_LH[0], 1, 1e-6);
  EXPECT_NEAR(map.vision_ratio_LH[1], 1, 1e-6);
  EXPECT_EQ(map.rows * map.columns, 16);
  ASSERT_EQ(map.cells_LRC.size(), 32u);
  for (int cell = 1; cell < 16; ++cell)
    EXPECT_NEAR(map.cells_LRC[cell], map.cells_LRC[0], 1e-9);  // of the full layer
  EXPECT_FALSE(map.answer.empty());
  EXPECT_NE(attention_page(map).find("data:image/png;base64,iVBORw0KGgo"),
            std::string::npos);  // the PNG signature
}

}  // namespace
}  // namespace m3::eval
