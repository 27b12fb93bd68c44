#include "ops/adamw/adamw.h"

#include <cmath>
#include <vector>

#include "base/cpu_features.h"
#include "base/threads.h"
#include "ops/adamw/adamw_kernel.h"
#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/common/values.h"

namespace m3 {

void adamw(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v, const Tensor& copy,
           const AdamW& config, Stream) {
  check_float("w", w);
  check_float("g", g, w.shape());
  check_float("m", m, w.shape());
  check_float("v", v, w.shape());
  M3_CHECK(config.step >= 1, "step is {}: the first update is step 1", config.step);
  if (copy.defined()) {
    check_shape("copy", copy, w.shape());
    M3_CHECK(is_bf16(copy), "copy must be bf16, got {}", dtype_name(copy.dtype()));
  }
  const auto correction = [&](float beta) {
    return static_cast<float>(1 / (1 - std::pow(double{beta}, static_cast<double>(config.step))));
  };
  const AdamWParams params = {w.ptr<float>(),
                              g.ptr<float>(),
                              m.data(),
                              v.data(),
                              copy.data(),
                              is_bf16(m),
                              is_bf16(v),
                              config.lr,
                              config.beta1,
                              config.beta2,
                              config.eps,
                              config.weight_decay,
                              config.grad_factor,
                              correction(config.beta1),
                              correction(config.beta2)};
  const auto kernel = cpu_isa() >= CpuIsa::kAvx2 ? adamw_avx2 : adamw_portable;
  parallel_rows(w.numel(), 4, [&](int64_t begin, int64_t end) { kernel(params, begin, end); });
}

void adamw_ref(const Tensor& w, const Tensor& g, const Tensor& m, const Tensor& v,
               const Tensor& copy, const AdamW& config) {
  const double beta1 = config.beta1, beta2 = config.beta2, step = static_cast<double>(config.step);
  for (int64_t i = 0; i < w.numel(); ++i) {
    const double gradient = value_at(g, i) * config.grad_factor;
    const double first = beta1 * value_at(m, i) + (1 - beta1) * gradient;
    const double second = beta2 * value_at(v, i) + (1 - beta2) * gradient * gradient;
    const double direction = first / (1 - std::pow(beta1, step)) /
                             (std::sqrt(second / (1 - std::pow(beta2, step))) + config.eps);
    set_value(m, i, first);
    set_value(v, i, second);
    set_value(w, i,
              value_at(w, i) - config.lr * (direction + config.weight_decay * value_at(w, i)));
    if (copy.defined()) set_value(copy, i, value_at(w, i));
  }
}

double grad_sum_of_squares(const Tensor& g) {
  constexpr int64_t kBlock = 4096;
  const float* values = g.ptr<float>();
  const int64_t count = g.numel(), blocks = (count + kBlock - 1) / kBlock;
  std::vector<double> sums(blocks);
  parallel_for(blocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      double part[4] = {};  // four chains: a single one waits for its own additions
      const int64_t last = std::min(count, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < last; ++i) part[i & 3] += double{values[i]} * values[i];
      sums[block] = (part[0] + part[1]) + (part[2] + part[3]);
    }
  });
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

float clip_factor(double norm, double clip) {
  M3_CHECK(std::isfinite(norm), "the gradient norm is {}: this step must not be taken", norm);
  return clip > 0 && norm > clip ? static_cast<float>(clip / norm) : 1.0f;
}

}  // namespace m3
