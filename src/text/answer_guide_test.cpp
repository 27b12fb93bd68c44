#include "text/answer_guide.h"

#include <gtest/gtest.h>

#include "text/chat.h"

namespace m3 {
namespace {

struct Fixture {
  Tokenizer tokenizer =
      Tokenizer::load(std::string(M3_SOURCE_DIR) + "/tests/golden/tokenizer/tiny");
  std::shared_ptr<const TokenTrie> trie = std::make_shared<const TokenTrie>(tokenizer);
  std::shared_ptr<const Grammar> grammar = Grammar::regex(trie, "7+");
  int32_t open = tokenizer.require_added_id(chat_token::kThinkOpen);
  int32_t close = tokenizer.require_added_id(chat_token::kThinkClose);
  int32_t end = tokenizer.require_added_id(chat_token::kTurnEnd);
  int32_t marker = tokenizer.require_added_id(chat_token::kNamespace);
  int32_t seven = 22;  // "7"

  AnswerGuide guide(std::string_view tail,
                    GrammarStart start = GrammarStart::kBehindReasoning) const {
    return AnswerGuide(grammar, tokenizer, tail, start);
  }
  // mask and accept must agree on every id.
  void check(AnswerGuide& guide) const {
    const TokenMask mask = guide.mask();
    for (int32_t id = 0; id < tokenizer.size(); ++id)
      EXPECT_EQ(AnswerGuide(guide).accept(id), mask.test(id)) << id;
  }
};

TEST(AnswerGuide, api_03_the_grammar_starts_behind_the_reasoning) {
  const Fixture f;
  ASSERT_EQ(f.tokenizer.bytes(f.seven), "7");
  AnswerGuide guide = f.guide("]~b]ai\n<mm:think>");
  f.check(guide);
  EXPECT_TRUE(guide.accept(64));  // any text
  for (int32_t id : {f.end, f.marker, f.open})
    EXPECT_FALSE(guide.accept(id)) << "the answer would be missing";
  EXPECT_TRUE(guide.accept(f.close));
  f.check(guide);
  EXPECT_FALSE(guide.accept(64));
  EXPECT_FALSE(guide.accept(f.end));
  EXPECT_TRUE(guide.accept(f.seven));
  f.check(guide);
  EXPECT_TRUE(guide.accept(f.end));
  EXPECT_EQ(guide.mask().count(), 0);
  EXPECT_FALSE(guide.accept(f.seven));
}

TEST(AnswerGuide, api_04_it_starts_at_once_without_thinking_and_for_forced_calls) {
  const Fixture f;
  AnswerGuide disabled = f.guide("]~b]ai\n</mm:think>"),
              forced = f.guide("]~b]ai\n<mm:think>", GrammarStart::kAtOnce);
  for (AnswerGuide* guide : {&disabled, &forced}) {
    f.check(*guide);
    EXPECT_FALSE(guide->accept(f.close));
    EXPECT_TRUE(guide->accept(f.seven));
  }
}

TEST(AnswerGuide, api_04_in_adaptive_mode_the_model_chooses_first) {
  const Fixture f;
  AnswerGuide plain = f.guide("]~b]ai\n"), thinking = plain;
  f.check(plain);
  EXPECT_EQ(plain.mask().count(), 2);
  EXPECT_FALSE(plain.accept(f.seven));
  EXPECT_TRUE(plain.accept(f.close));
  EXPECT_TRUE(plain.accept(f.seven));
  EXPECT_TRUE(thinking.accept(f.open));
  EXPECT_TRUE(thinking.accept(64));
}

}  // namespace
}  // namespace m3
