// Copies, barriers and warp-level pieces, each against the values that must arrive.
#include <gtest/gtest.h>

#include <cuda_bf16.h>

#include <vector>

#include "hopper/async_copy.cuh"
#include "hopper/cluster.cuh"
#include "hopper/fence.cuh"
#include "hopper/matrix.cuh"
#include "hopper/tensor_map.h"
#include "hopper/tma.cuh"
#include "tensor/cuda_check.h"
#include "tensor/device.h"

namespace m3::hopper {
namespace {

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

template <typename T>
class DeviceArray {  // device memory with host copies
 public:
  explicit DeviceArray(std::vector<T> values) : host(std::move(values)) {
    M3_CUDA_CHECK(cudaMalloc(&device, host.size() * sizeof(T)));
    M3_CUDA_CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyDefault));
  }
  ~DeviceArray() { cudaFree(device); }
  DeviceArray(const DeviceArray&) = delete;
  std::vector<T>& read() {
    M3_CUDA_CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDefault));
    return host;
  }
  std::vector<T> host;
  T* device = nullptr;
};

std::vector<int> counting(int count) {
  std::vector<int> values(count);
  for (int i = 0; i < count; ++i) values[i] = i * 7 + 1;
  return values;
}

// Bulk load, ordinary increment, bulk store and bulk reduction.
__global__ void bulk_kernel(const int* in, int* out, float* sums) {
  __shared__ __align__(128) int tile[256];
  __shared__ __align__(128) float ones[256];
  __shared__ uint64_t bar;
  const int tid = threadIdx.x;
  if (tid == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  for (int round = 0; round < 3; ++round) {  // both parities
    if (tid == 0) {
      bulk_prefetch_l2(in + round * 256, 1024);
      mbarrier_arrive_expect_tx(&bar, 1024);
      if (round == 1)
        bulk_load(tile, in + round * 256, 1024, &bar, L2Policy::kEvictFirst);
      else
        bulk_load(tile, in + round * 256, 1024, &bar);
    }
    mbarrier_wait(&bar, round & 1);
    tile[tid] += 1;
    ones[tid] = 1.0f;
    fence_async_shared();
    __syncthreads();
    if (tid == 0) {
      bulk_store(out + round * 256, tile, 1024);
      bulk_reduce_add_f32(sums, ones, 1024);
      bulk_commit();
      bulk_wait_read<0>();
      if (round == 2) bulk_wait<0>();
    }
    __syncthreads();
  }
}

TEST(Copy, bulk_load_store_and_reduce) {
  M3_NEEDS_GPU();
  DeviceArray<int> in(counting(768)), out(std::vector<int>(768, -1));
  DeviceArray<float> sums(std::vector<float>(256, 0.5f));
  bulk_kernel<<<1, 256>>>(in.device, out.device, sums.device);
  out.read();
  for (int i = 0; i < 768; ++i) ASSERT_EQ(out.host[i], i * 7 + 2) << i;
  for (float s : sums.read()) ASSERT_EQ(s, 3.5f);
}

// Rows of 64 bytes gathered in another order, two groups in flight; another thread reads each piece.
__global__ void async_copy_kernel(const int* in, const int* order, int* out) {
  __shared__ __align__(128) int tile[2][64 * 16];
  const int tid = threadIdx.x, row = tid / 4, piece = tid % 4 * 4;
  for (int group = 0; group < 2; ++group) {
    const int from = order[group * 64 + row];
    if (from >= 0) async_copy_16(&tile[group][row * 16 + piece], in + from * 16 + piece);
    async_copy_commit();
  }
  const auto store = [&](int group) {
    __syncthreads();
    const int reader_row = 63 - row;
    if (order[group * 64 + reader_row] < 0) return;
    for (int i = piece; i < piece + 4; ++i)
      out[(group * 64 + reader_row) * 16 + i] = tile[group][reader_row * 16 + i];
  };
  async_copy_wait<1>();
  store(0);
  async_copy_wait<0>();
  store(1);
}

TEST(Copy, async_gather) {
  M3_NEEDS_GPU();
  std::vector<int> rows(128);
  for (int i = 0; i < 128; ++i) rows[i] = i % 5 == 0 ? -1 : (i * 37 + 11) % 128;
  DeviceArray<int> in(counting(128 * 16)), order(rows), out(std::vector<int>(128 * 16, -1));
  async_copy_kernel<<<1, 256>>>(in.device, order.device, out.device);
  out.read();
  for (int i = 0; i < 128 * 16; ++i)
    ASSERT_EQ(out.host[i], rows[i / 16] < 0 ? -1 : (rows[i / 16] * 16 + i % 16) * 7 + 1) << i;
}

// A swizzled box read back by its address rule.
__global__ void tma_load_kernel(const __grid_constant__ CUtensorMap map, int* seen, int column,
                                int row) {
  __shared__ __align__(1024) __nv_bfloat16 tile[32 * 64];
  __shared__ uint64_t bar;
  const int tid = threadIdx.x;
  if (tid == 0) {
    tma_prefetch_map(&map);
    mbarrier_init(&bar, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (tid == 0) {
    mbarrier_arrive_expect_tx(&bar, sizeof(tile));
    tma_load(tile, &map, &bar, column, row);
  }
  mbarrier_wait(&bar, 0);
  for (int i = tid; i < 32 * 64; i += blockDim.x) {
    const int r = i / 64, byte = i % 64 * 2;
    const char* at =
        reinterpret_cast<const char*>(tile) + r * 128 + ((byte / 16) ^ (r % 8)) * 16 + byte % 16;
    seen[i] = static_cast<int>(__bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at)));
  }
}

// A box of ones, stored.
__global__ void tma_store_kernel(const __grid_constant__ CUtensorMap map, int column, int row) {
  __shared__ __align__(1024) __nv_bfloat16 tile[32 * 64];
  for (int i = threadIdx.x; i < 32 * 64; i += blockDim.x) tile[i] = __float2bfloat16(1.0f);
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(&map, tile, column, row);
    bulk_commit();
    bulk_wait<0>();
  }
}

