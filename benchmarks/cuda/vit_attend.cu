// Attention of one vision layer (16 heads of 80) on the GPU over images or clips of equal size.
// Random data, median of the rounds; a launch reads other rows than the last. Prints one JSON line
// per case.
//   vit_attend [--rounds 20]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/rng.h"
#include "ops/vit_attend/vit_attend_sm90.h"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

constexpr int kHeads = 16, kDim = 80;

template <typename T>
T* allocate(int64_t count) {
  void* data = nullptr;
  M3_CUDA_CHECK(cudaMalloc(&data, count * sizeof(T)));
  return static_cast<T*>(data);
}

void run_case(int images, int patches, int rounds) {
  const int64_t T = int64_t{images} * patches, width = int64_t{kHeads} * kDim;
  const int sets = static_cast<int>(std::max<int64_t>(1, 256000000 / (T * width * 8)));
  std::vector<__nv_bfloat16> host(T * 3 * width);
  Philox rng(1);
  std::vector<__nv_bfloat16> normals(1 << 16);
  for (auto& x : normals) x = __float2bfloat16(static_cast<float>(rng.normal()));
  for (size_t i = 0; i < host.size(); ++i) host[i] = normals[(i * 2654435761u >> 7) & 0xffff];
  std::vector<__nv_bfloat16*> qkv, out;
  for (int s = 0; s < sets; ++s) {
    qkv.push_back(allocate<__nv_bfloat16>(T * 3 * width));
    out.push_back(allocate<__nv_bfloat16>(T * width));
    M3_CUDA_CHECK(cudaMemcpy(qkv[s], host.data(), host.size() * 2, cudaMemcpyHostToDevice));
  }
  std::vector<int32_t> cu(images + 1);
  for (int i = 0; i <= images; ++i) cu[i] = i * patches;
  const std::vector<VitTile> list = vit_attend_tiles(cu);
  auto* tiles = allocate<VitTile>(static_cast<int64_t>(list.size()));
  M3_CUDA_CHECK(
      cudaMemcpy(tiles, list.data(), list.size() * sizeof(VitTile), cudaMemcpyHostToDevice));
  cudaEvent_t begin, end;
  M3_CUDA_CHECK(cudaEventCreate(&begin));
  M3_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> us;
  for (int round = -5; round < rounds; ++round) {
    const int s = (round + 5) % sets;
    M3_CUDA_CHECK(cudaEventRecord(begin));
    vit_attend_sm90({.q_THD = qkv[s],
                     .k_THD = qkv[s] + width,
                     .v_THD = qkv[s] + 2 * width,
                     .token_stride = 3 * width,
                     .o_THD = out[s],
                     .heads = kHeads,
                     .head_dim = kDim,
                     .scale = 1 / std::sqrt(80.0f),
                     .tiles = tiles,
                     .num_tiles = static_cast<int>(list.size())},
                    {});
    M3_CUDA_CHECK(cudaEventRecord(end));
    M3_CUDA_CHECK(cudaEventSynchronize(end));
    float ms = 0;
    M3_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (round >= 0) us.push_back(ms * 1000);
  }
  std::sort(us.begin(), us.end());
  const double median = us[us.size() / 2], flop = 4.0 * T * patches * width;
  std::printf(
      "{\"case\": \"vit %dx%d\", \"median_us\": %.1f, \"p10_us\": %.1f, \"p90_us\": %.1f, "
      "\"tflops\": %.1f}\n",
      images, patches, median, us[us.size() / 10], us[us.size() * 9 / 10], flop / median * 1e-6);
  for (int s = 0; s < sets; ++s) cudaFree(qkv[s]), cudaFree(out[s]);
  cudaFree(tiles);
}

}  // namespace
}  // namespace m3

int main(int argc, char** argv) {
  const int rounds = argc > 2 && std::strcmp(argv[1], "--rounds") == 0 ? std::atoi(argv[2]) : 20;
  try {
    for (const auto& [images, patches] :
         {std::pair{1, 2304}, {8, 2304}, {32, 576}, {16, 1024}, {4, 9216}}) {
      m3::run_case(images, patches, rounds);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
