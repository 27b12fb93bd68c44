// GPU paths of attend. Raw pointers; attend.cpp checks tensors and calls these. Without CUDA
// attend_cuda_none.cpp takes their place.
#pragma once
#include "ops/attend/attend.h"

namespace m3 {

struct AttendCudaArgs {
  MsaGeometry geometry;
  MsaBatch batch;  // device arrays; max_q_len and max_k_len set
  AttendSupport support;
  DType query_dtype = DType::kBF16, kv_dtype = DType::kBF16, out_dtype = DType::kBF16;
  const void* q_THD = nullptr;
  const void* k = nullptr;
  const void* v = nullptr;
  int64_t num_pages = 0;           // P of a paged cache; for packed keys, their rows S
  const int32_t* lists = nullptr;  // ids [R, T, K] or tokens [T, budget]
  void* o_THD = nullptr;
  float* lse_TH = nullptr;  // or absent
  void* workspace = nullptr;
};

enum class AttendPath : uint8_t {
  kGeneral,  // any geometry, f32 or bf16, every support
  kTile,     // wgmma, query-outer: 8 queries share a ring of the blocks any wants; kBlocks, kFull
  kHybrid,   // wgmma: blocks that few neighbours share go through a block-outer pass first; kBlocks
  kRows,     // wgmma: every history block goes through that pass; kBlocks
  kSplit,    // kTile with the lists of tiles cut over CTAs, for few tiles; kBlocks, kFull
  kDecode,   // paged, up to 16 query rows per sequence (attend_decode.h); kBlocks, kFull
};
const char* attend_path_name(AttendPath path);
AttendPath attend_cuda_path(const MsaGeometry& geometry, const MsaBatch& batch,
                            const AttendSupport& support, DType query_dtype, DType kv_dtype,
                            DType out_dtype);

// Enough for every path of these sizes.
int64_t attend_cuda_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch,
                                    const AttendSupport& support);

void attend_cuda(const AttendCudaArgs& args, AttendPath path, Stream stream);

// The paths themselves.
void attend_general(const AttendCudaArgs& args, Stream stream);

}  // namespace m3
