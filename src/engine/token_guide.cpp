#include "engine/token_guide.h"

#include <algorithm>

#include "base/check.h"

namespace m3 {

void GrammarGuide::accept(int32_t id) {
  M3_CHECK(guide_.accept(id), "token {} was drawn, the grammar does not allow it here", id);
}

ScriptGuide::ScriptGuide(std::vector<int32_t> script, int32_t num_ids)
    : script_(std::move(script)), mask_((static_cast<size_t>(num_ids) + 63) / 64) {
  for (const int32_t id : script_) M3_CHECK(0 <= id && id < num_ids, "script token {} of {} ids", id, num_ids);
}

std::span<const uint64_t> ScriptGuide::allowed() {
  if (next_ == script_.size()) return {};
  std::ranges::fill(mask_, 0);
  mask_[script_[next_] / 64] = uint64_t{1} << (script_[next_] % 64);
  return mask_;
}

void ScriptGuide::accept(int32_t id) {
  if (next_ == script_.size()) return;
  M3_CHECK(id == script_[next_], "token {} was drawn, the script says {}", id, script_[next_]);
  ++next_;
}

}  // namespace m3
