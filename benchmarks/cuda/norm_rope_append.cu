// Fused per-head norm, rotary positions and cache write of one layer of M3 on the GPU, tokens of
// one joint projection. Memory bound: least bytes are one read of the joint rows and one write of
// q, k, v, index q and k. Random data; calls rotate over sets that lie at least 256 MB apart, one
// CUDA graph of several calls.
//   norm_rope_append [--rounds 20]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "ops/cache_append/norm_rope_append.h"
#include "tensor/cuda_check.h"
#include "tensor/device_graph.h"

namespace m3 {
namespace {

constexpr int kHeads = 64, kGroups = 4, kDim = 128, kVectors = kHeads + 3 * kGroups + 1,
              kPairs = 32;

template <typename T>
T* allocate(int64_t count) {
  void* data = nullptr;
  M3_CUDA_CHECK(cudaMalloc(&data, count * static_cast<int64_t>(sizeof(T))));
  return static_cast<T*>(data);
}
template <typename T>
T* upload(const std::vector<T>& values) {
  T* data = allocate<T>(static_cast<int64_t>(values.size()));
  M3_CUDA_CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// `sequences` sequences of `context` tokens, each with `tokens` new ones.
void run_case(int sequences, int tokens, int context, int rounds) {
  const int64_t T = int64_t{sequences} * tokens, pages_per_sequence = (context + 127) / 128;
  const double bytes = 2.0 * T * kVectors * kDim * 2;
  const int sets = static_cast<int>(std::clamp(256e6 / bytes + 1, 1.0, 64.0)),
            calls = std::max(20, sets);
  std::vector<__nv_bfloat16> normals(1 << 16), joint(T * kVectors * kDim), weights(4 * kDim);
  Philox rng(1);
  for (auto& x : normals) x = __float2bfloat16(static_cast<float>(rng.normal()));
  for (size_t i = 0; i < joint.size(); ++i) joint[i] = normals[(i * 2654435761u >> 7) & 0xffff];
  for (auto& x : weights) x = __float2bfloat16(0.1f * static_cast<float>(rng.normal()));
  std::vector<int32_t> cu(sequences + 1), lens(sequences, context),
      table(sequences * pages_per_sequence);
  for (int n = 0; n <= sequences; ++n) cu[n] = n * tokens;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  const auto pages = static_cast<int64_t>(table.size());
  int32_t *cu_q = upload(cu), *seq_lens = upload(lens), *page_table = upload(table);
  __nv_bfloat16* w = upload(weights);
  auto *cos = allocate<float>(T * kPairs), *sin = allocate<float>(T * kPairs);
  rope_angles_paged({.cu_q = cu_q,
                     .seq_lens = seq_lens,
                     .num_seqs = sequences,
                     .num_queries = T,
                     .theta = 5e6,
                     .pairs = kPairs,
                     .cos_TM = cos,
                     .sin_TM = sin},
                    {});
  std::vector<__nv_bfloat16*> x, q, qi;
  for (int s = 0; s < sets; ++s) {
    x.push_back(upload(joint));
    q.push_back(allocate<__nv_bfloat16>(T * kHeads * kDim));
    qi.push_back(allocate<__nv_bfloat16>(T * kGroups * kDim));
  }
  auto *k = allocate<__nv_bfloat16>(pages * kGroups * 128 * kDim),
       *v = allocate<__nv_bfloat16>(pages * kGroups * 128 * kDim);
  auto* xk = allocate<__nv_bfloat16>(pages * 128 * kDim);
  M3_CUDA_CHECK(cudaDeviceSynchronize());
  DeviceGraph graph({DeviceKind::kCuda, 0}, [&](Stream stream) {
    for (int i = 0; i < calls; ++i) {
      const __nv_bfloat16* row = x[i % sets];
      const int64_t stride = kVectors * kDim;
      norm_rope_append({.q_THD = row,
                        .k_TRD = row + kHeads * kDim,
                        .v_TRD = row + (kHeads + kGroups) * kDim,
                        .qi_TRX = row + (kHeads + 2 * kGroups) * kDim,
                        .ki_TX = row + (kHeads + 3 * kGroups) * kDim,
                        .q_token_stride = stride,
                        .k_token_stride = stride,
                        .v_token_stride = stride,
                        .qi_token_stride = stride,
                        .ki_token_stride = stride,
                        .w_q = w,
                        .w_k = w + kDim,
                        .w_qi = w + 2 * kDim,
                        .w_ki = w + 3 * kDim,
                        .cos_TM = cos,
                        .sin_TM = sin,
                        .pairs = kPairs,
                        .q_out_THD = q[i % sets],
                        .qi_out_TRX = qi[i % sets],
                        .k_PRBD = k,
                        .v_PRBD = v,
                        .x_PBX = xk,
                        .cu_q = cu_q,
                        .seq_lens = seq_lens,
                        .page_table = page_table,
                        .page_stride = pages_per_sequence,
                        .num_seqs = sequences,
                        .heads = kHeads,
                        .groups = kGroups,
                        .num_queries = T},
                       false, stream);
    }
  });
  std::vector<double> us;
  for (int round = -5; round < rounds; ++round) {
    const double ms = graph.replay_ms();
    if (round >= 0) us.push_back(ms * 1000 / calls);
  }
  std::sort(us.begin(), us.end());
  const double median = us[us.size() / 2];
  std::printf(
      "{\"case\": \"norm_rope_append %dx%d\", \"context\": %d, \"median_us\": %.2f, \"p10_us\": "
      "%.2f, \"p90_us\": %.2f, "
      "\"bytes\": %.0f, \"gb_s\": %.0f}\n",
      sequences, tokens, context, median, us[us.size() / 10], us[us.size() * 9 / 10], bytes,
      bytes / median * 1e-3);
  for (int s = 0; s < sets; ++s) cudaFree(x[s]), cudaFree(q[s]), cudaFree(qi[s]);
  for (void* p : {(void*)k, (void*)v, (void*)xk, (void*)cos, (void*)sin, (void*)w, (void*)cu_q,
                  (void*)seq_lens, (void*)page_table})
    cudaFree(p);
}

}  // namespace
}  // namespace m3

int main(int argc, char** argv) {
  const int rounds = argc > 2 && std::strcmp(argv[1], "--rounds") == 0 ? std::atoi(argv[2]) : 20;
  try {
    m3::run_case(1, 1, 32768, rounds);
    m3::run_case(64, 1, 8192, rounds);
    m3::run_case(1, 2048, 32768, rounds);
    m3::run_case(1, 8192, 32768, rounds);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
