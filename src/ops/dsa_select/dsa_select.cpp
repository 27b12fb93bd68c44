// dsa_select on the CPU. Query rows go in small waves: all threads share the keys of a wave (a tile is
// packed once and meets every head of every query of the wave), then every row takes its best tokens.
// Memory: two fp32 scores per (row of the wave, key).
#include "ops/dsa_select/dsa_select.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/common/msa_kernels.h"
#include "ops/common/msa_keys.h"
#include "ops/common/msa_workers.h"

namespace m3 {
namespace {

constexpr int kWaveQueries = 8;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Scratch {
  uint32_t* keys;   // a packed tile
  float *products, *sums;
};

Scratch take_scratch(MsaCarver& carver, const DsaGeometry& g) {
  Scratch s;
  s.keys = carver.take<uint32_t>(int64_t{kMsaTileKeys} * g.index_dim);
  s.products = carver.take<float>(kMsaBatchRows * kMsaTileKeys);
  s.sums = carver.take<float>(kMsaTileKeys);
  return s;
}

// What the threads of a wave share.
struct Wave {
  uint32_t* rows;  // [kWaveQueries, A, X] words
  float* scores;   // [kWaveQueries, max_k_len]
  float* ranked;   // the same size
};

Wave take_wave(MsaCarver& carver, const DsaSelectPlan& plan) {
  const DsaGeometry& g = plan.geometry;
  Wave w;
  w.rows = carver.take<uint32_t>(int64_t{kWaveQueries} * g.heads * g.index_dim);
  w.scores = carver.take<float>(kWaveQueries * plan.max_k_len);
  w.ranked = carver.take<float>(kWaveQueries * plan.max_k_len);
  return w;
}

// The `budget` best of scores[0, count), ties to the lower position, ascending; -1 behind.
void take_best(const float* scores, int64_t count, int64_t budget, float* ranked, int32_t* tokens) {
  float threshold = -kInf;
  int64_t at_threshold = budget;  // how many that equal it are taken: the first ones
  if (count > budget) {
    std::copy(scores, scores + count, ranked);
    std::nth_element(ranked, ranked + budget - 1, ranked + count, std::greater<float>());
    threshold = ranked[budget - 1];
    for (int64_t j = 0; j < budget; ++j) at_threshold -= ranked[j] > threshold;
  }
  int64_t slot = 0;
  for (int64_t j = 0; j < count && slot < budget; ++j) {
    if (scores[j] > threshold || (scores[j] == threshold && at_threshold-- > 0)) tokens[slot++] = static_cast<int32_t>(j);
  }
  std::fill(tokens + slot, tokens + budget, -1);
}

struct Call {
  const DsaSelectPlan& plan;
  const MsaBatch& batch;
  const Tensor& qx_TAX;
  const float* w_TA;
  int32_t* tokens_TK;
  const MsaKeys keys;
  const MsaKernels& kernels;
  void* workspace;
};

// Scores of `count` queries of sequence n, from query row `first` on, against keys [begin, begin + num_keys).
void score_tile(const Call& call, const Wave& wave, const Scratch& s, int n, int64_t first, int count, int64_t begin,
                int num_keys) {
  const DsaGeometry& g = call.plan.geometry;
  const int steps = call.kernels.steps(g.index_dim);
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(g.heads) * g.index_dim));
  const void* rows[kMsaTileKeys];
  call.keys.rows(n, begin, num_keys, 0, rows);
  call.kernels.pack_keys(rows, num_keys, g.index_dim, call.keys.dtype(), s.keys, {});
  for (int i = 0; i < count; ++i) {
    call.kernels.score_relu(wave.rows + int64_t{i} * g.heads * steps, g.heads, steps, s.keys, num_keys,
                            call.w_TA + (call.batch.q_begin(n) + first + i) * g.heads, s.products, s.sums);
    float* out = wave.scores + i * call.plan.max_k_len + begin;
    for (int j = 0; j < num_keys; ++j) {
      const float score = s.sums[j] * factor + 0.0f;  // -0 becomes +0
      out[j] = std::isnan(score) ? -kInf : score;
    }
  }
}

