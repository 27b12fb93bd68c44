// Warpgroup matrix products (PTX ISA, "wgmma"): D[64, N] += A[64, K] B[K, N], K = 32 bytes of A's
// type.
//   A: shared memory (wgmma_ss) or registers (wgmma_rs);  B: shared memory;  D: registers, fp32 or
//   int32.
// Accumulator layout: warp w of the warpgroup holds rows 16w .. 16w+15; lane l holds rows l/4
// (values 4j, 4j+1) and l/4 + 8 (values 4j+2, 4j+3) of columns 8j + 2(l%4) and the next one. Four
// registers of bf16 pairs of the columns 16i .. 16i+15 are the A operand of K step i: the
// accumulators of S = QK^T, rounded, are the A operand of PV without any exchange.
//
// Order of use: wgmma_fence(); wgmma_*(); wgmma_commit(); wgmma_wait<n>(); no access to D, and none
// to the registers of A, in between. scale_d = 0 overwrites D.
#pragma once
#include <cstdint>

#include "hopper/mbarrier.cuh"

namespace m3::hopper {

// --- matrix descriptors: bits 0-13 address, 16-29 leading offset, 32-45 stride offset (all in
// units of 16 bytes), 62-63 swizzle (1 = 128 bytes). Tiles are 1024-byte aligned.

// Rows of 128 bytes (64 bf16), the product's K axis contiguous: eight rows are 1024 bytes. For a
// wider K the next 64 columns lie in another tile. Next K step inside the 128 bytes: + 32 bytes.
__device__ __forceinline__ uint64_t descriptor_k_major(const void* smem) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) |
         ((smem_address(smem) >> 4) & 0x3fff);
}

// Rows of 128 bytes, the product's M or N axis contiguous (V as B operand: a row is a key). K rows
// lie 128 bytes apart; columns 64.. lie `bytes_to_next_64` behind. Next K step of 16 rows: + 2048
// bytes.
__device__ __forceinline__ uint64_t descriptor_mn_major(const void* smem,
                                                        uint32_t bytes_to_next_64) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) |
         (uint64_t{bytes_to_next_64 >> 4} << 16) | ((smem_address(smem) >> 4) & 0x3fff);
}

__device__ __forceinline__ uint64_t descriptor_advance(uint64_t descriptor, uint32_t bytes) {
  // The address stays in the low word: a 64-bit sum would cost a carry per product.
  const uint32_t low = static_cast<uint32_t>(descriptor) + (bytes >> 4);
  return (descriptor & 0xffffffff00000000u) | low;
}

// --- ordering
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Tells the compiler that registers change here: after a wait, so that no use of an accumulator
// moves before it; before a fence, so that no change of an operand register moves behind it.
template <int kCount>
__device__ __forceinline__ void wgmma_pin(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void wgmma_pin(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(d[i])::"memory");
}
template <int kSteps>
__device__ __forceinline__ void wgmma_pin(uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int i = 0; i < 4 * kSteps; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// --- products. The operand lists are spelled by macros because an asm statement needs one operand
// per accumulator register.
#define M3_D4(C, d, i) C(d[i]), C(d[i + 1]), C(d[i + 2]), C(d[i + 3])
#define M3_D8(C, d, i) M3_D4(C, d, i), M3_D4(C, d, i + 4)
#define M3_D16(C, d, i) M3_D8(C, d, i), M3_D8(C, d, i + 8)
#define M3_D32(C, d, i) M3_D16(C, d, i), M3_D16(C, d, i + 16)
#define M3_D64(C, d, i) M3_D32(C, d, i), M3_D32(C, d, i + 32)
#define M3_D128(C, d, i) M3_D64(C, d, i), M3_D64(C, d, i + 64)
#define M3_FLOAT(x) "+f"(x)
#define M3_INT(x) "+r"(x)

#define M3_R4 "%0, %1, %2, %3"
#define M3_R8 M3_R4 ", %4, %5, %6, %7"
#define M3_R16 M3_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define M3_R32 \
  M3_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define M3_R64                                                                              \
  M3_R32                                                                                    \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, "                                                                         \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define M3_R128                                                                                \
  M3_R64                                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, "    \
  "%81, %82, %83, "                                                                            \
  "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "     \
  "%101, %102, %103, "                                                                         \
  "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, " \
  "%119, %120, "                                                                               \
  "%121, %122, %123, %124, %125, %126, %127"

// NAME(d, desc_a, desc_b, scale_d): A and B in shared memory. TAIL: immediates after scale-d.
#define M3_WGMMA_SS(NAME, TEMPLATE, SHAPE, TYPES, COUNT, ELEMENT, C, A, B, S, TAIL, ...)    \
  TEMPLATE __device__ __forceinline__ void NAME(ELEMENT(&d)[COUNT], uint64_t a, uint64_t b, \
                                                int scale_d) {                              \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S                                      \
                 ", 0;\n"                                                                   \
                 "wgmma.mma_async.sync.aligned." SHAPE "." TYPES " {" M3_R##COUNT           \
                 "}, " A ", " B ", p" TAIL ";\n}"                                           \
                 : M3_D##COUNT(C, d, 0)                                                     \
                 : "l"(a), "l"(b), "r"(scale_d)__VA_ARGS__);                                \
  }

