// Byte-pair merging of one piece of text.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace m3 {

struct BpeMerge {
  int32_t left, right, result;
};

// Recently merged short pieces: a direct-mapped table, since a text repeats its words.
class BpeCache {
 public:
  static constexpr size_t kMaxBytes = 16, kMaxIds = 6;
  struct Slot {
    uint64_t low, high;  // the piece, padded with zeros
    uint8_t num_bytes = 0, num_ids = 0;
    int32_t ids[kMaxIds];
  };
  static constexpr size_t kNumSlots = 1 << 15;  // 1.5 MiB

  BpeCache() : slots_(kNumSlots) {}
  // The piece's slot; it holds the piece if low, high and num_bytes are equal.
  Slot& slot(uint64_t low, uint64_t high, size_t num_bytes);

 private:
  std::vector<Slot> slots_;
};

// Working memory of one thread.
struct BpeScratch {
  BpeCache cache;
  std::vector<int32_t> ids, ranks, previous, next;
  std::vector<uint64_t> heap;
};

class Bpe {
 public:
  // `merges` in order of rank; a pair listed twice has its last place. `whole` (may be empty):
  // pieces that are taken as they are, whatever the merges give (ignore_merges).
  Bpe(const std::array<int32_t, 256>& byte_ids, const std::vector<BpeMerge>& merges,
      std::unordered_map<std::string, int32_t> whole);

  // Appends the ids of `piece`: merges the pair of the lowest rank, of equal ones the leftmost, and
  // looks anew after each. Time n log n for any piece.
  void encode(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const;

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  static constexpr int32_t kNoMerge = INT32_MAX;
  struct Entry {
    uint64_t pair = kEmpty;
    int32_t rank = kNoMerge, result = 0;
  };

  const Entry& find(int32_t left, int32_t right) const;
  int32_t rank(int32_t left, int32_t right) const;
  void merge(std::string_view piece, BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void merge_short(BpeScratch& scratch, std::vector<int32_t>& ids) const;
  void merge_long(BpeScratch& scratch, std::vector<int32_t>& ids) const;

  std::array<int32_t, 256> byte_ids_;
  std::vector<Entry> table_;  // open addressing, at most half full
  // Most pairs have no merge: one bit per possible hash value answers them from the second-level
  // cache (512 KiB for M3's 200,000 merges, beside a table of 8 MiB).
  static constexpr int kFilterShift = 3, kFilterBits = 1 << kFilterShift;
  std::vector<uint64_t> filter_;
  int shift_;
  std::unordered_map<std::string, int32_t> whole_;
};

}  // namespace m3
