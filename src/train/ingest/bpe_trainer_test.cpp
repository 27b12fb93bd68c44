#include "train/ingest/bpe_trainer.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "base/file.h"

namespace m3::ingest {
namespace {

// The golden layout with `merges` entries beyond the bytes; their names do not matter.
std::string layout_with(int merges) {
  JsonValue file = JsonValue::parse(
      read_file(M3_SOURCE_DIR "/tests/golden/tokenizer/tiny/tokenizer.json"), "layout");
  JsonValue model = *file.find("model"), vocab = JsonValue::object();
  const JsonValue& old = *model.find("vocab");
  for (int i = 0; i < 256 + merges; ++i)
    vocab.append_member(old.keys()[i], JsonValue::integer(int64_t{i}));
  JsonValue kept = JsonValue::array();
  for (int i = 0; i < merges; ++i) kept.push_back(model.find("merges")->items()[i]);
  model.set("vocab", std::move(vocab));
  model.set("merges", std::move(kept));
  file.set("model", std::move(model));
  return file.dump();
}

TEST(BpeTrainer, MergesOfAKnownExample) {
  // The example of Sennrich et al. 2016, by hand: e+s 9 (as s+t, but smaller ids), es+t 9, l+o 7
  // (as o+w).
  BpeTrainer trainer(layout_with(3));
  trainer.add("low", 5);
  trainer.add("lower", 2);
  trainer.add("newest", 6);
  trainer.add("widest", 3);
  trainer.add("2024", 1000);  // digits never join
  const std::string file = trainer.train();
  EXPECT_NE(file.find(R"("merges":[["e","s"],["es","t"],["l","o"]])"), std::string::npos);
  const Tokenizer tokenizer = Tokenizer::from_json(file);
  const std::vector<int32_t> ids = tokenizer.encode("newest");
  ASSERT_EQ(ids.size(), 4u);
  EXPECT_EQ(tokenizer.bytes(ids[3]), "est");
  EXPECT_EQ(tokenizer.encode("2024").size(), 4u);
  EXPECT_TRUE(tokenizer.added_id("[e~[").has_value());  // the layout's markers stay
}

TEST(BpeTrainer, TooFewTextsAreRefused) {
  BpeTrainer trainer(layout_with(3));
  trainer.add("ab");
  EXPECT_THROW(trainer.train(), Error);
}

}  // namespace
}  // namespace m3::ingest
