// Which tokens may come next: a hook of a request, asked by the engine's thread before each draw, outside the model
// step. Used for grammars (structured output, forced tool calls) and, in tests, for answers that are prescribed.
#pragma once
#include <span>
#include <string_view>
#include <vector>

#include "text/answer_guide.h"

namespace m3 {

class TokenGuide {
 public:
  virtual ~TokenGuide() = default;
  // Bit i of word i / 64: id i may be drawn. Empty: all may. Valid until the next call. A stop id must be among them
  // where the answer may end.
  virtual std::span<const uint64_t> allowed() = 0;
  virtual void accept(int32_t id) = 0;  // was drawn; one of those allowed
};

// Holds the answer behind the reasoning to a grammar (docs/structured-output.md).
class GrammarGuide : public TokenGuide {
 public:
  explicit GrammarGuide(AnswerGuide guide) : guide_(std::move(guide)) {}
  std::span<const uint64_t> allowed() override { return guide_.mask().words(); }
  void accept(int32_t id) override;

 private:
  AnswerGuide guide_;
};

// The answer is these tokens, whatever the model says; behind them everything is allowed. For tests and benchmarks.
class ScriptGuide : public TokenGuide {
 public:
  ScriptGuide(std::vector<int32_t> script, int32_t num_ids);
  std::span<const uint64_t> allowed() override;
  void accept(int32_t id) override;

 private:
  std::vector<int32_t> script_;
  size_t next_ = 0;
  std::vector<uint64_t> mask_;
};

}  // namespace m3
