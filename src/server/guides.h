// Token guides of requests, beside the grammar of one answer (engine/token_guide.h).
#pragma once
#include <memory>
#include <vector>

#include "engine/token_guide.h"

namespace m3 {

// The answer follows one of several grammars: JSON or tool calls. Those that a token rules out drop
// out.
class EitherGuide : public TokenGuide {
 public:
  explicit EitherGuide(std::vector<AnswerGuide> guides) : guides_(std::move(guides)) {}
  std::span<const uint64_t> allowed() override;
  void accept(int32_t id) override;

 private:
  std::vector<AnswerGuide> guides_;
  std::vector<uint64_t> words_;
};

// Text is free; a block of tool calls, once it begins, is held to the tools' schemas.
class ToolBlockGuide : public TokenGuide {
 public:
  ToolBlockGuide(std::shared_ptr<const Grammar> calls, int32_t namespace_id)
      : calls_(std::move(calls)), namespace_id_(namespace_id) {}
  std::span<const uint64_t> allowed() override;
  void accept(int32_t id) override;

 private:
  std::shared_ptr<const Grammar> calls_;
  const int32_t namespace_id_;
  std::optional<GrammarState> block_;  // inside of a block
};

}  // namespace m3
