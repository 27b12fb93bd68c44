// Instruments of a step against plain fp64 loops (model/reference_model.h).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "model/reference_model.h"
#include "model/train_test_support.h"
#include "train/activity_probe.h"
#include "train/selection_probe.h"

namespace m3::train {
namespace {

using testing::f32_options;
using testing::ReferenceModel;
using testing::TestPack;
using testing::TrainSet;

constexpr int kAllRows = 1000;

class Probes : public ::testing::TestWithParam<TrainStage> {};

TEST_P(Probes, ActivityIsThatOfTheReference) {
  ModelConfig config = testing::tiny_train_config();
  config.text.swiglu_limit = 1.0f;  // so that some values lie beyond it
  TrainSet set(config);
  const TestPack pack(config, testing::uneven_documents());
  const MicroBatch batch = pack.batch();
  TrainableModel model(config, set.weights, set.gradients, f32_options(GetParam()),
                       {pack.num_tokens(), pack.num_patches});
  const std::vector<LayerActivity> got = probe_activity(model, batch, kAllRows);

  const auto want = ReferenceModel(config, set.weights).losses(batch, GetParam()).layers;
  double media_rows = 0;
  for (const TrainMedia& item : batch.media) media_rows += static_cast<double>(item.rows.size());
  const double rows = static_cast<double>(pack.num_tokens());
  ASSERT_EQ(got.size(), 3u);
  for (const LayerActivity& layer : got) {
    const ReferenceModel::Losses::Layer& sums = want.at(layer.layer);
    EXPECT_NEAR(layer.text_rms, std::sqrt(sums.text_square / (rows - media_rows)), 1e-4);
    EXPECT_NEAR(layer.media_rms, std::sqrt(sums.media_square / media_rows), 1e-4);
    EXPECT_NEAR(layer.entropy, sums.entropy / (rows * config.text.num_heads), 1e-4);
    EXPECT_GT(sums.clamped, 10);
    EXPECT_NEAR(layer.clamped, sums.clamped / sums.gates, 1.5 / sums.gates);
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, Probes,
                         ::testing::Values(TrainStage::kSparse, TrainStage::kWarmup,
                                           TrainStage::kFull),
                         [](const auto& info) { return train_stage_name(info.param); });

// Logits and masses of every row by plain loops over q, k and lists of the same pass; norms from the
// weights and the normalised stream.
TEST_P(Probes, AttentionIsWhatPlainLoopsSee) {
  ModelConfig config = testing::tiny_train_config();
  TrainSet set(config);
  const TestPack pack(config, testing::uneven_documents());
  const MicroBatch batch = pack.batch();
  TrainableModel model(config, set.weights, set.gradients, f32_options(GetParam()),
                       {pack.num_tokens(), pack.num_patches});
  const std::vector<LayerActivity> got = probe_activity(model, batch, kAllRows);

  const TextConfig& c = config.text;
  const int T = static_cast<int>(pack.num_tokens()), D = c.head_dim, G = c.heads_per_group();
  std::vector<bool> is_media(T);
  for (const TrainMedia& item : batch.media)
    for (const int32_t row : item.rows) is_media[row] = true;
  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    const AttentionActs& acts = *layer.attention;
    const float *q = acts.q_THD.ptr<float>(), *k = acts.k_TRD.ptr<float>();
    LayerActivity want;
    want.largest_logit = -1e9;
    want.media_mass = want.media_share = 0;
    int rows = 0, media_rows = 0;
    for (size_t doc = 0; doc + 1 < batch.cu_seqlens.size(); ++doc) {
      const int begin = batch.cu_seqlens[doc];
      for (int t = begin; t < batch.cu_seqlens[doc + 1]; ++t) {
        bool behind = false;
        for (int j = begin; j < t; ++j) behind = behind || is_media[j];
        behind = behind && !is_media[t];
        for (int h = 0; h < c.num_heads; ++h) {
          const int r = h / G;
          std::map<int, double> logits;  // by key
          for (int j = begin; j <= t; ++j) {
            bool sees = true;
            if (GetParam() == TrainStage::kSparse && c.is_sparse[layer.index]) {
              const int32_t* ids = acts.lists.ptr<int32_t>() + (int64_t{r} * T + t) * c.topk_blocks;
              sees = std::count(ids, ids + c.topk_blocks, (j - begin) / c.block_size) > 0;
            }
            double dot = 0;
            for (int d = 0; d < D; ++d)
              dot += double{q[(t * c.num_heads + h) * D + d]} * k[(j * c.num_kv_heads + r) * D + d];
            if (sees) logits[j] = dot / std::sqrt(D);
          }
          double sum = 0, media = 0, share = 0;
          for (const auto& [j, logit] : logits) sum += std::exp(logit);
          for (const auto& [j, logit] : logits) {
            const double p = std::exp(logit) / sum;
            want.largest_logit = std::max(want.largest_logit, logit);
            if (j == begin) want.first_mass += p;
            if ((j - begin) / c.block_size == (t - begin) / c.block_size) want.own_block_mass += p;
            if (is_media[j]) media += p, share += 1.0 / static_cast<double>(logits.size());
          }
          if (behind) want.media_mass += media, want.media_share += share;
        }
        ++rows;
        media_rows += behind;
      }
    }
    ASSERT_GT(media_rows, 5);
    const LayerActivity& activity = got.at(layer.index);
    EXPECT_NEAR(activity.largest_logit, want.largest_logit, 1e-9);
    EXPECT_NEAR(activity.first_mass, want.first_mass / (rows * c.num_heads), 1e-9);
    EXPECT_NEAR(activity.own_block_mass, want.own_block_mass / (rows * c.num_heads), 1e-9);
    EXPECT_NEAR(activity.media_mass, want.media_mass / (media_rows * c.num_heads), 1e-9);
    EXPECT_NEAR(activity.media_share, want.media_share / (media_rows * c.num_heads), 1e-9);
    // q before its norm: h times the projection.
    const AttentionWeights& weights = set.weights.text.layers[layer.index].attention;
    const float* h_TC = acts.h_TC.ptr<float>();
    const auto largest = [&](const Tensor& matrix) {
      double most = 0;
      for (int t = 0; t < T; ++t) {
        for (int64_t head = 0; head < matrix.dim(0) / D; ++head) {
          double squares = 0;
          for (int64_t d = head * D; d < (head + 1) * D; ++d) {
            double dot = 0;
            for (int x = 0; x < c.hidden_size; ++x)
              dot += double{h_TC[t * c.hidden_size + x]} *
                     matrix.ptr<float>()[d * c.hidden_size + x];
            squares += dot * dot;
          }
          most = std::max(most, squares);
        }
      }
      return std::sqrt(most);
    };
    EXPECT_NEAR(activity.largest_q, largest(weights.q.values), 1e-4);
    EXPECT_NEAR(activity.largest_k, largest(weights.k.values), 1e-4);
  };
  model.forward_only(batch, &trace);
}

// Every block of one query by hand, from q, k and the lists of the same pass.
TEST(SelectionProbe, QualityIsThatOfTheDenseAttention) {
  ModelConfig config = testing::tiny_train_config();
  config.text.topk_blocks = 3;
  TrainSet set(config);
  const TestPack pack(config, {{61, {}, 5}});
  TrainableModel model(config, set.weights, set.gradients, f32_options(TrainStage::kSparse),
                       {pack.num_tokens(), 0});
  const std::vector<SelectionQuality> got = probe_selection(model, pack.batch(), kAllRows);

  const TextConfig& c = config.text;
  const int B = c.block_size, K = c.topk_blocks, G = c.heads_per_group(), D = c.head_dim;
  std::vector<SelectionQuality> want;
  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    if (!c.is_sparse[layer.index]) return;
    SelectionQuality sum;
    int count = 0;
    const float *q = layer.attention->q_THD.ptr<float>(), *k = layer.attention->k_TRD.ptr<float>();
    for (int t = K * B; t < 61; ++t) {
      for (int r = 0; r < c.num_kv_heads; ++r, ++count) {
        std::vector<double> mass(t / B + 1);
        for (int g = 0; g < G; ++g) {
          std::vector<double> p;
          double total = 0;
          for (int j = 0; j <= t; ++j) {
            double dot = 0;
            for (int d = 0; d < D; ++d)
              dot += double{q[(t * c.num_heads + r * G + g) * D + d]} *
                     k[(j * c.num_kv_heads + r) * D + d];
            p.push_back(std::exp(dot / std::sqrt(D)));
            total += p.back();
          }
          for (int j = 0; j <= t; ++j) mass[j / B] += p[j] / total / G;
        }
        std::set<int> best = {t / B}, chosen;  // the own block is forced
        while (static_cast<int>(best.size()) < K) {
          int top = -1;
          for (int b = 0; b < t / B; ++b)
            if (!best.contains(b) && (top < 0 || mass[b] > mass[top])) top = b;
          best.insert(top);
        }
        const int32_t* ids = layer.attention->lists.ptr<int32_t>() + (r * 61 + t) * K;
        for (int i = 0; i < K; ++i) chosen.insert(ids[i]);
        double best_mass = 0, both_mass = 0, both = 0;
        for (const int b : best) best_mass += mass[b];
        for (const int b : chosen) {
          sum.captured += mass[b];
          if (!best.contains(b)) continue;
          both_mass += mass[b];
          both += 1;
        }
        sum.oracle += best_mass;
        sum.block_recall += both / K;
        sum.score_recall += both_mass / best_mass;
      }
    }
    for (double* value : {&sum.captured, &sum.oracle, &sum.block_recall, &sum.score_recall})
      *value /= count;
    want.push_back(sum);
  };
  model.forward_only(pack.batch(), &trace);
  ASSERT_EQ(got.size(), 2u);
  ASSERT_EQ(want.size(), 2u);
  for (int i = 0; i < 2; ++i) {
    EXPECT_NEAR(got[i].captured, want[i].captured, 1e-9);
    EXPECT_NEAR(got[i].oracle, want[i].oracle, 1e-9);
    EXPECT_NEAR(got[i].block_recall, want[i].block_recall, 1e-9);
    EXPECT_NEAR(got[i].score_recall, want[i].score_recall, 1e-9);
    EXPECT_LT(got[i].captured, got[i].oracle);
    EXPECT_LE(got[i].score_recall, got[i].captured / got[i].oracle + 1e-9);  // msa.md §8.6
  }
}

}  // namespace
}  // namespace m3::train
