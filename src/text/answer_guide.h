// Holds a whole answer to a grammar, thinking included: the grammar begins where the answer begins,
// behind the reasoning (serving.md §6). The engine asks it for the mask before each token.
#pragma once
#include <memory>
#include <string_view>

#include "text/grammar.h"
#include "text/tokenizer.h"

namespace m3 {

enum class GrammarStart {
  kBehindReasoning,  // at the end-of-think marker; at once if the prompt has closed the reasoning
  kAtOnce,           // a forced tool call: no reasoning comes before it
};

// One answer; one thread at a time. Copies are independent.
class AnswerGuide {
 public:
  // `prompt_tail`: the end of the rendered prompt. Ends with the open think marker: reasoning, then
  // the grammar. With neither marker (adaptive): the model chooses one of the two first.
  AnswerGuide(std::shared_ptr<const Grammar> grammar, const Tokenizer& tokenizer,
              std::string_view prompt_tail, GrammarStart start = GrammarStart::kBehindReasoning);

  // All ids that may come next, the end of the turn among them where the answer is complete. Valid
  // until the next call.
  const TokenMask& mask();
  bool accept(int32_t id);  // false: not allowed here, and nothing has changed

 private:
  enum class Phase { kChoosing, kReasoning, kGrammar, kEnded };
  GrammarState state_;
  Phase phase_;
  int32_t think_open_, think_close_, turn_end_;
  TokenMask mask_, reasoning_mask_;
};

}  // namespace m3
