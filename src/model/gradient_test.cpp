// Every gradient of the model against finite differences of an independent fp64 model
// (reference_model.h).
#include <gtest/gtest.h>

#include "model/reference_model.h"
#include "model/train_test_support.h"

namespace m3 {
namespace {

using namespace m3::testing;

bool is_index(const std::string& name) {
  return name.find("index_") != std::string::npos;
}
bool is_router_bias(const std::string& name) {
  return name.ends_with("e_score_correction_bias");
}

// Around the borders of blocks (8) and of the selection budget (16), with a picture and a clip of
// five steps.
std::vector<TestDocument> few_documents() {
  return {{1, {}, 11}, {9, {}, 12}, {18, {{5, 2, 2}}, 13}, {12, {{1, 2, 4}}, 14}};
}

// Loss of the reference that a parameter is trained on, as the trainer weighs it.
double loss_of(ReferenceModel& reference, const TestPack& pack, const TrainOptions& options,
               bool index) {
  const auto sums = reference.losses(pack.batch(), options.stage);
  const Normalisers n = normalisers_of(pack.batch(), options);
  const double groups =
      options.stage == TrainStage::kDsa ? 1 : tiny_train_config().text.num_kv_heads;
  if (index) return n.kl_queries > 0 ? options.lambda * sums.kl / (n.kl_queries * groups) : 0;
  return (sums.ce + options.z_weight * sums.z) / n.target_weight +
         options.balance_alpha * sums.balance / n.num_tokens;
}

// Each tensor along one random direction: d loss = <gradient, direction>, whose standard deviation
// is the gradient's norm. `index_loss_too`: for the run without stop-gradient, where the KL reaches
// the backbone.
void expect_gradients(TrainSet& set, const TestPack& pack, const TrainOptions& options,
                      bool index_loss_too = false) {
  ReferenceModel reference(set.config, set.weights);
  uint64_t stream = 100;
  for_each_parameter(set.config, set.gradients, [&](const std::string& name, const Tensor& g) {
    if (is_router_bias(name)) return;
    if (index_loss_too && name.ends_with("self_attn.q_proj.weight")) return;  // moves the teacher
    Philox rng(3, stream++);
    Vector direction(g.numel());
    double along = 0, norm = 0;
    for (int64_t i = 0; i < g.numel(); ++i) {
      direction[i] = rng.normal();
      along += direction[i] * g.ptr<float>()[i];
      norm += double{g.ptr<float>()[i]} * g.ptr<float>()[i];
    }
    Vector& values = reference.parameters.at(name);
    const Vector saved = values;
    const auto moved = [&](double step) {
      for (size_t i = 0; i < values.size(); ++i) values[i] = saved[i] + step * direction[i];
      double loss = loss_of(reference, pack, options, is_index(name));
      if (index_loss_too && !is_index(name)) loss += loss_of(reference, pack, options, true);
      return loss;
    };
    constexpr double kStep = 2e-6;
    const double want = (moved(kStep) - moved(-kStep)) / (2 * kStep);
    values = saved;
    EXPECT_NEAR(along, want, 1e-4 * std::sqrt(norm) + 1e-8) << name;
  });
}

class EveryStage : public ::testing::TestWithParam<TrainStage> {};
INSTANTIATE_TEST_SUITE_P(Train, EveryStage,
                         ::testing::Values(TrainStage::kWarmup, TrainStage::kSparse,
                                           TrainStage::kFull, TrainStage::kWindow,
                                           TrainStage::kDsa),
                         [](const auto& info) { return train_stage_name(info.param); });

TEST_P(EveryStage, losses_and_gradients_equal_finite_differences_in_fp64) {
  TrainSet set;
  const TestPack pack(set.config, few_documents());
  TrainOptions options = f32_options(GetParam());
  options.z_weight = 0.01f;
  options.balance_alpha = 0.3f;
  const TrainSums sums = run_step(set, options, {&pack});
  const auto want = ReferenceModel(set.config, set.weights).losses(pack.batch(), options.stage);
  EXPECT_NEAR(sums.ce / want.ce, 1, 1e-6);
  EXPECT_NEAR(sums.logz2 / want.z, 1, 1e-6);
  double kl = 0, balance = 0;
  for (double x : sums.kl_L) kl += x;
  for (double x : sums.balance_L) balance += x;
  EXPECT_NEAR(kl, want.kl, 1e-5 * want.kl);
  EXPECT_NEAR(balance / want.balance, 1, 1e-6);
  expect_gradients(set, pack, options);
}

// A NaN of a peer came from experts without tokens, another lost the gate's gradient of a replayed
// choice.
TEST(Gradient, zero_and_all_tokens_to_one_expert_and_the_gate_gradient_of_a_forced_expert) {
  TrainSet set;
  for (LayerWeights& layer : set.weights.text.layers) {
    if (!layer.ffn.router_bias_E.defined()) continue;
    layer.ffn.router_bias_E.ptr<float>()[2] = 10;   // chosen by every token
    layer.ffn.router_bias_E.ptr<float>()[4] = -10;  // by none
  }
  const TestPack pack(set.config, few_documents());
  const TrainOptions options = f32_options(TrainStage::kSparse);
  const TrainSums sums = run_step(set, options, {&pack});
  const int E = set.config.text.num_experts;
  EXPECT_EQ(sums.text_experts_LE[E + 2] + sums.media_experts_LE[E + 2], pack.num_tokens());
  EXPECT_EQ(sums.text_experts_LE[E + 4] + sums.media_experts_LE[E + 4], 0);
  const ExpertWeights& unused = set.gradients.text.layers[1].ffn.routed[4];
  for (const Weight* w : {&unused.gate_FC, &unused.up_FC, &unused.down_CF}) {
    for (int64_t i = 0; i < w->values.numel(); ++i) ASSERT_EQ(w->values.ptr<float>()[i], 0);
  }
  expect_gradients(set, pack, options);
}

TEST(Gradient, without_the_stop_gradient_the_kl_reaches_the_backbone_through_the_index_input) {
  // With W_q = 0 all logits are 0 and the teacher is constant, as the formula wants it; only the
  // student is left to vary.
  TrainSet set;
  for (LayerWeights& layer : set.weights.text.layers) fill_zero(layer.attention.q.values);
  const TestPack pack(set.config, few_documents());
  TrainOptions options = f32_options(TrainStage::kWarmup);
  options.detach_index_input = false;
  run_step(set, options, {&pack});
  expect_gradients(set, pack, options, true);
}

}  // namespace
}  // namespace m3