void run_wave(const Call& call, const Wave& wave, int n, int64_t first, int count) {
  const DsaGeometry& g = call.plan.geometry;
  const int64_t num_rows = int64_t{count} * g.heads, q_begin = call.batch.q_begin(n) + first;
  const DType dtype = call.qx_TAX.dtype();
  const int steps = call.kernels.steps(g.index_dim);
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t element = (q_begin * g.heads + i) * g.index_dim;
    call.kernels.pack_row(static_cast<const char*>(call.qx_TAX.data()) + element * dtype_bytes(dtype), g.index_dim, dtype,
                          wave.rows + i * steps);
  }
  const int64_t last = call.batch.first_position(n) + first + count;  // one behind the wave's newest position
  msa_for_each_item((last + kMsaTileKeys - 1) / kMsaTileKeys, call.plan.num_threads, [&](int64_t tile, int worker) {
    MsaCarver carver(call.workspace);
    take_wave(carver, call.plan);
    for (int t = 0; t < worker; ++t) take_scratch(carver, g);
    const int64_t begin = tile * kMsaTileKeys;
    score_tile(call, wave, take_scratch(carver, g), n, first, count, begin,
               static_cast<int>(std::min<int64_t>(kMsaTileKeys, last - begin)));
  });
  msa_for_each_item(count, call.plan.num_threads, [&](int64_t i, int) {
    const int64_t visible = call.batch.first_position(n) + first + i + 1;
    take_best(wave.scores + i * call.plan.max_k_len, std::max<int64_t>(visible, 0), g.budget,
              wave.ranked + i * call.plan.max_k_len, call.tokens_TK + (q_begin + i) * g.budget);
  });
}

}  // namespace

void DsaGeometry::check() const {
  M3_CHECK(heads >= 1 && heads <= 1024, "DSA geometry: heads is {}, supported are 1 to 1024", heads);
  M3_CHECK(index_dim >= 1 && index_dim <= kMsaMaxDim, "DSA geometry: index_dim is {}, supported are 1 to {}", index_dim,
           kMsaMaxDim);
  M3_CHECK(block >= 1, "DSA geometry: block is {}, want at least 1", block);
  M3_CHECK(budget >= 1, "DSA geometry: budget is {}, want at least 1", budget);
}

DsaSelectPlan dsa_select_plan(const DsaGeometry& geometry, const MsaBatch& batch, Device device) {
  geometry.check();
  M3_CHECK(device.is_cpu(), "dsa_select has no implementation for {}", device.str());
  batch.check(geometry.block);
  DsaSelectPlan plan{.geometry = geometry, .device = device, .num_queries = batch.num_queries};
  for (int n = 0; n < batch.num_seqs; ++n) plan.max_k_len = std::max(plan.max_k_len, batch.k_len(n));
  plan.num_threads = num_threads();
  MsaCarver carver(nullptr);
  take_wave(carver, plan);
  for (int t = 0; t < plan.num_threads; ++t) take_scratch(carver, geometry);
  plan.workspace_bytes = carver.bytes();
  return plan;
}

void dsa_select(const DsaSelectPlan& plan, const MsaBatch& batch, const Tensor& qx_TAX, const Tensor& kx,
                const Tensor& w_TA, const Tensor& tokens_TK, void* workspace, Stream stream) {
  const DsaGeometry& g = plan.geometry;
  const int64_t T = plan.num_queries;
  M3_CHECK(batch.num_queries == T, "dsa_select: the plan was made for {} query rows, got {}", T, batch.num_queries);
  msa_check_tensor("qx_TAX", qx_TAX, {T, g.heads, g.index_dim}, plan.device);
  msa_check_float("qx_TAX", qx_TAX);
  msa_check_tensor("w_TA", w_TA, {T, g.heads}, plan.device);
  msa_check_tensor("tokens_TK", tokens_TK, {T, g.budget}, plan.device);
  if (T == 0) return;
  const MsaKeys keys("kx", batch, kx, g.block, 0, g.index_dim);
  const Call call = {plan, batch, qx_TAX, w_TA.ptr<float>(), tokens_TK.ptr<int32_t>(), keys,
                     msa_kernels(qx_TAX.dtype() == DType::kBF16 && keys.dtype() == DType::kBF16), workspace};
  MsaCarver carver(workspace);
  const Wave wave = take_wave(carver, plan);
  for (int n = 0; n < batch.num_seqs; ++n) {
    M3_CHECK(batch.k_len(n) <= plan.max_k_len, "dsa_select: the plan was made for {} keys, sequence {} has {}",
             plan.max_k_len, n, batch.k_len(n));
    for (int64_t first = 0; first < batch.q_len(n); first += kWaveQueries) {
      run_wave(call, wave, n, first, static_cast<int>(std::min<int64_t>(kWaveQueries, batch.q_len(n) - first)));
    }
  }
}

}  // namespace m3
