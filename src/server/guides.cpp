#include "server/guides.h"

#include "base/check.h"

namespace m3 {

std::span<const uint64_t> EitherGuide::allowed() {
  words_.clear();
  for (AnswerGuide& guide : guides_) {
    const auto mask = guide.mask().words();
    words_.resize(mask.size());
    for (size_t i = 0; i < mask.size(); ++i) words_[i] |= mask[i];
  }
  return words_;
}

void EitherGuide::accept(int32_t id) {
  std::erase_if(guides_, [&](AnswerGuide& guide) { return !guide.accept(id); });
  M3_CHECK(!guides_.empty(), "token {} is allowed by no grammar", id);
}

std::span<const uint64_t> ToolBlockGuide::allowed() {
  if (!block_) return {};
  return block_->mask().words();
}

void ToolBlockGuide::accept(int32_t id) {
  if (!block_) {
    if (id != namespace_id_) return;
    block_.emplace(calls_);
  }
  M3_CHECK(block_->accept(id), "token {} is not allowed inside of a tool call", id);
  if (block_->must_end()) block_.reset();
}

}  // namespace m3
