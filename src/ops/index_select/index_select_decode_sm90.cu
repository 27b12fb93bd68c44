// Block scores of a decode step from bf16 keys, and the choice of blocks from scores. The scan
// itself is described in index_scan.cuh; a page is 32 KB and a score one chain of eight mma.sync
// m16n8k16 steps.
#include "ops/index_select/index_scan.cuh"
#include "ops/index_select/index_scan_bf16.cuh"
#include "ops/index_select/select_blocks.cuh"

namespace m3 {
namespace {

using namespace hopper;
using index_scan::Bf16Keys;
using index_scan::kBlock;

// One CTA per (query row, group).
__global__ __launch_bounds__(kSelectThreads) void index_decode_choose_kernel(
    const IndexChooseParams p) {
  extern __shared__ __align__(128) uint8_t smem[];
  __shared__ SelectShared<kSelectMaxTopk> shared;
  const int row = blockIdx.x, group = blockIdx.y, thread = threadIdx.x;
  int low = 0, high = p.num_seqs - 1;  // the last sequence that begins at or before the row
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.cu_q[middle] <= row)
      low = middle;
    else
      high = middle - 1;
  }
  const int position = p.seq_lens[low] - p.cu_q[low + 1] + row;
  const int own = position < 0 ? -1 : position / kBlock;
  const int wanted = min(p.topk - 1, own);
  const float* scores = p.scores_TRM + (int64_t{row} * p.groups + group) * p.score_stride;
  const int64_t at = (int64_t{group} * p.num_queries + row) * p.topk;
  const auto emit = [&](int place, int block, int) {
    p.ids_RTK[at + place] = block;
    if (p.sel_scores_RTK != nullptr) p.sel_scores_RTK[at + place] = __ldcg(scores + block);
  };
  grid_dependency_wait();
  grid_dependency_launch();
  if (p.wanted_N != nullptr && p.wanted_N[low] == 0) return;
  if (wanted > 0 && own > wanted) {
    select_blocks(
        scores, own, wanted, smem, shared, thread, [] { __syncthreads(); }, [](int) { return 0; },
        [](int) {}, emit);
  } else if (thread < wanted) {
    emit(thread, thread, 0);
  }
  if (thread >= max(wanted, 0) && thread < p.topk) {
    const int id = thread == wanted ? own : -1;
    p.ids_RTK[at + thread] = id;
    if (p.sel_scores_RTK != nullptr) p.sel_scores_RTK[at + thread] = id >= 0 ? INFINITY : -INFINITY;
  }
}

}  // namespace

std::string index_decode_supports(const MsaGeometry& g, int64_t max_q_len, int64_t max_blocks) {
  if (g.index_dim != index_scan::kDim)
    return fmt::format("index_dim {} (wants {})", g.index_dim, index_scan::kDim);
  if (g.block != index_scan::kBlock)
    return fmt::format("block {} (wants {})", g.block, index_scan::kBlock);
  if (g.local != 1 || g.init != 0)
    return fmt::format("local {} and init {} (wants 1 and 0)", g.local, g.init);
  if (g.topk > kSelectMaxTopk)
    return fmt::format("topk {} (wants at most {})", g.topk, kSelectMaxTopk);
  if (max_q_len * g.groups > kIndexDecodeMaxColumns) {
    return fmt::format("{} groups x {} query tokens (wants at most {})", g.groups, max_q_len,
                       kIndexDecodeMaxColumns);
  }
  if (max_blocks > kSelectMaxBlocks)
    return fmt::format("{} blocks (wants at most {})", max_blocks, kSelectMaxBlocks);
  return "";
}

int64_t index_decode_score_stride(int64_t max_blocks) {
  return (max_blocks + 31) / 32 * 32;
}

void index_decode_scores(const IndexDecodeParams& params, int64_t max_q_len,
                         const IndexDecodeTuning& tuning, Stream stream) {
  index_scan::launch_scan<Bf16Keys>(params, max_q_len, tuning, stream);
}

void index_decode_choose(const IndexChooseParams& params, int64_t max_blocks, bool dependent,
                         Stream stream) {
  if (params.num_queries == 0) return;
  const int64_t bytes = select_scratch_bytes(max_blocks, params.topk - 1);
  M3_CUDA_CHECK(cudaFuncSetAttribute(index_decode_choose_kernel,
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(bytes)));
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim =
      dim3(static_cast<unsigned>(params.num_queries), static_cast<unsigned>(params.groups));
  config.blockDim = dim3(kSelectThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = dependent ? 1 : 0;
  M3_CUDA_CHECK(cudaLaunchKernelEx(&config, index_decode_choose_kernel, params));
}

}  // namespace m3
