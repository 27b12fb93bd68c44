// GPU paths of index_select. Raw pointers; index_select.cpp checks tensors and calls these. Without
// CUDA index_select_cuda_none.cpp takes their place.
#pragma once
#include "ops/index_select/index_select.h"

namespace m3 {

struct IndexSelectCudaArgs {
  MsaGeometry geometry;
  MsaBatch batch;  // device arrays; max_q_len and max_k_len set
  IndexSelectOptions options;
  DType query_dtype = DType::kBF16, key_dtype = DType::kBF16;
  const void* qi_TRX = nullptr;
  const void* ki = nullptr;
  int64_t num_pages = 0;  // P of a paged ki; for a packed one, its rows S
  int32_t* ids_RTK = nullptr;
  float* sel_scores_RTK = nullptr;
  // kPrefill, or absent: only tiles of 256 rows with a flag get their ids (index_prefill8.h).
  const int32_t* tile_flags = nullptr;
  void* workspace = nullptr;
};

enum class IndexSelectPath : uint8_t {
  kGeneral,  // any geometry, f32 or bf16, all options
  kPrefill,  // wgmma: X = B = 128, bf16, local = 1, init = 0, K = 4 or 16, ascending ids, no scores
  kDecode,   // paged, up to 16 query rows per sequence (index_select_decode.h)
};
const char* index_select_path_name(IndexSelectPath path);
IndexSelectPath index_select_cuda_path(const MsaGeometry& geometry, const MsaBatch& batch,
                                       const IndexSelectOptions& options, DType query_dtype,
                                       DType key_dtype);

// Enough for every path of these sizes.
int64_t index_select_cuda_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch);

void index_select_cuda(const IndexSelectCudaArgs& args, IndexSelectPath path, Stream stream);

// The paths themselves.
void index_select_general(const IndexSelectCudaArgs& args, Stream stream);
void index_select_sm90(const IndexSelectCudaArgs& args, Stream stream);
int64_t index_select_sm90_workspace_bytes(const MsaGeometry& geometry, const MsaBatch& batch);

}  // namespace m3
