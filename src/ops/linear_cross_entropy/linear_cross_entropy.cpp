#include "ops/linear_cross_entropy/linear_cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/cpu_features.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/gemm/gemm.h"
#include "ops/linear_cross_entropy/linear_cross_entropy_kernel.h"

namespace m3 {
namespace {

int64_t chunk_rows(int64_t num_rows, int64_t vocab) {
  constexpr int64_t kLogitBytes = int64_t{32} << 20;
  return std::min(num_rows, std::max<int64_t>(64, kLogitBytes / (4 * std::max<int64_t>(vocab, 1))));
}

struct Kernels {
  LceLogSum log_sum;
  LceSoftmax softmax;
};
Kernels kernels() {
  const CpuIsa isa = cpu_isa();
  if (isa >= CpuIsa::kAvx512) return {lce_log_sum_avx512, lce_softmax_avx512};
  if (isa >= CpuIsa::kAvx2) return {lce_log_sum_avx2, lce_softmax_avx2};
  return {lce_log_sum_portable, lce_softmax_portable};
}

// A row of dz: factor · (softmax · (1 + 2 ζ logZ) − onehot); `factor` is the row's.
template <class T>
void put_gradient(const Kernels& run, const float* z, int64_t num_ids, int64_t vocab,
                  int32_t target, double logz, float factor, float z_weight, T* dz) {
  const float scale = factor * static_cast<float>(1 + 2 * z_weight * logz);
  // The target's element before z is overwritten: p − 1 would lose the small gradient of a sure prediction twice.
  const float p = static_cast<float>(std::exp(double{z[target]} - logz));
  run.softmax(z, num_ids, static_cast<float>(logz), scale, dz, sizeof(T) == 2);
  round_to(scale * p - factor, dz + target);
  for (int64_t v = num_ids; v < vocab; ++v) round_to(0.0f, dz + v);
}

}  // namespace

void linear_cross_entropy(const Tensor& h_NC, const Tensor& w_VC, const Tensor& targets_N,
                          const LinearCrossEntropy& config, const Tensor& loss_N,
                          const Tensor& logz_N, const Tensor& dh_NC, const Tensor& dw_VC,
                          Arena& scratch, Stream) {
  M3_CHECK(h_NC.rank() == 2 && w_VC.rank() == 2, "h_NC and w_VC must have two axes, got {} and {}",
           h_NC.shape().str(), w_VC.shape().str());
  const int64_t N = h_NC.dim(0), V = w_VC.dim(0), num_ids = config.num_ids > 0 ? config.num_ids : V;
  M3_CHECK(num_ids <= V, "num_ids is {}, the head has {} rows", num_ids, V);
  for (auto [name, tensor] : {std::pair<const char*, const Tensor*>{"targets_N", &targets_N},
                              {"loss_N", &loss_N},
                              {"logz_N", &logz_N}}) {
    check_shape(name, *tensor, {N});
  }
  M3_CHECK(dh_NC.defined() == dw_VC.defined(), "dh_NC and dw_VC must be given both or not at all");
  if (config.weights_N.defined()) check_shape("weights_N", config.weights_N, {N});
  if (config.argmax_N.defined()) check_shape("argmax_N", config.argmax_N, {N});
  const float* weights = config.weights_N.defined() ? config.weights_N.ptr<float>() : nullptr;
  int32_t* argmax = config.argmax_N.defined() ? config.argmax_N.ptr<int32_t>() : nullptr;
  const bool backward = dh_NC.defined();
  if (backward) check_float("dh_NC", dh_NC, h_NC.shape());
  const int32_t* targets = targets_N.ptr<int32_t>();
  for (int64_t n = 0; n < N; ++n) {
    M3_CHECK(0 <= targets[n] && targets[n] < num_ids, "targets_N[{}] is {}, want 0 to {}", n,
             targets[n], num_ids - 1);
  }

  const ArenaScope scope(scratch);
  const int64_t rows = chunk_rows(N, V);
  const Tensor logits = scratch.alloc("logits of a chunk", DType::kF32, {rows, V});
  const bool bf16_gradient = is_bf16(h_NC) && is_bf16(w_VC);
  const Tensor gradient = backward && bf16_gradient
                              ? scratch.alloc("logit gradients of a chunk", DType::kBF16, {rows, V})
                              : logits;
  const Kernels run = kernels();
  for (int64_t first = 0; first < N; first += rows) {
    const int64_t count = std::min(rows, N - first);
    const Tensor h = h_NC.rows(first, first + count), z = logits.rows(0, count),
                 dz = gradient.rows(0, count);
    gemm(h, w_VC, {}, z, {}, scratch);
    parallel_rows(count, 8 * V, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float* row = z.ptr<float>() + i * V;
        const int64_t n = first + i;
        const double logz = run.log_sum(row, num_ids);
        logz_N.ptr<float>()[n] = static_cast<float>(logz);
        loss_N.ptr<float>()[n] = static_cast<float>(logz - row[targets[n]]);
        if (argmax != nullptr) {
          argmax[n] = static_cast<int32_t>(std::max_element(row, row + num_ids) - row);
        }
        if (!backward) continue;
        const float factor = weights != nullptr ? config.factor * weights[n] : config.factor;
        mutable_float(dz, [&](auto* out) {
          put_gradient(run, row, num_ids, V, targets[n], logz, factor, config.z_weight, out + i * V);
        });
      }
    });
    if (!backward) continue;
    gemm_backward_x(dz, w_VC, dh_NC.rows(first, first + count), {}, scratch);
    gemm_backward_w(dz, h, dw_VC, {}, {.accumulate = true}, scratch);
  }
}

int64_t linear_cross_entropy_scratch_bytes(int64_t num_rows, int64_t vocab) {
  return chunk_rows(num_rows, vocab) * vocab * 6 + 2 * Arena::kAlignment;
}

}  // namespace m3
