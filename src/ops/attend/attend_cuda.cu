// Which GPU path an attend call takes.
#include <algorithm>

#include "ops/attend/attend_cuda.h"
#include "ops/attend/attend_decode.h"
#include "ops/attend/attend_sm90.h"
#include "tensor/cuda_check.h"
#include "tensor/profile_range.h"

namespace m3 {
namespace {

// Below so many query rows the plan costs more than pairs save; 300 rows were measured to gain
// (docs/lab/prefill.md).
constexpr int64_t kHybridQueries = 256;
// A history block is shared from so many of 4 neighbours on: one union tile of a half tile costs as
// much as 2.4 pairs (hopper.md §5.4).
constexpr int kHybridThreshold = 3, kRowsThreshold = 5;
// Few tiles on a long cache are split: whole ones would leave a nearly empty last wave. With lists
// the join costs more than it saves from about one and a half waves on; full lists are longer, and
// gain up to four (docs/lab/prefill.md).
constexpr int64_t kSplitUnits = 192, kSplitFullUnits = 528;
constexpr double kLog2e = 1.4426950408889634;

int64_t max_blocks(const MsaGeometry& g, const MsaBatch& batch) {
  return (batch.max_k_len + g.block - 1) / g.block;
}

bool has_blocks_or_all(const AttendSupport& support) {
  return support.kind == AttendSupport::Kind::kBlocks || support.kind == AttendSupport::Kind::kFull;
}

bool split_pays(const MsaGeometry& g, const MsaBatch& batch, bool full) {
  const int64_t units = attend_sizes(g, batch, 1, true).max_tiles * g.groups;
  const int64_t long_cache = 4 * batch.max_q_len + (full ? 0 : int64_t{g.topk} * g.block);
  return units <= (full ? kSplitFullUnits : kSplitUnits) && batch.max_k_len >= long_cache;
}

bool is_decode(const MsaGeometry& g, const MsaBatch& batch) {
  return batch.layout == KvLayout::kPaged &&
         attend_decode_supports(g, batch.max_q_len, max_blocks(g, batch)).empty();
}

AttendDecodeTuning decode_tuning(const MsaGeometry& g, const MsaBatch& batch,
                                 const AttendSupport& support) {
  const bool full = support.kind == AttendSupport::Kind::kFull;
  return attend_decode_tuning(g, batch.num_seqs, batch.max_q_len, batch.max_k_len, full);
}

void attend_decode_path(const AttendCudaArgs& a, Stream stream) {
  AttendDecodeTuning tuning = decode_tuning(a.geometry, a.batch, a.support);
  tuning.dependent = false;  // the kernel before is not ours
  const bool blocks = a.support.kind == AttendSupport::Kind::kBlocks;
  attend_decode({.q_THD = a.q_THD,
                 .k_PRBD = a.k,
                 .v_PRBD = a.v,
                 .num_pages = a.num_pages,
                 .o_THD = a.o_THD,
                 .lse_TH = a.lse_TH,
                 .cu_q = a.batch.cu_q,
                 .seq_lens = a.batch.seq_lens,
                 .page_table = a.batch.page_table,
                 .page_stride = a.batch.max_pages,
                 .num_seqs = a.batch.num_seqs,
                 .groups = a.geometry.groups,
                 .heads_per_group = a.geometry.heads_per_group,
                 .topk = a.geometry.topk,
                 .num_queries = a.batch.num_queries,
                 .scale_log2 = static_cast<float>(a.geometry.logit_scale() * kLog2e),
                 .ids_RTK = blocks ? const_cast<int32_t*>(a.lists) : nullptr,
                 .partial = static_cast<float*>(a.workspace)},
                a.batch.max_q_len, tuning, stream);
}

}  // namespace

const char* attend_path_name(AttendPath path) {
  switch (path) {
    case AttendPath::kGeneral:
      return "general";
    case AttendPath::kTile:
      return "tile";
    case AttendPath::kHybrid:
      return "hybrid";
    case AttendPath::kRows:
      return "rows";
    case AttendPath::kSplit:
      return "split";
    case AttendPath::kDecode:
      return "decode";
  }
  return "?";
}

AttendPath attend_cuda_path(const MsaGeometry& g, const MsaBatch& batch,
                            const AttendSupport& support, DType query_dtype, DType kv_dtype,
                            DType out_dtype) {
  const bool bf16 =
      query_dtype == DType::kBF16 && kv_dtype == DType::kBF16 && out_dtype == DType::kBF16;
  if (!bf16 || !has_blocks_or_all(support) || g.logit_scale() <= 0) return AttendPath::kGeneral;
  if (is_decode(g, batch)) return AttendPath::kDecode;
  const bool shape = g.head_dim == 128 && g.block == 128 && g.heads_per_group == 16;
  const bool topk = g.topk == 4 || g.topk == 16;
  if (!shape || (support.kind == AttendSupport::Kind::kBlocks && !topk))
    return AttendPath::kGeneral;
  const bool full = support.kind == AttendSupport::Kind::kFull;
  if (split_pays(g, batch, full)) return AttendPath::kSplit;
  const bool pairs_pay = !full && batch.num_queries >= kHybridQueries;
  return pairs_pay ? AttendPath::kHybrid : AttendPath::kTile;
}

int64_t attend_cuda_workspace_bytes(const MsaGeometry& g, const MsaBatch& batch,
                                    const AttendSupport& support) {
  const int threshold = support.kind == AttendSupport::Kind::kBlocks ? kRowsThreshold : 1;
  int64_t bytes = std::max(attend_sm90_workspace_bytes(g, batch, threshold, false),
                           attend_sm90_workspace_bytes(g, batch, 1, true));
  if (has_blocks_or_all(support) && is_decode(g, batch)) {
    const int splits = decode_tuning(g, batch, support).splits;
    bytes = std::max(bytes, attend_decode_workspace_bytes(g, batch.num_queries, splits));
  }
  return bytes;
}

void attend_cuda(const AttendCudaArgs& args, AttendPath path, Stream stream) {
  const ProfileRange range("attend");
  switch (path) {
    case AttendPath::kGeneral:
      return attend_general(args, stream);
    case AttendPath::kTile:
      return attend_sm90(args, 1, false, stream);
    case AttendPath::kHybrid:
      return attend_sm90(args, kHybridThreshold, false, stream);
    case AttendPath::kRows:
      return attend_sm90(args, kRowsThreshold, false, stream);
    case AttendPath::kSplit:
      return attend_sm90(args, 1, true, stream);
    case AttendPath::kDecode:
      return attend_decode_path(args, stream);
  }
}

}  // namespace m3
