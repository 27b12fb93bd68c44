#include "ops/qknorm_rope/qknorm_rope.h"

#include <cmath>
#include <vector>

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/qknorm_rope/qknorm_rope_kernel.h"

namespace m3 {
namespace {

// Both references compute 1 / theta^x and its product with the position in fp32; at positions near 10^6 the angle
// then carries a few 1e-2 rad of rounding that trained weights have seen, so nothing here is "improved" (§4.2).
std::vector<float> inverse_frequencies(int64_t count, int64_t dim, double theta) {
  std::vector<float> freqs(count);
  for (int64_t m = 0; m < count; ++m) {
    freqs[m] = 1.0f / std::pow(static_cast<float>(theta),
                               static_cast<float>(2 * m) / static_cast<float>(dim));
  }
  return freqs;
}

void put_angle(float angle, float* cos, float* sin) {
  *cos = static_cast<float>(std::cos(double{angle}));
  *sin = static_cast<float>(std::sin(double{angle}));
}

void check_tables(const Tensor& cos_TM, const Tensor& sin_TM, int64_t tokens) {
  M3_CHECK(cos_TM.rank() == 2 && cos_TM.dim(0) == tokens && sin_TM.shape() == cos_TM.shape(),
           "cos_TM and sin_TM must be [{}, M], got {} and {}", tokens, cos_TM.shape().str(),
           sin_TM.shape().str());
  check_on_cpu("cos_TM", cos_TM);
}

void run(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM, const Tensor& sin_TM,
         float eps, const Tensor& y_THD) {
  M3_CHECK(x_THD.rank() == 3, "x_THD must be [T, H, D], got {}", x_THD.shape().str());
  const int64_t T = x_THD.dim(0), H = x_THD.dim(1), D = x_THD.dim(2);
  check_float("x_THD", x_THD);
  check_float("y_THD", y_THD, x_THD.shape());
  check_tables(cos_TM, sin_TM, T);
  M3_CHECK(2 * cos_TM.dim(1) <= D, "cos_TM {} rotates more than the {} dims of a head",
           cos_TM.shape().str(), D);
  if (w_D.defined()) check_float("w_D", w_D, {D});
  const QknormRopeParams params = {x_THD.data(),
                                   w_D.data(),
                                   cos_TM.ptr<float>(),
                                   sin_TM.ptr<float>(),
                                   y_THD.data(),
                                   is_bf16(x_THD),
                                   is_bf16(w_D),
                                   is_bf16(y_THD),
                                   H,
                                   D,
                                   cos_TM.dim(1),
                                   eps};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? qknorm_rope_avx2 : qknorm_rope_portable;
  parallel_rows(T, H * D, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

QknormRopeBackwardParams backward_params(const Tensor& x_THD, const Tensor& w_D,
                                         const Tensor& cos_TM, const Tensor& sin_TM, float eps,
                                         const Tensor& dy_THD, const Tensor& dx_THD) {
  M3_CHECK(dy_THD.rank() == 3, "dy_THD must be [T, H, D], got {}", dy_THD.shape().str());
  const int64_t T = dy_THD.dim(0), H = dy_THD.dim(1), D = dy_THD.dim(2);
  M3_CHECK(D <= kMaxHeadDim, "dy_THD {} has heads of {} dims, the largest is {}",
           dy_THD.shape().str(), D, kMaxHeadDim);
  check_float("dy_THD", dy_THD);
  check_float("dx_THD", dx_THD, dy_THD.shape());
  check_tables(cos_TM, sin_TM, T);
  M3_CHECK(2 * cos_TM.dim(1) <= D, "cos_TM {} rotates more than the {} dims of a head",
           cos_TM.shape().str(), D);
  return {x_THD.data(),
          w_D.data(),
          cos_TM.ptr<float>(),
          sin_TM.ptr<float>(),
          dy_THD.data(),
          dx_THD.data(),
          is_bf16(x_THD),
          is_bf16(w_D),
          is_bf16(dy_THD),
          is_bf16(dx_THD),
          H,
          D,
          cos_TM.dim(1),
          eps};
}

}  // namespace

void rope_angles(const Tensor& pos_T, double theta, const Tensor& cos_TM, const Tensor& sin_TM,
                 Stream) {
  const int64_t T = pos_T.numel();
  check_tables(cos_TM, sin_TM, T);
  const int64_t M = cos_TM.dim(1);
  const std::vector<float> freqs = inverse_frequencies(M, 2 * M, theta);
  const int32_t* pos = pos_T.ptr<int32_t>();
  float *cos = cos_TM.ptr<float>(), *sin = sin_TM.ptr<float>();
  parallel_rows(
      T, M * 32,
      [&](int64_t begin, int64_t end) {  // an exact sine costs as much as 32 simple operations
        for (int64_t t = begin; t < end; ++t) {
          for (int64_t m = 0; m < M; ++m)
            put_angle(static_cast<float>(pos[t]) * freqs[m], cos + t * M + m, sin + t * M + m);
        }
      });
}

int64_t rope_3d_pairs(int64_t head_dim) {
  return 3 * (head_dim / 3 / 2);
}

void rope_angles_3d(const Tensor& pos_T3, int64_t head_dim, double theta, const Tensor& cos_TM,
                    const Tensor& sin_TM, Stream) {
  M3_CHECK(pos_T3.rank() == 2 && pos_T3.dim(1) == 3, "pos_T3 must be [T, 3], got {}",
           pos_T3.shape().str());
  const int64_t T = pos_T3.dim(0), M = rope_3d_pairs(head_dim), per_axis = M / 3;
  check_tables(cos_TM, sin_TM, T);
  M3_CHECK(cos_TM.dim(1) == M, "cos_TM must be [T, {}] for head dim {}, got {}", M, head_dim,
           cos_TM.shape().str());
  const std::vector<float> freqs = inverse_frequencies(per_axis, 2 * per_axis, theta);
  const int32_t* pos = pos_T3.ptr<int32_t>();
  float *cos = cos_TM.ptr<float>(), *sin = sin_TM.ptr<float>();
  parallel_rows(T, M * 32, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t m = 0; m < M; ++m) {
        const float angle = static_cast<float>(pos[t * 3 + m / per_axis]) * freqs[m % per_axis];
        put_angle(angle, cos + t * M + m, sin + t * M + m);
      }
    }
  });
}

