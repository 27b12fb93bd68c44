// Products of the model in benchmarks/workloads/cpu_270m_config.json: GFLOP/s for prefill, GB/s of weights for decode.
#include <benchmark/benchmark.h>

#include <vector>

#include "base/rng.h"
#include "ops/gemm/gemm.h"

namespace m3 {
namespace {

std::vector<float> normals(int64_t count) {
  std::vector<float> values(count);
  Philox rng(1);
  for (float& v : values) v = static_cast<float>(rng.normal());
  return values;
}

// Args: M, N, K. Weights rotate over 96 MB, so that decode reads them from memory as a whole model does.
void gemm_bf16_weights(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  const int64_t copies = std::max<int64_t>(1, (int64_t{96} << 20) / (n * k * 2));
  const std::vector<float> x = normals(m * k), w = normals(n * k);
  std::vector<bf16> weights(copies * n * k);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = bf16(w[i % w.size()]);
  std::vector<float> y(m * n);
  Arena scratch("bench", 16 << 20);
  int64_t turn = 0;
  for (auto _ : state) {
    const Tensor w_NK(weights.data() + turn++ % copies * n * k, DType::kBF16, {n, k});
    gemm(Tensor(const_cast<float*>(x.data()), DType::kF32, {m, k}), w_NK, {},
         Tensor(y.data(), DType::kF32, {m, n}), {}, scratch);
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * m * n * k, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["weight GB/s"] =
      benchmark::Counter(2e-9 * n * k, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(gemm_bf16_weights)
    ->ArgsProduct({{512}, {4096}, {1024}})  // q
    ->ArgsProduct({{512}, {1024}, {4096}})  // o
    ->ArgsProduct({{128}, {512}, {1024}})   // one expert of 512 tokens, top 4 of 16
    ->ArgsProduct({{128}, {1024}, {512}})
    ->ArgsProduct({{1, 2, 4, 8, 16, 64}, {4096}, {1024}})
    ->UseRealTime();

// Args: M, N, K, batch_invariant. f32 weights, as oneDNN (0) takes them, against our kernels (1).
void gemm_f32_weights(benchmark::State& state) {
  const int64_t m = state.range(0), n = state.range(1), k = state.range(2);
  std::vector<float> x = normals(m * k), w = normals(n * k), y(m * n);
  Arena scratch("bench", 1 << 20);
  for (auto _ : state) {
    gemm(Tensor(x.data(), DType::kF32, {m, k}), Tensor(w.data(), DType::kF32, {n, k}), {},
         Tensor(y.data(), DType::kF32, {m, n}), {.batch_invariant = state.range(3) != 0}, scratch);
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * m * n * k, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(gemm_f32_weights)
    ->ArgsProduct({{512}, {1024}, {1024}, {0, 1}})
    ->ArgsProduct({{128}, {512}, {1024}, {0, 1}})
    ->ArgsProduct({{2048}, {2048}, {2048}, {0, 1}})
    ->UseRealTime();

}  // namespace
}  // namespace m3