constexpr int kRows = 40, kColumns = 128;

CUtensorMap map_2d(void* data) {
  return tensor_map_create(data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                           {{kColumns, 0, 64}, {kRows, kColumns * 2, 32}}, MapSwizzle::k128Bytes);
}

void check_load(int row) {
  std::vector<__nv_bfloat16> values(kRows * kColumns);
  for (int i = 0; i < kRows * kColumns; ++i)
    values[i] = __float2bfloat16(static_cast<float>(i % 251));
  DeviceArray<__nv_bfloat16> in(values);
  DeviceArray<int> seen(std::vector<int>(32 * 64, -1));
  tma_load_kernel<<<1, 128>>>(map_2d(in.device), seen.device, 64, row);
  seen.read();
  for (int i = 0; i < 32 * 64; ++i) {
    const int r = row + i / 64, c = 64 + i % 64;
    ASSERT_EQ(seen.host[i], r >= 0 && r < kRows ? (r * kColumns + c) % 251 : 0)
        << "row " << r << " column " << c;
  }
}

TEST(Copy, tensor_map_load_fills_zeros_behind_the_end) {
  M3_NEEDS_GPU();
  for (int row : {0, 20}) check_load(row);
}

TEST(Copy, tensor_map_load_fills_zeros_before_the_begin) {
  M3_NEEDS_GPU();
  check_load(-3);
}

TEST(Copy, tensor_map_store_skips_what_lies_outside) {
  M3_NEEDS_GPU();
  for (int row : {0, 20}) {
    DeviceArray<__nv_bfloat16> out(
        std::vector<__nv_bfloat16>(kRows * kColumns, __float2bfloat16(-1.0f)));
    tma_store_kernel<<<1, 128>>>(map_2d(out.device), 64, row);
    out.read();
    for (int i = 0; i < kRows * kColumns; ++i) {
      const bool inside = i % kColumns >= 64 && i / kColumns >= row && i / kColumns < row + 32;
      ASSERT_EQ(__bfloat162float(out.host[i]), inside ? 1.0f : -1.0f)
          << "row " << row << " element " << i;
    }
  }
}

