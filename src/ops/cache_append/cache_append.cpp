#include "ops/cache_append/cache_append.h"

#include <cstring>

#include "base/threads.h"
#include "ops/common/msa_keys.h"

namespace m3 {
namespace {

// `heads` rows of `dim` elements of one token, to rows that lie head_stride elements apart.
void append_token(const void* from, DType from_dtype, void* to, DType to_dtype, int heads, int dim, int64_t head_stride) {
  for (int h = 0; h < heads; ++h) {
    const char* source = static_cast<const char*>(from) + int64_t{h} * dim * dtype_bytes(from_dtype);
    char* target = static_cast<char*>(to) + h * head_stride * dtype_bytes(to_dtype);
    if (from_dtype == to_dtype) {
      std::memcpy(target, source, dim * dtype_bytes(to_dtype));
    } else if (to_dtype == DType::kBF16) {
      for (int c = 0; c < dim; ++c) {
        reinterpret_cast<bf16*>(target)[c] = bf16(reinterpret_cast<const float*>(source)[c]);
      }
    } else {
      for (int c = 0; c < dim; ++c) {
        reinterpret_cast<float*>(target)[c] = to_float(reinterpret_cast<const bf16*>(source)[c]);
      }
    }
  }
}

struct Lane {  // one of K, V, X
  Tensor from, to;
  int heads, dim;
};

void append_sequence(const MsaBatch& batch, const Lane& lane, int block, int n) {
  const int64_t from_bytes = int64_t{lane.heads} * lane.dim * dtype_bytes(lane.from.dtype());
  const int64_t row_bytes = int64_t{lane.dim} * dtype_bytes(lane.to.dtype());
  for (int64_t i = 0; i < batch.q_len(n); ++i) {
    const int64_t p = batch.first_position(n) + i;
    if (p < 0) continue;
    const int64_t page = batch.page_table[n * batch.max_pages + p / block];
    M3_CHECK(page >= 0 && page < lane.to.dim(0), "sequence {}: page {} of position {} lies outside the cache's {} pages",
             n, page, p, lane.to.dim(0));
    char* to = static_cast<char*>(lane.to.data()) + (page * lane.heads * block + p % block) * row_bytes;
    append_token(static_cast<const char*>(lane.from.data()) + (batch.q_begin(n) + i) * from_bytes, lane.from.dtype(), to,
                 lane.to.dtype(), lane.heads, lane.dim, int64_t{block} * lane.dim);
  }
}

}  // namespace

void cache_append(const MsaBatch& batch, const Tensor& k_TRD, const Tensor& v_TRD, const Tensor& ki_TX,
                  const Tensor& k_PRBD, const Tensor& v_PRBD, const Tensor& x_PBX, Stream stream) {
  M3_CHECK(batch.layout == KvLayout::kPaged, "cache_append needs a paged batch, got packed keys");
  M3_CHECK(k_PRBD.rank() == 4, "k_PRBD must be [P, R, B, D], got {}", k_PRBD.shape().str());
  const int heads = static_cast<int>(k_PRBD.dim(1)), block = static_cast<int>(k_PRBD.dim(2)),
            dim = static_cast<int>(k_PRBD.dim(3));
  const int64_t T = batch.num_queries;
  const Device device = k_PRBD.device();
  M3_CHECK(device.is_cpu(), "cache_append: no implementation for {}", device.str());
  batch.check(block);
  msa_check_tensor("k_TRD", k_TRD, {T, heads, dim}, device);
  msa_check_tensor("v_TRD", v_TRD, {T, heads, dim}, device);
  msa_check_tensor("v_PRBD", v_PRBD, k_PRBD.shape(), device);
  M3_CHECK(ki_TX.defined() == x_PBX.defined() || T == 0, "ki_TX and x_PBX must both be given or both be absent");

  Lane lanes[3] = {{k_TRD, k_PRBD, heads, dim}, {v_TRD, v_PRBD, heads, dim}};
  int num_lanes = 2;
  if (x_PBX.defined()) {
    M3_CHECK(x_PBX.rank() == 3, "x_PBX must be [P, B, X], got {}", x_PBX.shape().str());
    msa_check_tensor("x_PBX", x_PBX, {k_PRBD.dim(0), block, x_PBX.dim(2)}, device);
    msa_check_tensor("ki_TX", ki_TX, {T, x_PBX.dim(2)}, device);
    lanes[num_lanes++] = {ki_TX, x_PBX, 1, static_cast<int>(x_PBX.dim(2))};
  }
  for (int l = 0; l < num_lanes; ++l) {
    if (T > 0) msa_check_float("cache_append input", lanes[l].from);
    msa_check_float("cache_append page", lanes[l].to);
  }
  struct Work {
    const MsaBatch& batch;
    const Lane* lanes;
    int num_lanes, block;
  } const work = {batch, lanes, num_lanes, block};
  // Sequences never share a page that they append to, so they may run side by side.
  parallel_for(batch.num_seqs, [&work](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      for (int l = 0; l < work.num_lanes; ++l) append_sequence(work.batch, work.lanes[l], work.block, static_cast<int>(n));
    }
  });
}

}  // namespace m3