void qknorm_rope(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM, const Tensor& sin_TM,
                 float eps, const Tensor& y_THD, Stream) {
  M3_CHECK(w_D.defined(), "w_D is absent: use rope() for a rotation without norm");
  run(x_THD, w_D, cos_TM, sin_TM, eps, y_THD);
}

void rope(const Tensor& x_THD, const Tensor& cos_TM, const Tensor& sin_TM, const Tensor& y_THD,
          Stream) {
  run(x_THD, {}, cos_TM, sin_TM, 0, y_THD);
}

void qknorm_rope_backward(const Tensor& x_THD, const Tensor& w_D, const Tensor& cos_TM,
                          const Tensor& sin_TM, float eps, const Tensor& dy_THD,
                          const Tensor& dx_THD, const Tensor& dw_D, Arena& scratch, Stream) {
  const QknormRopeBackwardParams params =
      backward_params(x_THD, w_D, cos_TM, sin_TM, eps, dy_THD, dx_THD);
  check_float("x_THD", x_THD, dy_THD.shape());
  check_float("w_D", w_D, {params.head_dim});
  check_shape("dw_D", dw_D, {params.head_dim});
  const auto kernel =
      cpu_isa() >= CpuIsa::kAvx2 ? qknorm_rope_backward_avx2 : qknorm_rope_backward_portable;
  const ArenaScope scope(scratch);
  const BlockSums sums(
      dy_THD.dim(0), params.head_dim, scratch,
      [&](int64_t begin, int64_t end, float* dw) { kernel(params, begin, end, dw); });
  sums.add_to(dw_D.ptr<float>(), 0, params.head_dim);
}

int64_t qknorm_rope_backward_scratch_bytes(int64_t num_tokens, int64_t head_dim) {
  return BlockSums::scratch_bytes(num_tokens, head_dim);
}

void rope_backward(const Tensor& dy_THD, const Tensor& cos_TM, const Tensor& sin_TM,
                   const Tensor& dx_THD, Stream) {
  const QknormRopeBackwardParams params =
      backward_params({}, {}, cos_TM, sin_TM, 0, dy_THD, dx_THD);
  const auto kernel =
      cpu_isa() >= CpuIsa::kAvx2 ? qknorm_rope_backward_avx2 : qknorm_rope_backward_portable;
  parallel_rows(dy_THD.dim(0), params.num_heads * params.head_dim,
                [&](int64_t begin, int64_t end) { kernel(params, begin, end, nullptr); });
}

}  // namespace m3
