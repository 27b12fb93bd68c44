// What follows the projections of an attention layer, in one GPU kernel: per-head Gemma norm and
// rotary positions of q, k, index q and index k (qknorm_rope.h, model.md §4.2, §5.1) and the write
// of k, v and index k into the paged cache (cache_append.h). fp32 throughout, one rounding on
// store.
//
//   q_THD, k_TRD, v_TRD, qi_TRX, ki_TX   bf16; rows of a token `token_stride` elements apart, so
//                                        the parts of one joint projection can be passed as they
//                                        lie
//   w_q, w_k, w_qi, w_ki                 bf16 [128] (the stored weight; the kernel adds the 1)
//   cos_TM, sin_TM                       fp32 [T, pairs] of rope_angles, pairs <= 32
//   q_out_THD, qi_out_TRX                bf16, contiguous; may be q and qi themselves if contiguous
//   k_PRBD, v_PRBD, x_PBX                bf16 pages
//
// D = X = B = 128. Row i of sequence n goes to position L_k - L_q + i; rows of unused slots
// (seq_len = 0) are normed but not written to a page. Without an index branch the qi, ki and x
// pointers are null. Rows are independent of each other, bit for bit. Lengths and page tables are
// read on the device.
#pragma once
#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

struct NormRopeAppendParams {
  const void *q_THD = nullptr, *k_TRD = nullptr, *v_TRD = nullptr, *qi_TRX = nullptr,
             *ki_TX = nullptr;
  int64_t q_token_stride = 0, k_token_stride = 0, v_token_stride = 0, qi_token_stride = 0,
          ki_token_stride = 0;
  const void *w_q = nullptr, *w_k = nullptr, *w_qi = nullptr, *w_ki = nullptr;
  const float *cos_TM = nullptr, *sin_TM = nullptr;
  int pairs = 32;
  float eps = 1e-6f;
  void *q_out_THD = nullptr, *qi_out_TRX = nullptr;
  void *k_PRBD = nullptr, *v_PRBD = nullptr, *x_PBX = nullptr;
  const int32_t *cu_q = nullptr, *seq_lens = nullptr, *page_table = nullptr;
  int64_t page_stride = 0;
  int num_seqs = 0, heads = 0, groups = 0;
  int64_t num_queries = 0;
};

// Throws where the shape is outside the above. dependent: programmatic dependent launch.
void norm_rope_append(const NormRopeAppendParams& params, bool dependent, Stream stream);

// cos_TM, sin_TM [T, pairs] for the positions of a batch (rope_angles of qknorm_rope.h): the angle
// is the fp32 product pos * inv_freq, inv_freq = 1 / theta^(2m / (2 pairs)) in fp32; sine and
// cosine of that angle rounded once. Rows of unused slots get position 0.
struct RopeAnglesParams {
  const int32_t *cu_q = nullptr, *seq_lens = nullptr;
  int num_seqs = 0;
  int64_t num_queries = 0;
  double theta = 0;
  int pairs = 32;
  float *cos_TM = nullptr, *sin_TM = nullptr;
};
void rope_angles_paged(const RopeAnglesParams& params, Stream stream);

}  // namespace m3
