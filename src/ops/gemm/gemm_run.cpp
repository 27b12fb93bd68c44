// Cuts a list of products into pieces and runs them on all threads.
#include <algorithm>
#include <vector>

#include "base/cpu_features.h"
#include "base/threads.h"
#include "ops/gemm/gemm_kernel.h"

namespace m3 {
namespace {

struct Piece {
  const GemmProblem* problem;
  bool few_rows;  // the path that does not pack
  int64_t m0, m1, n0, n1;
};

bool has_few_rows(const GemmProblem& p) {
  return p.m <= kGemmMaxRowsM && !p.a_transposed && !p.b_transposed;
}

const GemmKernel& kernel_for(const GemmProblem& p) {
  const CpuIsa isa = cpu_isa();
  if (isa >= CpuIsa::kAvx512Bf16 && p.a_type == GemmType::kBf16 && p.b_type != GemmType::kF32)
    return kGemmAvx512Bf16;
  if (isa >= CpuIsa::kAvx512) return kGemmAvx512;
  return isa >= CpuIsa::kAvx2 ? kGemmAvx2 : kGemmPortable;
}

// Few rows: pieces of about 128 KB of weights, so that threads that finish early find more.
void cut_rows(const GemmProblem& p, std::vector<Piece>& pieces) {
  const int64_t row_bytes = p.k * (p.b_type == GemmType::kF32    ? 4
                                   : p.b_type == GemmType::kBf16 ? 2
                                                                 : 1);
  const int64_t step =
      std::max<int64_t>(4, (int64_t{128} << 10) / std::max<int64_t>(row_bytes, 1) / 4 * 4);
  for (int64_t n = 0; n < p.n; n += step)
    pieces.push_back({&p, true, 0, p.m, n, std::min(p.n, n + step)});
}

struct BlockSize {
  int64_t m = kGemmBlockM, n = kGemmBlockN;
};

int64_t pieces_of(int64_t size, int64_t step) {
  return (size + step - 1) / step;
}

// The largest blocks that still give every thread about four pieces.
BlockSize choose_block(std::span<const GemmProblem> problems) {
  const auto count = [&](const BlockSize& block) {
    int64_t pieces = 0;
    for (const GemmProblem& p : problems) {
      if (!has_few_rows(p)) pieces += pieces_of(p.m, block.m) * pieces_of(p.n, block.n);
    }
    return pieces;
  };
  BlockSize block;
  while (block.n > 128 && count(block) < 4 * num_threads()) block.n /= 2;
  if (count(block) < 4 * num_threads()) block.m /= 3;
  return block;
}

// Columns first: neighbours share rows of x.
void cut_blocks(const GemmProblem& p, const BlockSize& block, std::vector<Piece>& pieces) {
  for (int64_t m = 0; m < p.m; m += block.m) {
    for (int64_t n = 0; n < p.n; n += block.n) {
      pieces.push_back({&p, false, m, std::min(p.m, m + block.m), n, std::min(p.n, n + block.n)});
    }
  }
}

}  // namespace

void gemm_run(std::span<const GemmProblem> problems) {
  const BlockSize block = choose_block(problems);
  std::vector<Piece> pieces;
  for (const GemmProblem& p : problems) {
    if (p.m == 0 || p.n == 0) continue;
    if (has_few_rows(p)) {
      cut_rows(p, pieces);
    } else {
      cut_blocks(p, block, pieces);
    }
  }
  parallel_for_dynamic(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    const Piece& piece = pieces[i];
    const GemmKernel& kernel = kernel_for(*piece.problem);
    if (piece.few_rows) {
      kernel.rows(*piece.problem, piece.n0, piece.n1);
    } else {
      kernel.block(*piece.problem, piece.m0, piece.m1, piece.n0, piece.n1);
    }
  });
}

}  // namespace m3
