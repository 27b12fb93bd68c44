// Every wgmma instruction against integer sums: small integers make fp32 accumulation exact.
#include <gtest/gtest.h>

#include <cuda_fp8.h>

#include <vector>

#include "hopper/fence.cuh"
#include "hopper/wgmma.cuh"
#include "tensor/cuda_check.h"
#include "tensor/device.h"

namespace m3::hopper {
namespace {

// One tile is kRowBytes = 128 bytes of K per row, four K steps; A has 64 rows, B has N.
constexpr int kRowBytes = 128;

enum class Operand { kShared, kRegisters };

__device__ void store_swizzled(char* tile, int row, int byte, const char* value, int size) {
  char* to = tile + row * kRowBytes + ((byte / 16) ^ (row % 8)) * 16 + byte % 16;
  for (int i = 0; i < size; ++i) to[i] = value[i];
}

struct Bf16 {
  using Element = __nv_bfloat16;
  using Sum = float;
  static __host__ __device__ Element make(int x) { return __float2bfloat16(static_cast<float>(x)); }
};
struct E4m3 {
  using Element = __nv_fp8_e4m3;
  using Sum = float;
  static __host__ __device__ Element make(int x) { return __nv_fp8_e4m3(static_cast<float>(x)); }
};
struct S8 {
  using Element = int8_t;
  using Sum = int32_t;
  static __host__ __device__ Element make(int x) { return static_cast<int8_t>(x); }
};

template <typename Type, int N, Operand kA, int kTransposeB>
__device__ void multiply(typename Type::Sum (&d)[N / 2], uint64_t a, const uint32_t (&fragment)[4],
                         uint64_t b, int scale) {
  if constexpr (std::is_same_v<Type, Bf16>) {
    if constexpr (kA == Operand::kShared)
      wgmma_bf16_ss<kTransposeB>(d, a, b, scale);
    else
      wgmma_bf16_rs<kTransposeB>(d, fragment, b, scale);
  } else if constexpr (std::is_same_v<Type, E4m3>) {
    if constexpr (kA == Operand::kShared)
      wgmma_e4m3_ss(d, a, b, scale);
    else
      wgmma_e4m3_rs(d, fragment, b, scale);
  } else {
    if constexpr (kA == Operand::kShared)
      wgmma_s8_ss(d, a, b, scale);
    else
      wgmma_s8_rs(d, fragment, b, scale);
  }
}

// out[64][N] = 3 + a[64][K] b[K][N]; K = 128 bytes.
template <typename Type, int N, Operand kA, int kTransposeB>
__global__ void __launch_bounds__(128)
    product_kernel(const int* a, const int* b, typename Type::Sum* out) {
  using Element = typename Type::Element;
  constexpr int K = kRowBytes / sizeof(Element), kStepElements = 32 / sizeof(Element);
  extern __shared__ __align__(1024) char smem[];
  char* tile_a = smem;
  char* tile_b = smem + 64 * kRowBytes;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  for (int i = tid; i < 64 * K; i += 128) {
    const Element x = Type::make(a[i]);
    store_swizzled(tile_a, i / K, i % K * sizeof(Element), reinterpret_cast<const char*>(&x),
                   sizeof(Element));
  }
  for (int i = tid; i < N * K; i += 128) {
    const int k = i / N, n = i % N;
    const Element x = Type::make(b[i]);
    if (kTransposeB) {  // rows are k, 64 columns each
      store_swizzled(tile_b + n / 64 * K * kRowBytes, k, n % 64 * 2,
                     reinterpret_cast<const char*>(&x), 2);
    } else {
      store_swizzled(tile_b, n, k * sizeof(Element), reinterpret_cast<const char*>(&x),
                     sizeof(Element));
    }
  }
  fence_async_shared();
  __syncthreads();

  typename Type::Sum d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 3;
  const uint64_t desc_a = descriptor_k_major(tile_a);
  const uint64_t desc_b =
      kTransposeB ? descriptor_mn_major(tile_b, K * kRowBytes) : descriptor_k_major(tile_b);
  wgmma_pin(d);
  uint32_t fragment[4][4];
  for (int step = 0; step < 4; ++step) {
    // Rows lane / 4 (+ 8), four bytes at 4 (lane % 4) (+ 16) of the step's 32.
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i % 2 * 8,
                byte = step * 32 + lane % 4 * 4 + i / 2 * 16;
      Element pair[4 / sizeof(Element)];
      for (int e = 0; e < 4 / static_cast<int>(sizeof(Element)); ++e) {
        pair[e] = Type::make(a[row * K + byte / static_cast<int>(sizeof(Element)) + e]);
      }
      fragment[step][i] = *reinterpret_cast<uint32_t*>(pair);
    }
  }
  wgmma_pin(fragment);
  wgmma_fence();
  for (int step = 0; step < 4; ++step) {
    const uint64_t b_step =
        descriptor_advance(desc_b, kTransposeB ? step * kStepElements * kRowBytes : step * 32);
    multiply<Type, N, kA, kTransposeB>(d, descriptor_advance(desc_a, step * 32), fragment[step],
                                       b_step, 1);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
  for (int i = 0; i < N / 2; ++i) {
    const int row = warp * 16 + lane / 4 + i / 2 % 2 * 8,
              column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
    out[row * N + column] = d[i];
  }
}

template <typename Type, int N, Operand kA, int kTransposeB = 0>
void check_product() {
  constexpr int K = kRowBytes / sizeof(typename Type::Element);
  std::vector<int> a(64 * K), b(K * N);
  for (size_t i = 0; i < a.size(); ++i) a[i] = static_cast<int>(i * 2654435761u >> 28) % 7 - 3;
  for (size_t i = 0; i < b.size(); ++i)
    b[i] = static_cast<int>((i + 17) * 2246822519u >> 28) % 7 - 3;
  int *da, *db;
  typename Type::Sum* out;
  M3_CUDA_CHECK(cudaMalloc(&da, a.size() * 4));
  M3_CUDA_CHECK(cudaMalloc(&db, b.size() * 4));
  M3_CUDA_CHECK(cudaMalloc(&out, 64 * N * 4));
  M3_CUDA_CHECK(cudaMemcpy(da, a.data(), a.size() * 4, cudaMemcpyDefault));
  M3_CUDA_CHECK(cudaMemcpy(db, b.data(), b.size() * 4, cudaMemcpyDefault));
  const auto kernel = product_kernel<Type, N, kA, kTransposeB>;
  const int bytes = (64 + N) * kRowBytes;
  M3_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<1, 128, bytes>>>(da, db, out);
  std::vector<typename Type::Sum> got(64 * N);
  M3_CUDA_CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDefault));
  for (int m = 0; m < 64; ++m) {
    for (int n = 0; n < N; ++n) {
      int want = 3;
      for (int k = 0; k < K; ++k) want += a[m * K + k] * b[k * N + n];
      ASSERT_EQ(static_cast<int>(got[m * N + n]), want)
          << "N " << N << " row " << m << " column " << n;
    }
  }
  for (void* p : {static_cast<void*>(da), static_cast<void*>(db), static_cast<void*>(out)})
    cudaFree(p);
}

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

// Every width once, and at one width every type, operand and order: widths and types meet in no
// other place.
TEST(Wgmma, every_width) {
  M3_NEEDS_GPU();
  check_product<Bf16, 8, Operand::kShared>();
  check_product<Bf16, 16, Operand::kRegisters>();
  check_product<E4m3, 32, Operand::kShared>();
  check_product<Bf16, 64, Operand::kShared, 1>();
  check_product<S8, 256, Operand::kShared>();
}

TEST(Wgmma, every_type_and_operand) {
  M3_NEEDS_GPU();
  check_product<Bf16, 128, Operand::kShared>();
  check_product<Bf16, 128, Operand::kRegisters>();
  check_product<Bf16, 128, Operand::kShared, 1>();  // columns come 64 at a time
  check_product<Bf16, 128, Operand::kRegisters, 1>();
  check_product<E4m3, 128, Operand::kShared>();
  check_product<E4m3, 128, Operand::kRegisters>();
  check_product<S8, 128, Operand::kShared>();
  check_product<S8, 128, Operand::kRegisters>();
}

}  // namespace
}  // namespace m3::hopper
