#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>

namespace m3 {

namespace {

constexpr uint64_t kHashFactor =
    0x9E3779B97F4A7C15u;  // 2^64 / golden ratio: spreads over the high bits

// Above this many symbols a heap is faster than looking through all pairs for each merge.
constexpr size_t kMaxShort = 48;

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

BpeCache::Slot& BpeCache::slot(uint64_t low, uint64_t high, size_t num_bytes) {
  const uint64_t hash = ((low ^ num_bytes) * kHashFactor ^ std::rotl(high, 31)) * kHashFactor;
  return slots_[hash >> (64 - std::countr_zero(kNumSlots))];
}

Bpe::Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<BpeMerge>& merges,
         std::unordered_map<std::string, int32_t> whole)
    : byte_ids_(byte_ids), whole_(std::move(whole)) {
  const size_t num_slots = std::bit_ceil(std::max<size_t>(2 * merges.size(), 16));
  table_.resize(num_slots);
  shift_ = 64 - std::countr_zero(num_slots);
  filter_.resize(num_slots * kFilterBits / 64);
  for (size_t i = 0; i < merges.size(); ++i) {
    const uint64_t key = pair_key(merges[i].left, merges[i].right);
    const uint64_t hash = key * kHashFactor;
    const uint64_t bit = hash >> (shift_ - kFilterShift);
    filter_[bit / 64] |= uint64_t{1} << bit % 64;
    size_t at = hash >> shift_;
    while (table_[at].pair != kEmpty && table_[at].pair != key) at = (at + 1) & (num_slots - 1);
    table_[at] = {key, static_cast<int32_t>(i), merges[i].result};
  }
}

int32_t Bpe::rank(int32_t left, int32_t right) const {
  const uint64_t bit = pair_key(left, right) * kHashFactor >> (shift_ - kFilterShift);
  if ((filter_[bit / 64] >> bit % 64 & 1) == 0) return kNoMerge;
  return find(left, right).rank;
}

const Bpe::Entry& Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  size_t at = key * kHashFactor >> shift_;
  while (table_[at].pair != key && table_[at].pair != kEmpty) at = (at + 1) & (table_.size() - 1);
  return table_[at];  // an empty slot has no merge
}

void Bpe::encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (piece.size() > BpeCache::kMaxBytes || piece.empty()) return merge(piece, scratch, ids);
  uint64_t words[2] = {0, 0};
  std::memcpy(words, piece.data(), piece.size());
  BpeCache::Slot& slot = scratch.cache.slot(words[0], words[1], piece.size());
  if (slot.low == words[0] && slot.high == words[1] && slot.num_bytes == piece.size()) {
    ids.insert(ids.end(), slot.ids, slot.ids + slot.num_ids);
    return;
  }
  const size_t start = ids.size();
  merge(piece, scratch, ids);
  const size_t num_ids = ids.size() - start;
  if (num_ids > BpeCache::kMaxIds) return;
  slot.low = words[0];
  slot.high = words[1];
  slot.num_bytes = static_cast<uint8_t>(piece.size());
  slot.num_ids = static_cast<uint8_t>(num_ids);
  std::copy(ids.end() - static_cast<int>(num_ids), ids.end(), slot.ids);
}

void Bpe::merge(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const {
  if (!whole_.empty()) {
    const auto entry = whole_.find(std::string(piece));
    if (entry != whole_.end()) {
      ids.push_back(entry->second);
      return;
    }
  }
  scratch.ids.clear();
  for (char c : piece) scratch.ids.push_back(byte_ids_[static_cast<unsigned char>(c)]);
  const size_t num_pairs = piece.empty() ? 0 : piece.size() - 1;
  scratch.ranks.assign(piece.size(), kNoMerge);
  for (size_t i = 0; i < num_pairs; ++i)
    scratch.ranks[i] = rank(scratch.ids[i], scratch.ids[i + 1]);
  if (piece.size() <= kMaxShort) {
    merge_short(scratch, ids);
  } else {
    merge_long(scratch, ids);
  }
}

void Bpe::merge_short(BpeScratch& scratch, std::vector<int32_t>& ids) const {
  int32_t* symbols = scratch.ids.data();
  int32_t* ranks = scratch.ranks.data();  // ranks[i]: of the pair (i, i + 1)
  int count = static_cast<int>(scratch.ids.size());
  while (count > 1) {
    const int at = static_cast<int>(std::min_element(ranks, ranks + count - 1) - ranks);
    if (ranks[at] == kNoMerge) break;
    symbols[at] = find(symbols[at], symbols[at + 1]).result;
    std::copy(symbols + at + 2, symbols + count, symbols + at + 1);
    std::copy(ranks + at + 2, ranks + count, ranks + at + 1);
    --count;
    ranks[at] = at + 1 < count ? rank(symbols[at], symbols[at + 1]) : kNoMerge;
    if (at > 0) ranks[at - 1] = rank(symbols[at - 1], symbols[at]);
  }
  ids.insert(ids.end(), symbols, symbols + count);
}

// A list of symbols linked by position and a heap of (rank, position) of their pairs. An entry of
// the heap is stale when the pair at its position has another rank by now: ranks are unique to
// pairs.
void Bpe::merge_long(BpeScratch& scratch, std::vector<int32_t>& ids) const {
  const int32_t count = static_cast<int32_t>(scratch.ids.size());
  scratch.previous.resize(scratch.ids.size());
  scratch.next.resize(scratch.ids.size());
  int32_t *symbols = scratch.ids.data(), *ranks = scratch.ranks.data();
  int32_t *previous = scratch.previous.data(), *next = scratch.next.data();
  auto& heap = scratch.heap;
  heap.clear();
  const auto entry = [&](int32_t at) { return pair_key(ranks[at], at); };
  for (int32_t i = 0; i < count; ++i) {
    previous[i] = i - 1;
    next[i] = i + 1;
    if (ranks[i] != kNoMerge) heap.push_back(entry(i));
  }
  std::make_heap(heap.begin(), heap.end(), std::greater<>());
  const auto update = [&](int32_t at) {  // the pair that starts at `at` has changed
    ranks[at] = next[at] < count ? rank(symbols[at], symbols[next[at]]) : kNoMerge;
    if (ranks[at] == kNoMerge) return;
    heap.push_back(entry(at));
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const uint64_t top = heap.back();
    heap.pop_back();
    const int32_t at = static_cast<int32_t>(top & 0xFFFFFFFFu);
    if (ranks[at] != static_cast<int32_t>(top >> 32)) continue;
    const int32_t right = next[at];
    symbols[at] = find(symbols[at], symbols[right]).result;
    ranks[right] = kNoMerge;
    next[at] = next[right];
    if (next[at] < count) previous[next[at]] = at;
    update(at);
    if (previous[at] >= 0) update(previous[at]);
  }
  for (int32_t i = 0; i < count; i = next[i]) ids.push_back(symbols[i]);
}

}  // namespace m3
