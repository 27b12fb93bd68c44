#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/common/msa_keys.h"
#include "ops/index_select/index_select.h"

namespace m3 {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Scored {
  double score;
  int32_t id;
};

// M of one block: the maximum over its visible positions [begin, end).
double block_score(const MsaKeys& keys, int seq, const std::vector<double>& query, int64_t begin, int64_t end) {
  double best = -kInf;
  std::vector<double> key(query.size());
  for (int64_t j = begin; j < end; ++j) {
    load_row(keys.row(seq, j, 0), keys.dtype(), keys.dim(), key.data());
    double z = 0;
    for (size_t c = 0; c < query.size(); ++c) z += query[c] * key[c];
    if (!std::isnan(z)) best = std::max(best, z);
  }
  return best + 0.0;  // -0 becomes +0
}

}  // namespace

void index_select_ref(const MsaGeometry& g, const MsaBatch& batch, const IndexSelectOptions& options,
                      const Tensor& qi_TRX, const Tensor& ki, const Tensor& ids_RTK, const Tensor& sel_scores_RTK) {
  g.check();
  batch.check(g.block);
  const MsaKeys keys("ki", batch, ki, g.block, 0, g.index_dim);
  const int64_t T = batch.num_queries;
  const int K = g.topk;
  std::vector<double> query(g.index_dim);
  for (int n = 0; n < batch.num_seqs; ++n) {
    for (int64_t i = 0; i < batch.q_len(n); ++i) {
      const int64_t t = batch.q_begin(n) + i, p = batch.first_position(n) + i;
      const int64_t own = p / g.block;
      for (int r = 0; r < g.groups; ++r) {
        int32_t* ids = ids_RTK.ptr<int32_t>() + (r * T + t) * K;
        float* scores = options.sel_scores ? sel_scores_RTK.ptr<float>() + (r * T + t) * K : nullptr;
        std::fill_n(ids, K, -1);
        if (scores != nullptr) std::fill_n(scores, K, -std::numeric_limits<float>::infinity());
        if (p < 0) continue;

        const bool want_scores = own + 1 > K || options.sel_scores || options.order == SelectOrder::kScore;
        for (int c = 0; c < g.index_dim; ++c) {
          query[c] = load_element(qi_TRX.data(), qi_TRX.dtype(), (t * g.groups + r) * g.index_dim + c);
        }
        std::vector<Scored> chosen, history;
        for (int32_t b = 0; b <= own; ++b) {
          const bool forced = b > own - g.local || b < g.init;
          if (forced) {
            chosen.push_back({kInf, b});
          } else {
            const int64_t begin = int64_t{b} * g.block, end = std::min(begin + g.block, p + 1);
            history.push_back({want_scores ? block_score(keys, n, query, begin, end) : 0.0, b});
          }
        }
        const auto better = [](const Scored& a, const Scored& b) {
          return a.score != b.score ? a.score > b.score : a.id < b.id;
        };
        std::sort(history.begin(), history.end(), better);
        const size_t num_selected = std::min<int64_t>(K, own + 1);
        history.resize(num_selected - chosen.size());
        chosen.insert(chosen.end(), history.begin(), history.end());
        if (options.order == SelectOrder::kAscending) {
          std::sort(chosen.begin(), chosen.end(), [](const Scored& a, const Scored& b) { return a.id < b.id; });
        } else {  // forced blocks count as +inf; the own block closes the list
          std::sort(chosen.begin(), chosen.end(), better);
          std::stable_partition(chosen.begin(), chosen.end(), [&](const Scored& s) { return s.id != own; });
        }
        for (size_t s = 0; s < chosen.size(); ++s) {
          ids[s] = chosen[s].id;
          if (scores != nullptr) scores[s] = static_cast<float>(chosen[s].score);
        }
      }
    }
  }
}

}  // namespace m3
