// Backward operators go from block to block of keys and take the query rows that read it (msa.md §9). MsaWalk finds those
// rows: for a chunk of query rows of one sequence and one group it yields tiles of at most kTileKeys keys, ascending, each
// with the rows that see at least one of them.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "ops/common/msa_types.h"

namespace m3 {

class MsaWalk {
 public:
  static constexpr int kTileKeys = 128;

  struct Tile {
    int64_t key_begin = 0;  // position in the sequence
    int num_keys = 0;
    std::span<const int32_t> queries;  // relative to the sequence's first query row, ascending
    bool all_visible = false;          // every key to every row
  };

  MsaWalk(const MsaGeometry& geometry, const MsaBatch& batch, const AttendSupport& support, const Tensor& lists)
      : geometry_(geometry), batch_(batch), support_(support), lists_(lists) {}

  // Query rows [q_begin, q_end) of the sequence, relative.
  void start(int seq, int group, int64_t q_begin, int64_t q_end);
  bool next(Tile& tile);

  // Which keys of the tile query `index` (of tile.queries) sees: calls hide(j) for the others, j in [0, num_keys).
  template <class Hide>
  void for_hidden(const Tile& tile, int index, Hide hide) const;

 private:
  const MsaGeometry& geometry_;
  const MsaBatch& batch_;
  const AttendSupport& support_;
  const Tensor& lists_;

  int seq_ = 0;
  int64_t first_position_ = 0, num_keys_ = 0;  // keys any row of the chunk sees
  int64_t q_begin_ = 0, q_end_ = 0;
  int64_t keys_per_tile_ = kTileKeys, num_tiles_ = 0, at_ = 0;
  // kBlocks, kTokens: rows of each tile, and for kTokens their keys, sorted by tile (stable).
  std::vector<int64_t> tile_begin_;
  std::vector<int32_t> entry_query_, entry_key_;
  std::vector<int32_t> queries_;
  std::vector<int64_t> query_entries_;  // kTokens: first entry of queries_[i]; one more at the end
};

template <class Hide>
void MsaWalk::for_hidden(const Tile& tile, int index, Hide hide) const {
  if (tile.all_visible) return;
  if (support_.kind == AttendSupport::Kind::kTokens) {
    int64_t entry = query_entries_[index];
    const int64_t end = query_entries_[index + 1];
    uint64_t seen[kTileKeys / 64] = {};
    for (; entry < end; ++entry) {
      const int64_t j = entry_key_[entry] - tile.key_begin;
      seen[j / 64] |= uint64_t{1} << (j % 64);
    }
    for (int j = 0; j < tile.num_keys; ++j) {
      if ((seen[j / 64] >> (j % 64) & 1) == 0) hide(j);
    }
    return;
  }
  const int64_t p = first_position_ + tile.queries[index];
  for (int j = 0; j < tile.num_keys; ++j) {
    const int64_t key = tile.key_begin + j;
    bool sees = key <= p;
    if (support_.kind == AttendSupport::Kind::kWindow) sees = sees && (p - key < support_.window || key < support_.sink);
    if (!sees) hide(j);
  }
}

}  // namespace m3
