// A row's best (score, block) pairs in registers, best first: score descending, then block
// ascending.
#pragma once
#include <cstdint>

namespace m3 {

template <int kLength>
struct TopkList {
  float score[kLength];
  int32_t id[kLength];  // -1: free

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kLength; ++j) {
      score[j] = -INFINITY;
      id[j] = -1;
    }
  }

  // What a newcomer must reach.
  __device__ __forceinline__ float threshold() const {
    return score[kLength - 1];
  }

  // For blocks that come in descending order: equal scores give way to the newcomer, whose id is
  // lower. Five instructions per place, no branches.
  __device__ __forceinline__ void insert_lower_id(float s, int32_t b) {
#pragma unroll
    for (int j = kLength - 1; j > 0; --j) {
      const bool beats_this = s >= score[j], beats_next = s >= score[j - 1];
      score[j] = fmaxf(fminf(score[j - 1], s), score[j]);
      id[j] = beats_next ? id[j - 1] : (beats_this ? b : id[j]);
    }
    if (s >= score[0]) {
      score[0] = s;
      id[0] = b;
    }
  }

  // Any order of arrival.
  __device__ __forceinline__ void insert(float s, int32_t b) {
#pragma unroll
    for (int j = kLength - 1; j >= 0; --j) {
      const bool beats_this = before(s, b, score[j], id[j]);
      const bool beats_next =
          j > 0 && before(s, b, score[j > 0 ? j - 1 : 0], id[j > 0 ? j - 1 : 0]);
      if (beats_next) {
        score[j] = score[j > 0 ? j - 1 : 0];
        id[j] = id[j > 0 ? j - 1 : 0];
      } else if (beats_this) {
        score[j] = s;
        id[j] = b;
      }
    }
  }

  __device__ __forceinline__ void pop_front() {
#pragma unroll
    for (int j = 0; j + 1 < kLength; ++j) {
      score[j] = score[j + 1];
      id[j] = id[j + 1];
    }
    score[kLength - 1] = -INFINITY;
    id[kLength - 1] = -1;
  }

  static __device__ __forceinline__ bool before(float s, int32_t b, float other, int32_t other_id) {
    return other_id < 0 || s > other || (s == other && b < other_id);
  }
};

// Ascending sort of kLength registers; odd-even transposition keeps every index a compile-time
// constant.
template <int kLength>
__device__ __forceinline__ void sort_ascending(int32_t (&id)[kLength]) {
#pragma unroll
  for (int round = 0; round < kLength; ++round) {
#pragma unroll
    for (int j = round % 2; j + 1 < kLength; j += 2) {
      const int32_t low = min(id[j], id[j + 1]);
      id[j + 1] = max(id[j], id[j + 1]);
      id[j] = low;
    }
  }
}

}  // namespace m3
