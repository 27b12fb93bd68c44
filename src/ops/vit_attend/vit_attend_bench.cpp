// One layer of the released vision tower: 16 heads of 80 dims, one segment of a 448 x 448 picture (1,024 patches) and
// of the largest one (2,304).
#include <benchmark/benchmark.h>

#include <vector>

#include "base/rng.h"
#include "ops/vit_attend/vit_attend.h"

namespace m3 {
namespace {

void vit_attend_f32(benchmark::State& state) {
  const int64_t T = state.range(0), H = 16, D = 80;
  Philox rng(1);
  std::vector<float> qkv(3 * T * H * D), o(T * H * D);
  for (float& x : qkv) x = static_cast<float>(rng.normal());
  const auto part = [&](int64_t i) { return Tensor(qkv.data() + i * T * H * D, DType::kF32, {T, H, D}); };
  const std::vector<int32_t> cu = {0, static_cast<int32_t>(T)};
  Arena scratch("bench", vit_attend_scratch_bytes(T, H, D));
  for (auto _ : state) {
    vit_attend(part(0), part(1), part(2), cu, 0.1118f, Tensor(o.data(), DType::kF32, {T, H, D}), {}, scratch);
  }
  const double flop = 4.0 * static_cast<double>(T * T * H * D);
  state.counters["GFLOP/s"] = benchmark::Counter(1e-9 * flop, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(vit_attend_f32)->Arg(1024)->Arg(2304)->UseRealTime();

}  // namespace
}  // namespace m3
