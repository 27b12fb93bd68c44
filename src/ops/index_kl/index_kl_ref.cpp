#include <cmath>
#include <limits>
#include <vector>

#include "ops/common/msa_support.h"
#include "ops/common/values.h"
#include "ops/index_kl/index_kl.h"

namespace m3 {
namespace {

double dot(const Tensor& a, int64_t at_a, const Tensor& b, int64_t at_b, int count) {
  double sum = 0;
  for (int c = 0; c < count; ++c) sum += value_at(a, at_a + c) * value_at(b, at_b + c);
  return sum;
}

}  // namespace

void index_kl_ref(const MsaGeometry& g, const MsaBatch& batch, const AttendSupport& support, double weight,
                  const IndexKlInputs& in, const IndexKlOutputs& out) {
  g.check();
  batch.check(g.block);
  const int D = g.head_dim, X = g.index_dim, R = g.groups, G = g.heads_per_group;
  const double scale = g.logit_scale(), scale_x = g.index_scale();
  std::vector<double> dqi(out.dqi_TRX.numel(), 0.0), dki(out.dki_SX.numel(), 0.0);
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      const int64_t t = batch.q_begin(n) + i, p = batch.first_position(n) + i;
      for (int r = 0; r < R; ++r) {
        const auto positions = msa_visible_positions(g, batch, support, in.lists, t, p, r);
        const int64_t query = (t * R + r) * X;
        std::vector<double> teacher, logit;
        double maximum = -std::numeric_limits<double>::infinity();
        for (int64_t j : positions) {
          const int64_t key = batch.k_begin(n) + j;
          double mean = 0;
          for (int h = r * G; h < (r + 1) * G; ++h) {
            const double a = scale * dot(in.q_THD, (t * R * G + h) * D, in.k_SRD, (key * R + r) * D, D);
            mean += std::exp(a - value_at(in.lse_TH, t * R * G + h)) / G;
          }
          teacher.push_back(mean);
          logit.push_back(scale_x * dot(in.qi_TRX, query, in.ki_SX, key * X, X));
          maximum = std::max(maximum, logit.back());
        }
        double sum = 0, kl = 0;
        for (double z : logit) sum += std::exp(z - maximum);
        const double lse_x = maximum + std::log(sum);
        for (size_t s = 0; s < positions.size(); ++s) {
          const double pt = teacher[s], log_student = logit[s] - lse_x;
          if (pt > 0) kl += pt * (std::log(pt) - log_student);
          const double dz = weight * scale_x * (std::exp(log_student) - pt);
          const int64_t key = (batch.k_begin(n) + positions[s]) * X;
          for (int c = 0; c < X; ++c) {
            dqi[query + c] += dz * value_at(in.ki_SX, key + c);
            dki[key + c] += dz * value_at(in.qi_TRX, query + c);
          }
        }
        if (out.kl_RT.defined()) set_value(out.kl_RT, r * batch.num_queries + t, kl);
        if (out.lse_x_RT.defined()) set_value(out.lse_x_RT, r * batch.num_queries + t, lse_x);
      }
    }
  }
  for (size_t i = 0; i < dqi.size(); ++i) set_value(out.dqi_TRX, i, dqi[i]);
  for (size_t i = 0; i < dki.size(); ++i) set_value(out.dki_SX, i, dki[i]);
}

}  // namespace m3
