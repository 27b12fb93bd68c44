#include <cmath>
#include <vector>

#include "ops/attend_backward/attend_backward.h"
#include "ops/common/msa_support.h"
#include "ops/common/values.h"

namespace m3 {

void attend_backward_ref(const MsaGeometry& g, const MsaBatch& batch, const AttendSupport& support,
                         const AttendBackwardInputs& in, const Tensor& dq_THD, const Tensor& dk_SRD,
                         const Tensor& dv_SRD) {
  g.check();
  batch.check(g.block);
  const int D = g.head_dim, H = g.heads(), R = g.groups;
  const double scale = g.logit_scale();
  std::vector<double> dq(dq_THD.numel(), 0.0), dk(dk_SRD.numel(), 0.0), dv(dv_SRD.numel(), 0.0);
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      const int64_t t = batch.q_begin(n) + i, p = batch.first_position(n) + i;
      for (int h = 0; h < H; ++h) {
        const int r = h / g.heads_per_group;
        const int64_t row = t * H + h, at = row * D;
        double delta = in.dlse_TH.defined() ? -value_at(in.dlse_TH, row) : 0.0;
        for (int c = 0; c < D; ++c) delta += value_at(in.do_THD, at + c) * value_at(in.o_THD, at + c);
        for (int64_t j : msa_visible_positions(g, batch, support, in.lists, t, p, r)) {
          const int64_t key = ((batch.k_begin(n) + j) * R + r) * D;
          double logit = 0, dp = 0;
          for (int c = 0; c < D; ++c) {
            logit += value_at(in.q_THD, at + c) * value_at(in.k_SRD, key + c);
            dp += value_at(in.do_THD, at + c) * value_at(in.v_SRD, key + c);
          }
          const double prob = std::exp(scale * logit - value_at(in.lse_TH, row));
          const double ds = prob * (dp - delta);
          for (int c = 0; c < D; ++c) {
            dq[at + c] += scale * ds * value_at(in.k_SRD, key + c);
            dk[key + c] += scale * ds * value_at(in.q_THD, at + c);
            dv[key + c] += prob * value_at(in.do_THD, at + c);
          }
        }
      }
    }
  }
  for (size_t i = 0; i < dq.size(); ++i) set_value(dq_THD, i, dq[i]);
  for (size_t i = 0; i < dk.size(); ++i) set_value(dk_SRD, i, dk[i]);
  for (size_t i = 0; i < dv.size(); ++i) set_value(dv_SRD, i, dv[i]);
}

}  // namespace m3
