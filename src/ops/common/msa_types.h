// What the MSA operators (index_select, attend, dsa_select, cache_append and their backwards) share:
// the geometry, the description of a batch and the layouts. Contract: msa.md §1-§6.
//
// Letters in names: T query rows of a call, S key rows, N sequences, H query heads, R groups = KV
// heads, D head dim, X index dim, B tokens of a block = page, P pages, K blocks a row selects.
//
//   tensor      packed (KvLayout::kPacked)   paged (KvLayout::kPaged)
//   q, O        [T, H, D]                    [T, H, D]
//   k, v        [S, R, D]                    [P, R, B, D]
//   qi          [T, R, X]                    [T, R, X]
//   ki          [S, X]                       [P, B, X]
//   ids         int32 [R, T, K]              the same; ascending, -1 behind the valid prefix
//   LSE         fp32 [T, H]                  the same
#pragma once
#include <cstdint>

#include "tensor/tensor.h"

namespace m3 {

struct MsaGeometry {
  int groups = 0;           // R: KV heads = index query heads
  int heads_per_group = 0;  // G; query head h belongs to group h / G
  int head_dim = 0;         // D
  int index_dim = 0;        // X; may be 0 where no index branch exists
  int block = 0;            // B
  int topk = 0;             // K
  int local = 1;            // forced newest blocks, own block included
  int init = 0;             // forced first blocks
  double scale = 0;         // of the logits q.k; 0 stands for 1/sqrt(D)
  double scale_x = 0;       // of the index logits in the KL; selection ranks unscaled. 0: 1/sqrt(X)

  int heads() const { return groups * heads_per_group; }
  double logit_scale() const;
  double index_scale() const;
  // Throws and names the parameter if no path supports it: all >= 1, local + init <= topk, and
  // topk <= 128, block <= 4096, dims <= 1024 (limits of the workspaces, not of the maths).
  void check() const;
};

MsaGeometry msa_geometry_m3();  // 4 groups of 16 heads, D = X = B = 128, 16 blocks, 1 local

enum class KvLayout : uint8_t { kPacked, kPaged };

// The sequences of a call. A plain description that owns nothing; the arrays lie on the device of the
// tensors (the accessors below read host memory). Sequence n owns query rows cu_q[n] .. cu_q[n+1]-1;
// they are its last positions: query i has position L_k - L_q + i. L_q = 0 and N = 0 are legal.
struct MsaBatch {
  KvLayout layout = KvLayout::kPacked;
  int num_seqs = 0;               // N
  int64_t num_queries = 0;        // T = cu_q[N]
  const int32_t* cu_q = nullptr;  // [N + 1]

  // Packed: sequence n owns key rows cu_k[n] .. cu_k[n+1]-1. With `lead` (context-parallel fragments,
  // msa.md §11) they start at cu_k[lead[n]] instead.
  const int32_t* cu_k = nullptr;  // [N + 1]
  const int32_t* lead = nullptr;  // [N] or absent

  // Paged: position j lies in page page_table[n][j / B] at slot j % B. Entries at and beyond
  // ceil(L_k / B) are undefined and never read. seq_lens counts the new tokens too.
  const int32_t* seq_lens = nullptr;    // [N]
  const int32_t* page_table = nullptr;  // [N, max_pages]
  int64_t max_pages = 0;

  // Upper bounds of L_q and L_k, for launches whose lengths lie on a GPU. The CPU ignores them.
  int64_t max_q_len = 0, max_k_len = 0;

  int64_t q_begin(int n) const { return cu_q[n]; }
  int64_t q_len(int n) const { return cu_q[n + 1] - cu_q[n]; }
  int64_t k_begin(int n) const { return cu_k[lead != nullptr ? lead[n] : n]; }
  int64_t k_len(int n) const {
    return layout == KvLayout::kPaged ? int64_t{seq_lens[n]} : cu_k[n + 1] - k_begin(n);
  }
  // Position of the sequence's first query row. Negative only where k_len < q_len: rows before
  // position 0 are empty rows (msa.md §1).
  int64_t first_position(int n) const { return k_len(n) - q_len(n); }

  // Host arrays: borders ascend, T agrees, pages reach as far as the lengths. L_k < L_q is refused,
  // except L_k = 0 (an unused slot of a captured batch: empty rows). Throws and names the sequence.
  void check(int block) const;
};

// Arithmetic of a call. kF32: fp32 products and sums, whatever the inputs are stored in. kBF16: where
// all inputs are bf16, products may be bf16 x bf16 with fp32 sums, and the softmax weights are rounded
// to bf16 (AVX-512 BF16, GPU); elsewhere it means the same as kF32.
enum class MsaCompute : uint8_t { kF32, kBF16 };

// Which keys a query row sees (msa.md §5, §16), always within j <= p.
struct AttendSupport {
  enum class Kind : uint8_t {
    kBlocks,  // blocks of ids_RTK: MSA
    kFull,    // all
    kWindow,  // p - j < window, or j < sink
    kTokens,  // positions listed in tokens_TK, shared by all heads: DSA
  };
  Kind kind = Kind::kBlocks;
  int64_t window = 0, sink = 0;  // kWindow
  int64_t budget = 0;            // kTokens: length of a list

  static AttendSupport blocks() { return {}; }
  static AttendSupport full() { return {.kind = Kind::kFull}; }
  static AttendSupport sliding(int64_t window, int64_t sink) {
    return {.kind = Kind::kWindow, .window = window, .sink = sink};
  }
  static AttendSupport tokens(int64_t budget) { return {.kind = Kind::kTokens, .budget = budget}; }
};

}  // namespace m3
