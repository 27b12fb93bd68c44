// For each slot r = (t, j) of expert e, with s = routed_scale · weight[t, j] (1 for the shared expert):
//   da = dy_t · W_down           dweight = routed_scale · act_r · da        da ← s · da
//   (dgate, dup) = swiglu'(gate, up) · da
//   dW_down += dy_tᵀ · (s · act_r)      dW_gate += dgateᵀ · h_t      dW_up += dupᵀ · h_t
//   dh_t += dgate · W_gate + dup · W_up
// act_r is recomputed from gate and up, rounded to h's type as the forward did. Gradients between the products are fp32,
// or h's type where they enter a product (bf16 training multiplies bf16).
#include <algorithm>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/moe_experts/moe_rows.h"

namespace m3 {
namespace {

// One set of rows: the routed experts' or the shared expert's.
struct Rows {
  Tensor gate, up;         // f32, from the forward
  Tensor dact;             // f32; later dgate in h's type lies in `dgate`
  Tensor act, dgate, dup;  // h's type
  Tensor dh;               // f32 [rows, C]
};

Rows alloc_rows(const Tensor& gate, const Tensor& up, int64_t hidden, DType type, Arena& scratch) {
  Rows r = {.gate = gate, .up = up};
  r.dact = scratch.alloc("expert activation gradient", DType::kF32, gate.shape());
  r.act = scratch.alloc("expert activation", type, gate.shape());
  r.dgate = scratch.alloc("expert gate gradient", type, gate.shape());
  r.dup = scratch.alloc("expert up gradient", type, gate.shape());
  r.dh = scratch.alloc("expert input gradient", DType::kF32, {gate.dim(0), hidden});
  return r;
}

GemmType type_of(const Tensor& t) {
  return is_bf16(t) ? GemmType::kBf16 : GemmType::kF32;
}

// c[rows, in] (+)= x[rows, out] · W[out, in]; x may be picked by x_rows.
GemmProblem times_weight(const Tensor& x, const int32_t* x_rows, const Weight& w, const Tensor& c,
                         bool accumulate) {
  M3_CHECK(w.values.dtype() != DType::kE4M3,
           "an expert of e4m3 cannot be trained: use bf16 or f32 weights");
  GemmProblem p;
  p.a = x.data();
  p.a_rows = x_rows;
  p.a_type = type_of(x);
  p.b = w.values.data();
  p.b_type = type_of(w.values);
  p.b_transposed = true;
  p.c = c.data();
  p.m = c.dim(0);
  p.n = w.num_in();
  p.k = w.num_out();
  p.accumulate = accumulate;
  return p;
}

// dW[out, in] += dyᵀ · x over `rows` rows, either picked by a list of tokens.
GemmProblem weight_gradient(const Tensor& dy, const int32_t* dy_rows, const Tensor& x,
                            const int32_t* x_rows, int64_t rows, const Tensor& dw) {
  check_shape("gradient of an expert's matrix", dw, {dy.dim(1), x.dim(1)});
  M3_CHECK(dw.dtype() == DType::kF32, "gradients of experts must be f32, got {}",
           dtype_name(dw.dtype()));
  GemmProblem p;
  p.a = dy.data();
  p.a_rows = dy_rows;
  p.a_type = type_of(dy);
  p.a_transposed = true;
  p.b = x.data();
  p.b_rows = x_rows;
  p.b_type = type_of(x);
  p.b_transposed = true;
  p.c = dw.data();
  p.m = dy.dim(1);
  p.n = x.dim(1);
  p.k = rows;
  p.accumulate = true;
  return p;
}

// Row r: dweight, then da and act times their factor.
void scale_rows(const Rows& rows, const float* factor, float* dweight, float routed_scale) {
  const int64_t F = rows.gate.dim(1);
  float* dact = rows.dact.ptr<float>();
  mutable_float(rows.act, [&](auto* act) {
    parallel_rows(rows.gate.dim(0), 2 * F, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        float parts[8] = {};  // eight chains: one alone would wait for its own additions
        for (int64_t f = 0; f < F; ++f) {
          const int64_t at = r * F + f;
          parts[f & 7] += to_float(act[at]) * dact[at];
          dact[at] *= factor[r];
          round_to(to_float(act[at]) * factor[r], act + at);
        }
        float dot = 0;
        for (float part : parts) dot += part;
        dweight[r] = routed_scale * dot;
      }
    });
  });
}

// dh_t += Σ_j rows(t, j) + shared_t, in the order of j.
void add_input_gradients(const MoeShape& shape, const Tensor& routed, const Tensor& shared,
                         const Tensor& dh_TC) {
  const int64_t C = shape.C, K = shape.K;
  const float* from = K > 0 ? routed.ptr<float>() : nullptr;
  const float* also = shared.defined() ? shared.ptr<float>() : nullptr;
  float* dh = dh_TC.ptr<float>();
  parallel_rows(shape.T, C * (K + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t j = 0; j < K; ++j) {
        const float* row = from + int64_t{shape.groups.row[t * K + j]} * C;
        for (int64_t c = 0; c < C; ++c) dh[t * C + c] += row[c];
      }
      for (int64_t c = 0; c < C && also != nullptr; ++c) dh[t * C + c] += also[t * C + c];
    }
  });
}

class Backward {
 public:
  Backward(const Tensor& h, const MoeShape& shape, const MoeExperts& experts, const Tensor& dy,
           const MoeGradients& gradients)
      : h_(h), shape_(shape), experts_(experts), dy_(dy), gradients_(gradients) {}

