// Attention block of a decoder layer (model.md §4.2, §5):
//   h = gnorm(x)    q, k, v (iq, ik) = projections, per-head norm, RoPE    x += W_o attend(q, k, v)
//
// T tokens of a step, C hidden, H query heads, R KV heads, D head dim, X index dim, K blocks of a list.
//
// The intermediates live in AttentionActs. Inference reuses one set for all layers; training keeps one per
// layer, where the backward reads them.
#pragma once
#include "formats/config.h"
#include "model/keep.h"
#include "model/kv_cache.h"
#include "model/weights.h"
#include "ops/attend/attend.h"
#include "ops/dsa_select/dsa_select.h"
#include "ops/index_select/index_select.h"

namespace m3 {

// What the sparse layers do. Everything but kMsa is an explicit override, for comparisons (msa.md §16); the
// full-attention layers of a model stay as they are. kWindow and kDsa see as many tokens as MSA
// (topk · block). kDsa takes the checkpoint's own index queries and keys as a lightning indexer with
// equal head weights: one token list shared by all heads, which the model was not trained for.
enum class AttentionMode : uint8_t { kMsa, kFull, kWindow, kDsa };
const char* attention_mode_name(AttentionMode mode);  // "msa", "full", "window", "dsa"
bool uses_index(AttentionMode mode);                  // needs index queries and keys

MsaGeometry msa_geometry(const TextConfig& config);

// What all layers of one step share; made once per step by plan_attention.
struct AttentionStep {
  MsaBatch batch;
  AttentionMode mode = AttentionMode::kMsa;
  bool index = false;                 // the index branch runs: the mode reads it, or training teaches it
  Tensor cos_TM, sin_TM;              // rotary angles of q and k
  Tensor index_cos_TM, index_sin_TM;  // of the index branch: the same tensors unless its head is narrower
  Tensor dsa_weights_TR;              // kDsa: ones
  IndexSelectPlan select;             // kMsa
  DsaSelectPlan dsa_select;           // kDsa
  AttendPlan sparse, full;            // layers with an index branch; the others
  int64_t workspace_bytes = 0;        // largest of the plans
};

// Tensors come from `arena`. The arrays of `batch` lie on the host and must outlive the step. `teach_index`: the index
// branch of the sparse layers runs even if the mode does not read it (dense warm-up, msa.md §8.5).
AttentionStep plan_attention(const TextConfig& config, const MsaBatch& batch, AttentionMode mode, DType dtype,
                             Arena& arena, Stream stream = {}, bool teach_index = false);
// Bytes that it takes from the arena.
int64_t attention_step_bytes(const TextConfig& config, int64_t num_tokens, AttentionMode mode,
                             bool teach_index = false);

struct AttentionActs {
  Tensor h_TC;
  // Projections before norm and RoPE: the same memory as the tensors below where all are f32 and the backward does
  // not need them.
  Tensor q_raw_THD, k_raw_TRD, qi_raw_TRX, ki_raw_TX;
  Tensor q_THD, k_TRD, v_TRD, qi_TRX, ki_TX;  // qi, ki absent in layers without index branch
  Tensor lists;                               // ids_RTK, or tokens_TK of kDsa; absent where neither is used
  bool lists_chosen = false;                  // recomputation: lists hold the choice of the first pass
  Tensor o_THD;
  Tensor lse_TH;                              // kept for the backward only
};

AttentionActs alloc_attention_acts(const TextConfig& config, int64_t num_tokens, DType dtype, AttentionMode mode,
                                   bool sparse, Keep keep, Arena& arena, bool teach_index = false);

// x_TC [T, C] f32, updated in place. With `cache` (paged batch) the new keys are appended and the whole
// sequences read from it; without (packed batch) acts.k and acts.v are the keys. `scratch` needs
// attention_scratch_bytes.
void attention_forward(const TextConfig& config, const AttentionWeights& weights, bool sparse,
                       const AttentionStep& step, const KvLayer* cache, const GemmOptions& gemm_options,
                       const AttentionActs& acts, const Tensor& x_TC, Arena& scratch, Stream stream = {});

// The last layer of a prefill: keys of all T tokens, but queries only of the L rows whose logits are wanted, the last
// ones of their sequences (`tail`: a step over the same sequences with those queries; x_LC: their rows of x_TC).
void attention_forward_last(const TextConfig& config, const AttentionWeights& weights, bool sparse,
                            const AttentionStep& step, const AttentionStep& tail, const KvLayer& cache,
                            const GemmOptions& gemm_options, const AttentionActs& acts,
                            const AttentionActs& tail_acts, const Tensor& x_TC, const Tensor& x_LC, Arena& scratch,
                            Stream stream = {});

int64_t attention_scratch_bytes(const TextConfig& config, int64_t num_tokens, const AttentionStep& step);

}  // namespace m3
