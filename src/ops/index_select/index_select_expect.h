// What the tests of index_select on every device share: a selection and its comparison with the reference.
#pragma once
#include <gtest/gtest.h>

#include <set>

#include "ops/common/msa_test_data.h"

namespace m3::msa_test {

struct Selection {
  std::vector<int32_t> ids;   // [R, T, K]
  std::vector<float> scores;  // the same, or empty
  bool operator==(const Selection&) const = default;
};

// M of every block of a row, in fp64.
inline std::vector<double> block_scores(const Data& d, int n, int64_t i, int r, double* norm_product) {
  const int64_t p = d.seq_lens[n] - (d.cu_q[n + 1] - d.cu_q[n]) + i, t = d.cu_q[n] + i;
  std::vector<double> best(p / d.g.block + 1, -INFINITY);
  double q_norm = 0, k_norm = 0;
  for (int c = 0; c < d.g.index_dim; ++c) q_norm += std::pow(d.qi.get((t * d.g.groups + r) * d.g.index_dim + c), 2);
  for (int64_t j = 0; j <= p; ++j) {
    double z = 0, norm = 0;
    for (int c = 0; c < d.g.index_dim; ++c) {
      const double x = d.ki.get((d.cu_k[n] + j) * d.g.index_dim + c);
      z += x * d.qi.get((t * d.g.groups + r) * d.g.index_dim + c);
      norm += x * x;
    }
    k_norm = std::max(k_norm, norm);
    if (!std::isnan(z)) best[j / d.g.block] = std::max(best[j / d.g.block], z);
  }
  *norm_product = std::sqrt(q_norm * k_norm);
  return best;
}

// Ids equal the reference's, or differ only inside the near-tie band of msa.md §14. Returns how many rows differ.
inline int expect_same_ids(const Data& d, const Selection& got, const Selection& want, const std::string& what) {
  int num_different = 0;
  const int K = d.g.topk;
  for (int n = 0; n < d.num_seqs(); ++n) {
    for (int64_t i = 0; i < d.cu_q[n + 1] - d.cu_q[n]; ++i) {
      for (int r = 0; r < d.g.groups; ++r) {
        const int64_t at = (r * d.T() + d.cu_q[n] + i) * K;
        const std::vector<int32_t> a(&got.ids[at], &got.ids[at] + K), b(&want.ids[at], &want.ids[at] + K);
        if (a == b) continue;
        ++num_different;
        double norms;
        const std::vector<double> M = block_scores(d, n, i, r, &norms);
        const double tau = 3e-5 * norms;
        const int64_t own = static_cast<int64_t>(M.size()) - 1;
        const std::set<int32_t> chosen(a.begin(), a.end());
        double last = INFINITY;
        for (int32_t id : b) {
          if (id >= 0 && id >= d.g.init && id <= own - d.g.local) last = std::min(last, M[id]);
        }
        for (int64_t id = d.g.init; id <= own - d.g.local; ++id) {
          const bool is_chosen = chosen.count(static_cast<int32_t>(id)) > 0;
          EXPECT_TRUE(is_chosen ? M[id] >= last - tau : M[id] <= last + tau)
              << what << " seed " << d.seed << ": sequence " << n << " row " << i << " group " << r << " block " << id
              << " score " << M[id] << " last chosen " << last << " band " << tau;
        }
      }
    }
  }
  return num_different;
}

// The list rules that hold whatever the scores are (msa.md §3).
inline void expect_well_formed(const Data& d, const Selection& s) {
  const int K = d.g.topk;
  for (int n = 0; n < d.num_seqs(); ++n) {
    const int64_t first = d.seq_lens[n] - (d.cu_q[n + 1] - d.cu_q[n]);
    for (int64_t t = d.cu_q[n]; t < d.cu_q[n + 1]; ++t) {
      const int64_t p = first + t - d.cu_q[n];
      const int64_t own = p < 0 ? -1 : p / d.g.block;
      for (int r = 0; r < d.g.groups; ++r) {
        const int32_t* ids = &s.ids[(r * d.T() + t) * K];
        const int64_t num = std::min<int64_t>(K, own + 1);
        for (int slot = 0; slot < K; ++slot) {
          if (slot >= num) {
            ASSERT_EQ(ids[slot], -1) << "row " << t << " group " << r << " slot " << slot;
          } else {
            ASSERT_TRUE(ids[slot] >= 0 && ids[slot] <= own && (slot == 0 || ids[slot] > ids[slot - 1]))
                << "row " << t << " group " << r << " slot " << slot << " id " << ids[slot];
          }
        }
        if (num > 0 && d.g.local > 0) {
          ASSERT_EQ(ids[num - 1], own) << "row " << t << " group " << r;
        }
      }
    }
  }
}

}  // namespace m3::msa_test
