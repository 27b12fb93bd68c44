#include "ops/common/msa_partials.h"

#include <algorithm>
#include <vector>

#include "base/threads.h"

namespace m3 {

namespace {

constexpr int64_t kPieceQueries = 256;  // query rows of a piece, about
constexpr int64_t kMaxPieces = 8;       // of a sequence and group: bounds the memory of the partial sums

}  // namespace

MsaPieces msa_cut(const MsaBatch& batch, int groups, int64_t floats_per_key, std::span<const uint8_t> takes_part) {
  MsaPieces pieces;
  for (int n = 0; n < batch.num_seqs; ++n) {
    if (!takes_part.empty() && takes_part[n] == 0) {
      pieces.left_out.push_back(n);
      continue;
    }
    const int64_t queries = batch.q_len(n);
    const int64_t count = std::min(kMaxPieces, (queries + kPieceQueries - 1) / kPieceQueries);
    for (int r = 0; r < groups; ++r) {
      for (int64_t i = 0; i < count; ++i) {
        MsaPiece piece{.seq = n, .group = r};
        piece.q_begin = static_cast<int32_t>(queries * i / count);
        piece.q_end = static_cast<int32_t>(queries * (i + 1) / count);
        piece.num_keys = std::max<int64_t>(0, batch.first_position(n) + piece.q_end);
        piece.partial_begin = pieces.partial_floats;
        pieces.partial_floats += piece.num_keys * floats_per_key;
        pieces.items.push_back(piece);
      }
    }
  }
  return pieces;
}

void msa_sum_partials(const MsaBatch& batch, std::span<const MsaPartial> partials, int64_t stride, const Tensor& out,
                      int64_t heads, int64_t head) {
  const int64_t num_rows = out.dim(0), dim = out.dim(out.rank() - 1);
  parallel_for(num_rows, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(dim);
    // Partials whose key rows begin at or before the current row and may still cover it: [first, last).
    size_t first = 0, last = 0;
    for (int64_t s = begin; s < end; ++s) {
      while (last < partials.size() && batch.k_begin(partials[last].seq) <= s) ++last;
      const auto covers = [&](const MsaPartial& p) { return s - batch.k_begin(p.seq) < p.num_keys; };
      while (first < last && !covers(partials[first])) {
        // A later partial of the same document may be longer: skip only if none of them covers the row.
        size_t next = first;
        const int64_t document = batch.k_begin(partials[first].seq);
        while (next < last && batch.k_begin(partials[next].seq) == document && !covers(partials[next])) ++next;
        if (next < last && batch.k_begin(partials[next].seq) == document) break;
        first = next;
      }
      std::fill(sum.begin(), sum.end(), 0.0f);
      for (size_t i = first; i < last; ++i) {
        if (!covers(partials[i])) continue;
        const float* from = partials[i].rows + (s - batch.k_begin(partials[i].seq)) * stride;
        for (int64_t c = 0; c < dim; ++c) sum[c] += from[c];
      }
      const int64_t to = (s * heads + head) * dim;
      if (out.dtype() == DType::kF32) {
        std::copy(sum.begin(), sum.end(), out.ptr<float>() + to);
      } else {
        for (int64_t c = 0; c < dim; ++c) out.ptr<bf16>()[to + c] = bf16(sum[c]);
      }
    }
  });
}

}  // namespace m3