  // Calls f(rows, tokens or null, count, first row, weights, gradients) for each expert that has tokens.
  template <typename F>
  void for_each_expert(const Rows& routed, const Rows& shared, F&& f) const {
    for (int64_t e = 0; e < shape_.E; ++e) {
      const int64_t begin = shape_.groups.begin[e], end = shape_.groups.begin[e + 1];
      if (begin < end) {
        f(routed, shape_.groups.token.data() + begin, begin, end, experts_.routed[e],
          gradients_.routed[e]);
      }
    }
    if (experts_.shared != nullptr)
      f(shared, nullptr, int64_t{0}, shape_.T, *experts_.shared, *gradients_.shared);
  }

  void activation_gradients(const Rows& routed, const Rows& shared) const {
    std::vector<GemmProblem> problems;
    for_each_expert(routed, shared,
                    [&](const Rows& rows, const int32_t* tokens, int64_t begin, int64_t end,
                        const ExpertWeights& w, const ExpertGradients&) {
                      problems.push_back(
                          times_weight(dy_, tokens, w.down_CF, rows.dact.rows(begin, end), false));
                    });
    gemm_run(problems);
  }

  // Weight gradients and the gate's share of dh in one region, then the up's share, which adds to the same rows.
  void products(const Rows& routed, const Rows& shared) const {
    std::vector<GemmProblem> first, second;
    for_each_expert(
        routed, shared,
        [&](const Rows& rows, const int32_t* tokens, int64_t begin, int64_t end,
            const ExpertWeights& w, const ExpertGradients& g) {
          const Tensor dgate = rows.dgate.rows(begin, end), dup = rows.dup.rows(begin, end),
                       dh = rows.dh.rows(begin, end);
          first.push_back(weight_gradient(dy_, tokens, rows.act.rows(begin, end), nullptr,
                                          end - begin, g.down_CF));
          first.push_back(weight_gradient(dgate, nullptr, h_, tokens, end - begin, g.gate_FC));
          first.push_back(weight_gradient(dup, nullptr, h_, tokens, end - begin, g.up_FC));
          first.push_back(times_weight(dgate, nullptr, w.gate_FC, dh, false));
          second.push_back(times_weight(dup, nullptr, w.up_FC, dh, true));
        });
    gemm_run(first);
    gemm_run(second);
  }

 private:
  const Tensor& h_;
  const MoeShape& shape_;
  const MoeExperts& experts_;
  const Tensor& dy_;
  const MoeGradients& gradients_;
};

}  // namespace

void moe_experts_backward(const Tensor& h_TC, const Tensor& ids_TK, const Tensor& weights_TK,
                          const MoeExperts& experts, const MoeSaved& saved, const Tensor& dy_TC,
                          const Tensor& dh_TC, const Tensor& dweights_TK,
                          const MoeGradients& gradients, Arena& scratch, Stream) {
  const MoeShape shape = moe_shape(h_TC, ids_TK, weights_TK, experts);
  check_float("dy_TC", dy_TC, h_TC.shape());
  check_shape("dh_TC", dh_TC, h_TC.shape());
  M3_CHECK(gradients.routed.size() == experts.routed.size() &&
               (gradients.shared != nullptr) == (experts.shared != nullptr),
           "gradients are for {} routed and {} shared experts, there are {} and {}",
           gradients.routed.size(), gradients.shared != nullptr, experts.routed.size(),
           experts.shared != nullptr);
  const ArenaScope scope(scratch);
  const MoeSaved forward = moe_rows_for(shape, saved, scratch);
  const bool saved_all = (shape.E == 0 || saved.routed_gate.defined()) &&
                         (shape.F_shared == 0 || saved.shared_gate.defined());
  if (!saved_all) moe_gate_up(h_TC, shape, experts, forward);

  const DType type = h_TC.dtype();
  Rows routed, shared;
  if (shape.E > 0)
    routed = alloc_rows(forward.routed_gate, forward.routed_up, shape.C, type, scratch);
  if (shape.F_shared > 0)
    shared = alloc_rows(forward.shared_gate, forward.shared_up, shape.C, type, scratch);
  const Backward backward(h_TC, shape, experts, dy_TC, gradients);
  backward.activation_gradients(routed, shared);

  if (shape.E > 0) {
    check_shape("dweights_TK", dweights_TK, ids_TK.shape());
    std::vector<float> factor(shape.slots()), dweight(shape.slots());
    for (int64_t s = 0; s < shape.slots(); ++s) {
      factor[shape.groups.row[s]] = experts.routed_scale * weights_TK.ptr<float>()[s];
    }
    swiglu_oai(routed.gate, routed.up, experts.swiglu, routed.act);
    scale_rows(routed, factor.data(), dweight.data(), experts.routed_scale);
    for (int64_t s = 0; s < shape.slots(); ++s)
      dweights_TK.ptr<float>()[s] = dweight[shape.groups.row[s]];
    swiglu_oai_backward(routed.gate, routed.up, experts.swiglu, routed.dact, routed.dgate,
                        routed.dup);
  }
  if (shape.F_shared > 0) {
    swiglu_oai(shared.gate, shared.up, experts.swiglu, shared.act);
    swiglu_oai_backward(shared.gate, shared.up, experts.swiglu, shared.dact, shared.dgate,
                        shared.dup);
  }
  backward.products(routed, shared);
  add_input_gradients(shape, routed.dh, shared.dh, dh_TC);
}

int64_t moe_experts_backward_scratch_bytes(int64_t num_tokens, int64_t top_k, int64_t hidden,
                                           int64_t expert_width, int64_t shared_width) {
  const int64_t per_slot = 6 * 4 * expert_width + 4 * hidden,
                per_token = 6 * 4 * shared_width + 4 * hidden;
  return num_tokens * (top_k * per_slot + per_token) + 16 * Arena::kAlignment;
}

}  // namespace m3