// A box of [token][head][64 channels]: how Q tiles are read.
__global__ void tma_4d_kernel(const __grid_constant__ CUtensorMap map, int* seen) {
  __shared__ __align__(1024) __nv_bfloat16 tile[2 * 3 * 64];
  __shared__ uint64_t bar;
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&bar, sizeof(tile));
    tma_load(tile, &map, &bar, 64, 1, 2, 0);
  }
  __syncthreads();
  mbarrier_wait(&bar, 0);
  for (int i = threadIdx.x; i < 2 * 3 * 64; i += blockDim.x) {
    const int r = i / 64, byte = i % 64 * 2;
    const char* at =
        reinterpret_cast<const char*>(tile) + r * 128 + ((byte / 16) ^ (r % 8)) * 16 + byte % 16;
    seen[i] = static_cast<int>(__bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at)));
  }
}

TEST(Copy, four_axes) {
  M3_NEEDS_GPU();
  constexpr int kTokens = 5, kHeads = 4, kDim = 128;
  std::vector<__nv_bfloat16> values(kTokens * kHeads * kDim);
  for (size_t i = 0; i < values.size(); ++i)
    values[i] = __float2bfloat16(static_cast<float>(i % 241));
  DeviceArray<__nv_bfloat16> in(values);
  DeviceArray<int> seen(std::vector<int>(2 * 3 * 64, -1));
  const CUtensorMap map = tensor_map_create(in.device, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                                            {{kDim, 0, 64},
                                             {kHeads, kDim * 2, 3},
                                             {kTokens, kHeads * kDim * 2, 2},
                                             {1, kTokens * kHeads * kDim * 2, 1}},
                                            MapSwizzle::k128Bytes);
  tma_4d_kernel<<<1, 128>>>(map, seen.device);
  seen.read();
  for (int i = 0; i < 2 * 3 * 64; ++i) {
    const int token = 2 + i / (3 * 64), head = 1 + i / 64 % 3, c = 64 + i % 64;
    ASSERT_EQ(seen.host[i], ((token * kHeads + head) * kDim + c) % 241) << i;
  }
}

__global__ void __cluster_dims__(4, 1, 1) cluster_kernel(const int* in, int* out) {
  __shared__ __align__(128) int tile[64];
  __shared__ uint64_t bar, done;
  __shared__ uint32_t mailbox;
  const uint32_t rank = cluster_cta_rank();
  if (threadIdx.x == 0) {
    mbarrier_init(&bar, 1);
    mbarrier_init(&done, 4);
    mbarrier_init_fence();
    mbarrier_arrive_expect_tx(&bar, sizeof(tile));
  }
  cluster_arrive();
  cluster_wait();
  if (rank == 0 && threadIdx.x == 0) bulk_load_multicast(tile, in, sizeof(tile), &bar, 0xf);
  mbarrier_wait(&bar, 0);
  if (threadIdx.x == 0) {
    cluster_store_u32(cluster_address(&mailbox, (rank + 1) % 4), rank);
    for (uint32_t other = 0; other < 4; ++other) mbarrier_arrive_cluster(&done, other);
  }
  mbarrier_wait(&done, 0);
  cluster_arrive();
  cluster_wait();
  const uint32_t left = cluster_load_u32(cluster_address(&mailbox, rank));
  out[rank * 64 + threadIdx.x] = tile[threadIdx.x] * 10 + static_cast<int>(left);
  cluster_arrive();
  cluster_wait();
}

TEST(Copy, cluster_multicast_and_remote_memory) {
  M3_NEEDS_GPU();
  DeviceArray<int> in(counting(64)), out(std::vector<int>(256, -1));
  cluster_kernel<<<4, 64>>>(in.device, out.device);
  out.read();
  for (int i = 0; i < 256; ++i)
    ASSERT_EQ(out.host[i], (i % 64 * 7 + 1) * 10 + (i / 64 + 3) % 4) << i;
}

