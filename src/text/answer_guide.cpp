#include "text/answer_guide.h"

#include <algorithm>

#include "text/chat.h"

namespace m3 {

AnswerGuide::AnswerGuide(std::shared_ptr<const Grammar> grammar, const Tokenizer& tokenizer,
                         std::string_view prompt_tail, GrammarStart start)
    : state_(std::move(grammar)),
      think_open_(tokenizer.require_added_id(chat_token::kThinkOpen)),
      think_close_(tokenizer.require_added_id(chat_token::kThinkClose)),
      turn_end_(tokenizer.require_added_id(chat_token::kTurnEnd)),
      mask_(tokenizer.size()),
      reasoning_mask_(tokenizer.size()) {
  if (start == GrammarStart::kAtOnce || prompt_tail.ends_with(chat_token::kThinkClose)) {
    phase_ = Phase::kGrammar;
  } else {
    phase_ = prompt_tail.ends_with(chat_token::kThinkOpen) ? Phase::kReasoning : Phase::kChoosing;
  }
  // Reasoning is plain text up to its closing marker: neither a call nor the end of the turn may
  // cut it, for then the answer would be missing.
  for (int32_t id = 0; id < tokenizer.size(); ++id) {
    if (!tokenizer.is_added(id) && !tokenizer.bytes(id).empty()) reasoning_mask_.set(id);
  }
  reasoning_mask_.set(think_close_);
}

const TokenMask& AnswerGuide::mask() {
  if (phase_ == Phase::kReasoning) return reasoning_mask_;
  if (phase_ == Phase::kGrammar) {
    mask_ = state_.mask();
    if (state_.can_end()) mask_.set(turn_end_);
    return mask_;
  }
  std::ranges::fill(mask_.words(), 0);
  if (phase_ == Phase::kChoosing) {
    mask_.set(think_open_);
    mask_.set(think_close_);
  }
  return mask_;
}

bool AnswerGuide::accept(int32_t id) {
  switch (phase_) {
    case Phase::kChoosing:
      if (id != think_open_ && id != think_close_) return false;
      phase_ = id == think_open_ ? Phase::kReasoning : Phase::kGrammar;
      return true;
    case Phase::kReasoning:
      if (id < 0 || !reasoning_mask_.test(id)) return false;
      if (id == think_close_) phase_ = Phase::kGrammar;
      return true;
    case Phase::kGrammar:
      if (id == turn_end_ && state_.can_end()) {
        phase_ = Phase::kEnded;
        return true;
      }
      return state_.accept(id);
    case Phase::kEnded:
      return false;
  }
  return false;
}

}  // namespace m3
