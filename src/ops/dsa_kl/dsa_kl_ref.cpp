#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/common/values.h"
#include "ops/dsa_kl/dsa_kl.h"

namespace m3 {
namespace {

double dot(const Tensor& a, int64_t row_a, const Tensor& b, int64_t row_b, int64_t dim) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c)
    sum += value_at(a, row_a * dim + c) * value_at(b, row_b * dim + c);
  return sum;
}

}  // namespace

void dsa_kl_ref(const MsaGeometry& g, const MsaBatch& batch, double weight, const DsaKlInputs& in,
                const DsaKlOutputs& out) {
  const int64_t A = in.qx_TAX.dim(1), X = g.index_dim, D = g.head_dim, H = g.heads(),
                budget = in.tokens_TK.dim(1);
  const double factor = 1 / std::sqrt(static_cast<double>(A * X));
  std::vector<double> dqx(out.dqx_TAX.numel()), dkx(out.dkx_SX.numel()), dw(in.w_TA.numel());
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t t = batch.q_begin(n); t < batch.q_begin(n) + batch.q_len(n); ++t) {
      std::vector<int64_t> keys;  // rows of the packed tensors
      for (int64_t s = 0; s < budget && in.tokens_TK.ptr<int32_t>()[t * budget + s] >= 0; ++s) {
        keys.push_back(batch.k_begin(n) + in.tokens_TK.ptr<int32_t>()[t * budget + s]);
      }
      std::vector<double> teacher, logits;
      double sum = 0, kl = 0;
      for (int64_t key : keys) {
        double mean = 0, score = 0;
        for (int64_t h = 0; h < H; ++h) {
          const double a = g.logit_scale() * dot(in.q_THD, t * H + h, in.k_SRD,
                                                 key * g.groups + h / g.heads_per_group, D);
          mean += std::exp(a - value_at(in.lse_TH, t * H + h)) / H;
        }
        for (int64_t a = 0; a < A; ++a) {
          score += value_at(in.w_TA, t * A + a) *
                   std::max(0.0, dot(in.qx_TAX, t * A + a, in.kx_SX, key, X)) * factor;
        }
        teacher.push_back(mean);
        logits.push_back(score);
        sum += std::exp(score);
      }
      for (size_t s = 0; s < keys.size(); ++s) {
        const double log_student = logits[s] - std::log(sum);
        if (teacher[s] > 0) kl += teacher[s] * (std::log(teacher[s]) - log_student);
        const double di = weight * (std::exp(log_student) - teacher[s]);
        for (int64_t a = 0; a < A; ++a) {
          const double u = dot(in.qx_TAX, t * A + a, in.kx_SX, keys[s], X);
          if (u <= 0) continue;
          dw[t * A + a] += di * u * factor;
          const double du = di * value_at(in.w_TA, t * A + a) * factor;
          for (int64_t c = 0; c < X; ++c) {
            dqx[(t * A + a) * X + c] += du * value_at(in.kx_SX, keys[s] * X + c);
            dkx[keys[s] * X + c] += du * value_at(in.qx_TAX, (t * A + a) * X + c);
          }
        }
      }
      if (out.kl_T.defined()) set_value(out.kl_T, t, kl);
    }
  }
  for (size_t i = 0; i < dqx.size(); ++i) set_value(out.dqx_TAX, i, dqx[i]);
  for (size_t i = 0; i < dkx.size(); ++i) set_value(out.dkx_SX, i, dkx[i]);
  if (out.dw_TA.defined()) {
    for (size_t i = 0; i < dw.size(); ++i) set_value(out.dw_TA, i, dw[i]);
  }
}

}  // namespace m3