// Transposes an 8 x 32 matrix of 16-bit numbers by ldmatrix and stmatrix; multiplies by mma.sync.
__global__ void warp_matrix_kernel(const uint16_t* in, uint16_t* copy, uint16_t* transposed,
                                   float* product, int* rest) {
  __shared__ __align__(128) uint16_t tile[32 * 8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) tile[i] = in[i];
  __syncwarp();
  uint32_t r[4];
  ldmatrix_x4(r, tile + lane * 8);
  __syncwarp();
  stmatrix_x4_transposed(tile + lane * 8, r);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) transposed[i] = tile[i];
  __syncwarp();
  ldmatrix_x4_transposed(r, tile + lane * 8);
  __syncwarp();
  stmatrix_x4(tile + lane * 8, r);
  __syncwarp();
  for (int i = lane; i < 256; i += 32) copy[i] = tile[i];

  // A = 1 everywhere, B[k][n] = n: every D is 16 n.
  const uint32_t one = pack_bf16x2(1.0f, 1.0f),
                 n = pack_bf16x2(static_cast<float>(lane / 4), static_cast<float>(lane / 4));
  const uint32_t a[4] = {one, one, one, one}, b[2] = {n, n};
  float d[4] = {0, 0, 0, 0};
  mma_m16n8k16_bf16(d, a, b);
  product[lane * 2] = d[0];
  product[lane * 2 + 1] = d[3];

  const uint32_t pair = pack_bf16x2(1.5f, -2.0f);
  const bool elected = elect_one();
  const int num_elected = __popc(__ballot_sync(0xffffffffu, elected));
  if (lane == 0) {
    rest[0] = unpack_bf16_low(pair) == 1.5f && unpack_bf16_high(pair) == -2.0f;
    rest[1] = exp2_approx(3.0f) == 8.0f && exp2_approx(-INFINITY) == 0.0f;
    rest[2] = num_elected;
  }
}

TEST(Copy, warp_matrices_and_register_arithmetic) {
  M3_NEEDS_GPU();
  std::vector<uint16_t> values(256);
  for (int i = 0; i < 256; ++i) values[i] = static_cast<uint16_t>(i * 3 + 5);
  DeviceArray<uint16_t> in(values), copied(std::vector<uint16_t>(256)),
      transposed(std::vector<uint16_t>(256));
  DeviceArray<float> product(std::vector<float>(64));
  DeviceArray<int> rest(std::vector<int>(3, -1));
  warp_matrix_kernel<<<1, 32>>>(in.device, copied.device, transposed.device, product.device,
                                rest.device);
  copied.read();
  transposed.read();
  for (int i = 0; i < 256; ++i) {
    const int matrix = i / 64, row = i / 8 % 8, column = i % 8;
    ASSERT_EQ(copied.host[i], values[i]) << i;
    ASSERT_EQ(transposed.host[i], values[matrix * 64 + column * 8 + row]) << i;
  }
  product.read();
  for (int lane = 0; lane < 32; ++lane) {
    ASSERT_EQ(product.host[2 * lane], 16.0f * (2 * (lane % 4)));
    ASSERT_EQ(product.host[2 * lane + 1], 16.0f * (2 * (lane % 4) + 1));
  }
  EXPECT_EQ(rest.read(), (std::vector<int>{1, 1, 1}));
}

// Two warpgroups with different register counts hand a value over by a named barrier.
__global__ void __launch_bounds__(256, 1) roles_kernel(int* out) {
  __shared__ int value;
  if (threadIdx.x < 128) {
    registers_decrease<40>();
    if (threadIdx.x == 0) value = 41;
    named_barrier_arrive(1, 256);
  } else {
    registers_increase<216>();
    named_barrier_sync(1, 256);
    out[threadIdx.x - 128] = value + 1;
  }
}

TEST(Copy, register_redistribution_and_named_barriers) {
  M3_NEEDS_GPU();
  DeviceArray<int> out(std::vector<int>(128, -1));
  roles_kernel<<<1, 256>>>(out.device);
  for (int x : out.read()) ASSERT_EQ(x, 42);
}

// The second grid of a dependent launch sees what the first one wrote.
__global__ void first_kernel(int* data) {
  grid_dependency_launch();
  data[threadIdx.x] = static_cast<int>(threadIdx.x) + 1;
}
__global__ void second_kernel(const int* data, int* out) {
  grid_dependency_wait();
  out[threadIdx.x] = data[threadIdx.x] * 2;
}

TEST(Copy, dependent_launch) {
  M3_NEEDS_GPU();
  DeviceArray<int> data(std::vector<int>(128, 0)), out(std::vector<int>(128, 0));
  first_kernel<<<1, 128>>>(data.device);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(128);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const int* from = data.device;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, second_kernel, from, out.device));
  out.read();
  for (int i = 0; i < 128; ++i) ASSERT_EQ(out.host[i], 2 * (i + 1));
}

}  // namespace
}  // namespace m3::hopper
