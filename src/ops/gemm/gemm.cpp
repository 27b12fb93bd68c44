// Checks, and the translation of each entry point into GemmProblem.
#include "ops/gemm/gemm.h"

#include <algorithm>
#include <vector>

#include "base/fp8.h"
#include "base/threads.h"
#include "ops/common/checks.h"
#include "ops/common/values.h"
#include "ops/gemm/gemm_onednn.h"
#include "ops/gemm/gemm_problem.h"

namespace m3 {
namespace {

GemmType gemm_type(const char* name, const Tensor& t) {
  check_float(name, t);
  return t.dtype() == DType::kF32 ? GemmType::kF32 : GemmType::kBf16;
}

void set_weight(GemmProblem& p, const Weight& w) {
  M3_CHECK(w.defined() && w.values.rank() == 2, "W_NK must be [N, K], got {}",
           w.values.shape().str());
  check_on_cpu("W_NK", w.values);
  p.b = w.values.data();
  if (w.values.dtype() != DType::kE4M3) {
    p.b_type = gemm_type("W_NK", w.values);
    return;
  }
  M3_CHECK(w.num_in() % kMxBlock == 0, "W_NK is e4m3 with K = {}, want a multiple of {}",
           w.num_in(), kMxBlock);
  check_shape("scales of W_NK", w.scales, {w.num_out(), w.num_in() / kMxBlock});
  p.b_type = GemmType::kE4m3;
  p.b_scales = w.scales.ptr<uint8_t>();
}

void set_result(GemmProblem& p, const char* name, const Tensor& y, int64_t rows, int64_t cols,
                const GemmOptions& options) {
  check_shape(name, y, {rows, cols});
  p.c = y.data();
  p.c_type = gemm_type(name, y);
  p.accumulate = options.accumulate;
  M3_CHECK(!options.accumulate || p.c_type == GemmType::kF32,
           "{} must be f32 to accumulate, got {}", name, dtype_name(y.dtype()));
}

void run(std::span<const GemmProblem> problems, const GemmOptions& options) {
  if (options.batch_invariant) {
    gemm_run(problems);
    return;
  }
  std::vector<GemmProblem> rest;
  for (const GemmProblem& p : problems) {
    if (!onednn_gemm(p)) rest.push_back(p);
  }
  gemm_run(rest);
}

// db[n] (+)= Σ_m dy[m, n], in fp32 with m ascending.
void column_sums(const Tensor& dy, const Tensor& db, bool accumulate) {
  const int64_t M = dy.dim(0), N = dy.dim(1);
  float* out = db.ptr<float>();
  parallel_for(N, [&](int64_t begin, int64_t end) {
    if (!accumulate) std::fill(out + begin, out + end, 0.0f);
    with_float(dy, [&](const auto* values) {
      for (int64_t m = 0; m < M; ++m) {
        for (int64_t n = begin; n < end; ++n) out[n] += to_float(values[m * N + n]);
      }
    });
  });
}

}  // namespace

GemmProblem gemm_problem(const Tensor& x_MK, const int32_t* x_rows, const Weight& w_NK,
                         const Tensor& bias_N, const Tensor& y_MN, const GemmOptions& options) {
  GemmProblem p;
  M3_CHECK(x_MK.rank() == 2, "x_MK must be [M, K], got {}", x_MK.shape().str());
  p.a = x_MK.data();
  p.a_rows = x_rows;
  p.a_type = gemm_type("x_MK", x_MK);
  set_weight(p, w_NK);
  M3_CHECK(x_MK.dim(1) == w_NK.num_in(), "x_MK is {} but W_NK is {}: K differs", x_MK.shape().str(),
           w_NK.values.shape().str());
  p.m = x_rows != nullptr ? y_MN.dim(0) : x_MK.dim(0);
  p.k = x_MK.dim(1);
  p.n = w_NK.num_out();
  if (bias_N.defined()) {
    check_shape("bias_N", bias_N, {p.n});
    p.bias = bias_N.data();
    p.bias_type = gemm_type("bias_N", bias_N);
  }
  set_result(p, "y_MN", y_MN, p.m, p.n, options);
  return p;
}

void gemm_shared_input(const Tensor& x_MK, std::span<const GemmOutput> outputs,
                       const GemmOptions& options, Arena&, Stream) {
  std::vector<GemmProblem> problems;
  problems.reserve(outputs.size());
  for (const GemmOutput& out : outputs) {
    problems.push_back(gemm_problem(x_MK, nullptr, out.w_NK, out.bias_N, out.y_MN, options));
  }
  run(problems, options);
}

void gemm(const Tensor& x_MK, const Weight& w_NK, const Tensor& bias_N, const Tensor& y_MN,
          const GemmOptions& options, Arena&, Stream) {
  const GemmProblem problem = gemm_problem(x_MK, nullptr, w_NK, bias_N, y_MN, options);
  run({&problem, 1}, options);
}

void gemm_backward_x(const Tensor& dy_MN, const Weight& w_NK, const Tensor& dx_MK,
                     const GemmOptions& options, Arena&, Stream) {
  GemmProblem p;
  set_weight(p, w_NK);
  M3_CHECK(p.b_type != GemmType::kE4m3,
           "W_NK {} is e4m3: MXFP8 weights are for inference, train from bf16 or f32",
           w_NK.values.shape().str());
  M3_CHECK(dy_MN.rank() == 2 && dy_MN.dim(1) == w_NK.num_out(),
           "dy_MN is {} but W_NK is {}: N differs", dy_MN.shape().str(), w_NK.values.shape().str());
  p.a = dy_MN.data();
  p.a_type = gemm_type("dy_MN", dy_MN);
  p.b_transposed = true;
  p.m = dy_MN.dim(0);
  p.n = w_NK.num_in();
  p.k = w_NK.num_out();
  set_result(p, "dx_MK", dx_MK, p.m, p.n, options);
  run({&p, 1}, options);
}

void gemm_backward_w(const Tensor& dy_MN, const Tensor& x_MK, const Tensor& dw_NK,
                     const Tensor& db_N, const GemmOptions& options, Arena&, Stream) {
  M3_CHECK(dy_MN.rank() == 2 && x_MK.rank() == 2 && dy_MN.dim(0) == x_MK.dim(0),
           "dy_MN is {} but x_MK is {}: M differs", dy_MN.shape().str(), x_MK.shape().str());
  M3_CHECK(dw_NK.dtype() == DType::kF32, "dW_NK must be f32, got {}", dtype_name(dw_NK.dtype()));
  GemmProblem p;
  p.a = dy_MN.data();
  p.a_type = gemm_type("dy_MN", dy_MN);
  p.a_transposed = true;
  p.b = x_MK.data();
  p.b_type = gemm_type("x_MK", x_MK);
  p.b_transposed = true;
  p.m = dy_MN.dim(1);
  p.n = x_MK.dim(1);
  p.k = dy_MN.dim(0);
  set_result(p, "dW_NK", dw_NK, p.m, p.n, options);
  run({&p, 1}, options);
  if (!db_N.defined()) return;
  check_shape("db_N", db_N, {p.m});
  column_sums(dy_MN, db_N, options.accumulate);
}

int64_t gemm_scratch_bytes(int64_t, int64_t, int64_t) {
  return 0;
}  // the CPU packs on its threads' stacks

}  // namespace m3
