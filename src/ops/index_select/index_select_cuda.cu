// Which GPU path an index_select call takes.
#include <algorithm>

#include "ops/index_select/index_select_cuda.h"
#include "ops/index_select/index_select_decode.h"
#include "tensor/cuda_check.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

constexpr int kFastDim = 128, kFastBlock = 128;

int64_t max_blocks(const MsaGeometry& g, const MsaBatch& batch) {
  return (batch.max_k_len + g.block - 1) / g.block;
}

bool is_decode(const MsaGeometry& g, const MsaBatch& batch) {
  return batch.layout == KvLayout::kPaged &&
         index_decode_supports(g, batch.max_q_len, max_blocks(g, batch)).empty();
}

int64_t decode_workspace_bytes(const MsaGeometry& g, const MsaBatch& batch) {
  return batch.num_queries * g.groups * index_decode_score_stride(max_blocks(g, batch)) * 4;
}

void index_select_decode(const IndexSelectCudaArgs& a, Stream stream) {
  const int64_t blocks = max_blocks(a.geometry, a.batch),
                stride = index_decode_score_stride(blocks);
  auto* scores = static_cast<float*>(a.workspace);
  index_decode_scores({.qi_TRX = a.qi_TRX,
                       .x_PBX = a.ki,
                       .cu_q = a.batch.cu_q,
                       .seq_lens = a.batch.seq_lens,
                       .page_table = a.batch.page_table,
                       .page_stride = a.batch.max_pages,
                       .num_seqs = a.batch.num_seqs,
                       .groups = a.geometry.groups,
                       .topk = a.geometry.topk,
                       .score_all = a.options.sel_scores,
                       .scores_TRM = scores,
                       .score_stride = stride},
                      a.batch.max_q_len, {}, stream);
  index_decode_choose({.scores_TRM = scores,
                       .score_stride = stride,
                       .cu_q = a.batch.cu_q,
                       .seq_lens = a.batch.seq_lens,
                       .num_seqs = a.batch.num_seqs,
                       .groups = a.geometry.groups,
                       .topk = a.geometry.topk,
                       .num_queries = a.batch.num_queries,
                       .ids_RTK = a.ids_RTK,
                       .sel_scores_RTK = a.sel_scores_RTK},
                      blocks, false, stream);
}

}  // namespace

const char* index_select_path_name(IndexSelectPath path) {
  switch (path) {
    case IndexSelectPath::kGeneral:
      return "general";
    case IndexSelectPath::kPrefill:
      return "prefill";
    case IndexSelectPath::kDecode:
      return "decode";
  }
  return "?";
}

IndexSelectPath index_select_cuda_path(const MsaGeometry& g, const MsaBatch& batch,
                                       const IndexSelectOptions& options, DType query_dtype,
                                       DType key_dtype) {
  const bool bf16 = query_dtype == DType::kBF16 && key_dtype == DType::kBF16;
  const bool shape =
      g.index_dim == kFastDim && g.block == kFastBlock && g.local == 1 && g.init == 0;
  if (!bf16 || !shape || options.order != SelectOrder::kAscending) return IndexSelectPath::kGeneral;
  if (is_decode(g, batch)) return IndexSelectPath::kDecode;
  const bool topk = g.topk == 4 || g.topk == 16;
  return topk && !options.sel_scores ? IndexSelectPath::kPrefill : IndexSelectPath::kGeneral;
}

int64_t index_select_cuda_workspace_bytes(const MsaGeometry& g, const MsaBatch& batch) {
  const int64_t decode = is_decode(g, batch) ? decode_workspace_bytes(g, batch) : 0;
  return std::max(decode, index_select_sm90_workspace_bytes(g, batch));
}

void index_select_cuda(const IndexSelectCudaArgs& args, IndexSelectPath path, Stream stream) {
  const ProfileRange range("index_select");
  switch (path) {
    case IndexSelectPath::kGeneral:
      return index_select_general(args, stream);
    case IndexSelectPath::kPrefill:
      return index_select_sm90(args, stream);
    case IndexSelectPath::kDecode:
      return index_select_decode(args, stream);
  }
}

}  // namespace m3
