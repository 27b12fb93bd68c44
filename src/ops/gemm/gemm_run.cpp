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

bool has_few_rows(const GemmProblem& p) { return p.m <= kGemmMaxRowsM && !p.a_transposed && !p.b_transposed; }

const GemmKernel& kernel_for(const GemmProblem& p) {
  const CpuIsa isa = cpu_isa();
  if (isa >= CpuIsa::kAvx512Bf16 && p.a_type == GemmType::kBf16 && p.b_type != GemmType::kF32) return kGemmAvx512Bf16;
  if (isa >= CpuIsa::kAvx512) return kGemmAvx512;
  return isa >= CpuIsa::kAvx2 ? kGemmAvx2 : kGemmPortable;
}

// Few rows: pieces of about 128 KB of weights, so that threads that finish early find more.
void cut_rows(const GemmProblem& p, std::vector<Piece>& pieces) {
  const int64_t row_bytes = p.k * (p.b_type == GemmType::kF32 ? 4 : p.b_type == GemmType::kBf16 ? 2 : 1);
  const int64_t step = std::max<int64_t>(4, (int64_t{128} << 10) / std::max<int64_t>(row_bytes, 1) / 4 * 4);
  for (int64_t n = 0; n < p.n; n += step) pieces.push_back({&p, true, 0, p.m, n, std::min(p.n, n + step)});
}

// Columns first: neighbours share rows of x. `block_m` may be smaller than kGemmBlockM to feed every thread.
void cut_blocks(const GemmProblem& p, int64_t block_m, std::vector<Piece>& pieces) {
  for (int64_t m = 0; m < p.m; m += block_m) {
    for (int64_t n = 0; n < p.n; n += kGemmBlockN) {
      pieces.push_back({&p, false, m, std::min(p.m, m + block_m), n, std::min(p.n, n + kGemmBlockN)});
    }
  }
}

int64_t choose_block_m(std::span<const GemmProblem> problems) {
  int64_t columns = 0, max_m = 0;
  for (const GemmProblem& p : problems) {
    columns += has_few_rows(p) ? 0 : (p.n + kGemmBlockN - 1) / kGemmBlockN;
    max_m = std::max(max_m, p.m);
  }
  int64_t block_m = kGemmBlockM;
  while (block_m > 48 && columns * ((max_m + block_m - 1) / block_m) < 4 * num_threads()) block_m /= 2;
  return block_m;
}

}  // namespace

void gemm_run(std::span<const GemmProblem> problems) {
  const int64_t block_m = choose_block_m(problems);
  std::vector<Piece> pieces;
  for (const GemmProblem& p : problems) {
    if (p.m == 0 || p.n == 0) continue;
    if (has_few_rows(p)) {
      cut_rows(p, pieces);
    } else {
      cut_blocks(p, block_m, pieces);
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