// NAME(d, a[4], desc_b, scale_d): A in registers.
#define M3_WGMMA_RS(NAME, TEMPLATE, SHAPE, TYPES, COUNT, ELEMENT, C, A, B, S, TAIL, ...)         \
  TEMPLATE __device__ __forceinline__ void NAME(ELEMENT(&d)[COUNT], const uint32_t(&a)[4],       \
                                                uint64_t b, int scale_d) {                       \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " S                                           \
                 ", 0;\n"                                                                        \
                 "wgmma.mma_async.sync.aligned." SHAPE "." TYPES " {" M3_R##COUNT                \
                 "}, {" A "}, " B ", p" TAIL ";\n}"                                              \
                 : M3_D##COUNT(C, d, 0)                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d)__VA_ARGS__); \
  }

// wgmma_bf16_ss<kTransposeB>(d, a, b, scale_d) and wgmma_bf16_rs<kTransposeB>: N = 2 * number of
// accumulators. kTransposeB = 0: B is K-major (descriptor_k_major); 1: N-major
// (descriptor_mn_major). A in shared memory is K-major unless kTransposeA.
#define M3_WGMMA_BF16(N, COUNT, S0, S1, S2, S3, S4, S5, S6, S7)                                \
  M3_WGMMA_SS(wgmma_bf16_ss, template <int kTransposeB = 0 M3_COMMA int kTransposeA = 0>,      \
              "m64n" #N "k16", "f32.bf16.bf16", COUNT, float, M3_FLOAT, S0, S1, S2,            \
              ", 1, 1, " S3 ", " S4, , "n"(kTransposeA), "n"(kTransposeB))                     \
  M3_WGMMA_RS(wgmma_bf16_rs, template <int kTransposeB = 0>, "m64n" #N "k16", "f32.bf16.bf16", \
              COUNT, float, M3_FLOAT, S0 ", " S1 ", " S2 ", " S3, S4, S5, ", 1, 1, " S6, ,     \
              "n"(kTransposeB))
#define M3_COMMA ,

M3_WGMMA_BF16(8, 4, "%4", "%5", "%6", "%7", "%8", "%9", "%10", "%11")
M3_WGMMA_BF16(16, 8, "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15")
M3_WGMMA_BF16(32, 16, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23")
M3_WGMMA_BF16(64, 32, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39")
M3_WGMMA_BF16(128, 64, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71")
M3_WGMMA_BF16(256, 128, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135")

// 8-bit types, K = 32, both operands K-major.
#define M3_WGMMA_8BIT(N, COUNT, S0, S1, S2, S3, S4, S5)                                            \
  M3_WGMMA_SS(wgmma_e4m3_ss, static, "m64n" #N "k32", "f32.e4m3.e4m3", COUNT, float, M3_FLOAT, S0, \
              S1, S2, ", 1, 1")                                                                    \
  M3_WGMMA_RS(wgmma_e4m3_rs, static, "m64n" #N "k32", "f32.e4m3.e4m3", COUNT, float, M3_FLOAT,     \
              S0 ", " S1 ", " S2 ", " S3, S4, S5, ", 1, 1")                                        \
  M3_WGMMA_SS(wgmma_s8_ss, static, "m64n" #N "k32", "s32.s8.s8", COUNT, int32_t, M3_INT, S0, S1,   \
              S2, "")                                                                              \
  M3_WGMMA_RS(wgmma_s8_rs, static, "m64n" #N "k32", "s32.s8.s8", COUNT, int32_t, M3_INT,           \
              S0 ", " S1 ", " S2 ", " S3, S4, S5, "")

M3_WGMMA_8BIT(8, 4, "%4", "%5", "%6", "%7", "%8", "%9")
M3_WGMMA_8BIT(16, 8, "%8", "%9", "%10", "%11", "%12", "%13")
M3_WGMMA_8BIT(32, 16, "%16", "%17", "%18", "%19", "%20", "%21")
M3_WGMMA_8BIT(64, 32, "%32", "%33", "%34", "%35", "%36", "%37")
M3_WGMMA_8BIT(128, 64, "%64", "%65", "%66", "%67", "%68", "%69")
M3_WGMMA_8BIT(256, 128, "%128", "%129", "%130", "%131", "%132", "%133")

#undef M3_WGMMA_8BIT
#undef M3_WGMMA_BF16
#undef M3_WGMMA_RS
#undef M3_WGMMA_SS
#undef M3_COMMA
#undef M3_D4
#undef M3_D8
#undef M3_D16
#undef M3_D32
#undef M3_D64
#undef M3_D128
#undef M3_FLOAT
#undef M3_INT
#undef M3_R4
#undef M3_R8
#undef M3_R16
#undef M3_R32
#undef M3_R64
#undef M3_R128

}  // namespace m3::hopper
