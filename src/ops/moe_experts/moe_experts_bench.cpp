// The MoE of benchmarks/workloads/cpu_270m_config.json: 16 experts of width 512, top 4, and a shared one; hidden 1024.
#include <benchmark/benchmark.h>

#include <vector>

#include "base/rng.h"
#include "ops/moe_experts/moe_experts.h"

namespace m3 {
namespace {

constexpr int64_t kExperts = 16, kTopK = 4, kHidden = 1024, kWidth = 512;

// Args: tokens. Decode (1 token) is bound by reading 15.7 MB of weights, prefill by arithmetic.
void moe_experts_bf16_weights(benchmark::State& state) {
  const int64_t T = state.range(0), matrix = kHidden * kWidth;
  Philox rng(1);
  std::vector<bf16> weights((kExperts + 1) * 3 * matrix);
  for (bf16& w : weights) w = bf16(static_cast<float>(0.03 * rng.normal()));
  std::vector<ExpertWeights> experts;
  const auto view = [&](int64_t index, int64_t out, int64_t in) {
    return Weight(Tensor(weights.data() + index * matrix, DType::kBF16, {out, in}));
  };
  for (int64_t e = 0; e <= kExperts; ++e) {
    experts.push_back({view(3 * e, kWidth, kHidden), view(3 * e + 1, kWidth, kHidden),
                       view(3 * e + 2, kHidden, kWidth)});
  }
  std::vector<float> h(T * kHidden), y(T * kHidden), factors(T * kTopK, 0.25f);
  std::vector<int32_t> ids(T * kTopK);
  for (float& x : h) x = static_cast<float>(rng.normal());
  for (int64_t s = 0; s < T * kTopK; ++s) {
    ids[s] = static_cast<int32_t>((rng.below(4) * 4 + s % kTopK) % kExperts);
  }
  Arena scratch("bench", moe_experts_scratch_bytes(T, kTopK, kHidden, kWidth, kWidth));
  const MoeExperts moe = {std::span(experts).first(kExperts), &experts[kExperts], 2.0f, {}};
  for (auto _ : state) {
    moe_experts(Tensor(h.data(), DType::kF32, {T, kHidden}),
                Tensor(ids.data(), DType::kI32, {T, kTopK}),
                Tensor(factors.data(), DType::kF32, {T, kTopK}), moe,
                Tensor(y.data(), DType::kF32, {T, kHidden}), scratch);
  }
  const double flop = 2.0 * static_cast<double>(T * (kTopK + 1) * 3 * matrix);
  state.counters["GFLOP/s"] =
      benchmark::Counter(1e-9 * flop, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(moe_experts_bf16_weights)->Arg(1)->Arg(8)->Arg(64)->Arg(512)->Arg(2048)->UseRealTime();

}  // namespace
}  // namespace m3
