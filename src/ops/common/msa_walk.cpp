#include "ops/common/msa_walk.h"

#include <algorithm>

namespace m3 {

void MsaWalk::start(int seq, int group, int64_t q_begin, int64_t q_end) {
  seq_ = seq;
  first_position_ = batch_.first_position(seq);
  q_begin_ = std::max(q_begin, -first_position_);  // rows before position 0 are empty
  q_end_ = q_end;
  num_keys_ = q_begin_ < q_end_ ? first_position_ + q_end_ : 0;
  at_ = 0;
  // A tile lies in one block, so that one list of blocks decides about all of it.
  keys_per_tile_ = kTileKeys;
  const bool blocks = support_.kind == AttendSupport::Kind::kBlocks;
  const int64_t tiles_per_block = blocks ? (geometry_.block + kTileKeys - 1) / kTileKeys : 1;
  if (blocks) keys_per_tile_ = std::min<int64_t>(geometry_.block, kTileKeys);
  num_tiles_ = blocks ? (num_keys_ + geometry_.block - 1) / geometry_.block * tiles_per_block
                      : (num_keys_ + kTileKeys - 1) / kTileKeys;

  const bool tokens = support_.kind == AttendSupport::Kind::kTokens;
  if (!blocks && !tokens) return;
  const int32_t* lists = lists_.ptr<int32_t>();
  const int64_t length = blocks ? geometry_.topk : support_.budget;
  const int64_t first_row = (blocks ? group * batch_.num_queries : 0) + batch_.q_begin(seq);
  const auto for_entries = [&](auto&& visit) {
    for (int64_t i = q_begin_; i < q_end_; ++i) {
      const int32_t* list = lists + (first_row + i) * length;
      for (int64_t s = 0; s < length && list[s] >= 0; ++s) {
        if (tokens) {
          visit(list[s] / kTileKeys, static_cast<int32_t>(i), list[s]);
          continue;
        }
        for (int64_t part = 0; part < tiles_per_block; ++part) {
          visit(list[s] * tiles_per_block + part, static_cast<int32_t>(i), 0);
        }
      }
    }
  };
  tile_begin_.assign(num_tiles_ + 1, 0);
  for_entries([&](int64_t tile, int32_t, int32_t) { ++tile_begin_[tile + 1]; });
  for (int64_t t = 0; t < num_tiles_; ++t) tile_begin_[t + 1] += tile_begin_[t];
  entry_query_.resize(tile_begin_[num_tiles_]);
  if (tokens) entry_key_.resize(entry_query_.size());
  std::vector<int64_t> fill(tile_begin_.begin(), tile_begin_.end() - 1);
  for_entries([&](int64_t tile, int32_t query, int32_t key) {
    const int64_t entry = fill[tile]++;
    entry_query_[entry] = query;
    if (tokens) entry_key_[entry] = key;
  });
}

bool MsaWalk::next(Tile& tile) {
  for (; at_ < num_tiles_; ++at_) {
    int64_t begin, end;
    if (support_.kind == AttendSupport::Kind::kBlocks) {
      const int64_t per_block = num_tiles_ / ((num_keys_ + geometry_.block - 1) / geometry_.block);
      const int64_t block_begin = at_ / per_block * geometry_.block;
      begin = block_begin + at_ % per_block * keys_per_tile_;
      end = std::min({begin + keys_per_tile_, block_begin + geometry_.block, num_keys_});
    } else {
      begin = at_ * keys_per_tile_;
      end = std::min(begin + keys_per_tile_, num_keys_);
    }
    if (begin >= end) continue;
    queries_.clear();
    query_entries_.clear();
    bool all = true;
    const auto take = [&](int64_t i, bool sees_all) {
      queries_.push_back(static_cast<int32_t>(i));
      all = all && sees_all;
    };
    switch (support_.kind) {
      case AttendSupport::Kind::kBlocks:
        for (int64_t e = tile_begin_[at_]; e < tile_begin_[at_ + 1]; ++e) {
          const int64_t p = first_position_ + entry_query_[e];
          if (p >= begin) take(entry_query_[e], p >= end - 1);
        }
        break;
      case AttendSupport::Kind::kTokens:
        for (int64_t e = tile_begin_[at_]; e < tile_begin_[at_ + 1]; ++e) {
          if (!queries_.empty() && queries_.back() == entry_query_[e]) continue;
          query_entries_.push_back(e);
          take(entry_query_[e], false);
        }
        query_entries_.push_back(tile_begin_[at_ + 1]);
        break;
      case AttendSupport::Kind::kFull:
      case AttendSupport::Kind::kWindow:
        for (int64_t i = std::max(q_begin_, begin - first_position_); i < q_end_; ++i) {
          const int64_t p = first_position_ + i;
          if (support_.kind == AttendSupport::Kind::kFull) {
            take(i, p >= end - 1);
          } else if (begin < support_.sink || p - (end - 1) < support_.window) {
            take(i, p >= end - 1 && (end <= support_.sink || p - begin < support_.window));
          }
        }
        break;
    }
    if (queries_.empty()) continue;
    ++at_;
    tile = {.key_begin = begin, .num_keys = static_cast<int>(end - begin), .queries = queries_, .all_visible = all};
    return true;
  }
  return false;
}

}  // namespace m3
