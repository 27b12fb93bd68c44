// Structured output through the whole engine: the grammar holds in every thinking mode, with drafts and without.
#include "engine/token_guide.h"

#include <algorithm>

#include "engine/fake_engine_test.h"
#include "text/chat.h"

namespace m3::test {
namespace {

TEST(GrammarGuide, api_03_04_answers_fit_the_schema_in_every_thinking_mode) {
  const Tokenizer& tokenizer = tiny_tokenizer();
  const auto trie = std::make_shared<const TokenTrie>(tokenizer);
  const auto grammar = Grammar::json_schema(
      trie, JsonValue::parse(R"({"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99},
                              "kind": {"enum": ["cat", "dog"]}}, "required": ["n", "kind"], "additionalProperties": false})", "schema"));
  const int32_t close = tokenizer.require_added_id(chat_token::kThinkClose), end = tokenizer.require_added_id(chat_token::kTurnEnd);
  for (const std::string tail : {"]~b]ai\n", "]~b]ai\n<mm:think>", "]~b]ai\n</mm:think>"}) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      FakeOptions options;
      options.engine.max_draft_tokens = seed % 2 == 0 ? 0 : 4;
      FakeEngine fake(options);
      GenerationRequest request = greedy(random_ids(seed, 10), 500);
      request.sampling.temperature = 1;
      request.sampling.seed = seed;
      request.sampling.logit_bias = {{close, 22.0f}};  // reasoning ends after some tokens
      request.stop_ids = {end};
      request.guide = std::make_shared<GrammarGuide>(AnswerGuide(grammar, tokenizer, tail));
      Result result;
      fake.engine.submit(request, result.callback());
      fake.run();
      ASSERT_EQ(result.last.reason, FinishReason::kStop) << tail << " " << result.last.error;
      ASSERT_EQ(result.tokens.back(), end);
      auto begin = std::find(result.tokens.begin(), result.tokens.end(), close);
      begin = begin == result.tokens.end() ? result.tokens.begin() : begin + 1;
      const std::string text = tokenizer.decode(std::vector<int32_t>(begin, result.tokens.end() - 1));
      const auto value = JsonValue::try_parse(text);
      ASSERT_TRUE(value.has_value()) << text;
      EXPECT_EQ(value->keys(), (std::vector<std::string>{"n", "kind"})) << text;
      EXPECT_LE(value->items()[0].as_double(), 99) << text;
      EXPECT_TRUE(value->items()[1].text() == "cat" || value->items()[1].text() == "dog") << text;
    }
  }
}

}  // namespace
}  // namespace m3::test
