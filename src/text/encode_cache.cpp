#include "text/encode_cache.h"

namespace m3 {

int64_t EncodeCache::Entry::bytes() const {
  constexpr int64_t kOverhead = 160;  // nodes of list and map, two heap blocks
  return static_cast<int64_t>(text.size() + ids.size() * sizeof(int32_t)) + kOverhead;
}

bool EncodeCache::find(std::string_view text, std::vector<int32_t>& ids) {
  const std::lock_guard lock(mutex_);
  const auto found = by_text_.find(text);
  if (found == by_text_.end()) return false;
  entries_.splice(entries_.begin(), entries_, found->second);
  const std::vector<int32_t>& known = found->second->ids;
  ids.insert(ids.end(), known.begin(), known.end());
  ++counts_.hits;
  counts_.hit_bytes += static_cast<int64_t>(text.size());
  return true;
}

void EncodeCache::add(std::string_view text, std::span<const int32_t> ids) {
  Entry entry{std::string(text), {ids.begin(), ids.end()}};
  const std::lock_guard lock(mutex_);
  counts_.encoded_bytes += static_cast<int64_t>(text.size());
  if (entry.bytes() > max_bytes_ || by_text_.contains(text)) return;  // another thread may have been faster
  counts_.held_bytes += entry.bytes();
  entries_.push_front(std::move(entry));
  by_text_.emplace(entries_.front().text, entries_.begin());
  while (counts_.held_bytes > max_bytes_) {
    counts_.held_bytes -= entries_.back().bytes();
    by_text_.erase(entries_.back().text);
    entries_.pop_back();
  }
}

EncodeCache::Counts EncodeCache::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

}  // namespace m3
