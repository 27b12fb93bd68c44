// Exact and near duplicates of texts and pictures.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "media/image.h"

namespace m3::ingest {

// Texts by their words: lower-case runs of letters and digits. Near duplicates by MinHash over runs of five
// words (Broder 1997), candidates by 16 bands of 4 values, then the share of equal values among 64.
class TextDedup {
 public:
  explicit TextDedup(double near_share = 0.8) : near_share_(near_share) {}

  enum class Verdict { kNew, kExact, kNear };
  // Compares with every text added before, and adds this one if it is new.
  Verdict add(std::string_view text);

 private:
  static constexpr int kHashes = 64, kBands = 16, kRows = kHashes / kBands;
  using Signature = std::array<uint32_t, kHashes>;
  static std::vector<uint64_t> shingles(std::string_view text);
  static Signature sign(const std::vector<uint64_t>& shingles);

  double near_share_;
  std::unordered_set<uint64_t> exact_;  // hash of all words
  std::vector<Signature> signatures_;
  std::unordered_map<uint64_t, std::vector<uint32_t>> bands_;
};

// 64 bits: is each of 8 x 8 areas brighter than its right neighbour (difference hash)? Scaled or recompressed
// copies differ in a few bits.
uint64_t perceptual_hash(const Image& image);

// Finds pictures within `max_distance` bits of one added before.
class PictureIndex {
 public:
  explicit PictureIndex(int max_distance = 5) : max_distance_(max_distance) {}
  // The number given to the first near picture, if there is one; adds this one otherwise.
  std::optional<uint32_t> find_or_add(uint64_t hash, uint32_t number);

 private:
  int max_distance_;
  std::vector<std::pair<uint64_t, uint32_t>> entries_;
};

}  // namespace m3::ingest
