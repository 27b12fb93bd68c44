#include "ops/moe_router/moe_router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/gemm/gemm.h"

namespace m3 {

void moe_choose(const float* scores_E, const float* bias_E, int64_t num_experts, int64_t top_k,
                int32_t* ids_K, float* weights_K) {
  const auto key = [&](int32_t e) {
    const float value = scores_E[e] + bias_E[e];
    return std::isnan(value) ? -std::numeric_limits<float>::infinity() : value;
  };
  // Insertion into a short falling list; a later expert passes an earlier one only if it is larger.
  for (int64_t count = 0; count < num_experts; ++count) {
    const int32_t e = static_cast<int32_t>(count);
    int64_t at = std::min(count, top_k);
    while (at > 0 && key(ids_K[at - 1]) < key(e)) --at;
    if (at == top_k) continue;
    for (int64_t j = std::min(count, top_k - 1); j > at; --j) ids_K[j] = ids_K[j - 1];
    ids_K[at] = e;
  }
  std::sort(ids_K, ids_K + top_k);
  float sum = 0;
  for (int64_t j = 0; j < top_k; ++j) sum += scores_E[ids_K[j]];
  // Every chosen sigmoid may be 0 in fp32 (logits below -104): equal shares instead of 0 / 0.
  for (int64_t j = 0; j < top_k; ++j) {
    weights_K[j] = sum == 0 ? 1.0f / static_cast<float>(top_k) : scores_E[ids_K[j]] / sum;
  }
}

void moe_router(const Tensor& h_TC, const Tensor& gate_EC, const Tensor& bias_E,
                const Tensor& scores_TE, const Tensor& ids_TK, const Tensor& weights_TK,
                Arena& scratch, Stream) {
  M3_CHECK(h_TC.rank() == 2 && gate_EC.rank() == 2 && ids_TK.rank() == 2,
           "h_TC, gate_EC and ids_TK must have two axes, got {}, {} and {}", h_TC.shape().str(),
           gate_EC.shape().str(), ids_TK.shape().str());
  const int64_t T = h_TC.dim(0), E = gate_EC.dim(0), K = ids_TK.dim(1);
  M3_CHECK(1 <= K && K <= E, "ids_TK {} asks for {} of {} experts", ids_TK.shape().str(), K, E);
  check_float("bias_E", bias_E, {E});
  check_shape("ids_TK", ids_TK, {T, K});
  check_shape("weights_TK", weights_TK, {T, K});
  check_shape("scores_TE", scores_TE, {T, E});
  gemm(h_TC, gate_EC, {}, scores_TE, {}, scratch);

  std::vector<float> bias(E);
  with_float(bias_E, [&](const auto* values) {
    for (int64_t e = 0; e < E; ++e) bias[e] = to_float(values[e]);
  });
  float *scores = scores_TE.ptr<float>(), *weights = weights_TK.ptr<float>();
  int32_t* ids = ids_TK.ptr<int32_t>();
  parallel_rows(T, E * 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * E; i < end * E; ++i) scores[i] = 1.0f / (1.0f + std::exp(-scores[i]));
    for (int64_t t = begin; t < end; ++t) {
      moe_choose(scores + t * E, bias.data(), E, K, ids + t * K, weights + t * K);
    }
  });
}

int64_t moe_router_scratch_bytes(int64_t num_tokens, int64_t num_experts, int64_t hidden) {
  return gemm_scratch_bytes(num_tokens, num_experts, hidden);
}

}  // namespace m3
