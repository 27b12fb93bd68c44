// Training against itself: packs, micro-batches, recomputation, threads and repetition change
// nothing; the two losses stay apart. What the right gradients are is checked by gradient_test.cpp
// and the goldens (verify_training.cpp).
#include "model/trainable_model.h"

#include <gtest/gtest.h>

#include "base/threads.h"
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
bool is_vision(const std::string& name) {
  return name.find("language_model") == std::string::npos;
}
bool all_zero(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
}

using Gradients = std::vector<std::vector<float>>;

void expect_close(const TrainSet& set, const Gradients& got, const Gradients& want,
                  double tolerance) {
  const std::vector<std::string> names = set.names();
  for (size_t i = 0; i < names.size(); ++i)
    EXPECT_LE(relative_error(got[i], want[i]), tolerance) << names[i];
}

class Training : public ::testing::TestWithParam<TrainStage> {
 protected:
  TrainSet set;
  TrainOptions options = f32_options(GetParam());
  Gradients gradients(const std::vector<std::vector<TestDocument>>& packs) {
    std::vector<TestPack> owned;
    for (const auto& documents : packs) owned.emplace_back(set.config, documents);
    std::vector<const TestPack*> views;
    for (const TestPack& pack : owned) views.push_back(&pack);
    sums = run_step(set, options, views);
    return set.snapshot();
  }
  TrainSums sums;
};
INSTANTIATE_TEST_SUITE_P(Train, Training,
                         ::testing::Values(TrainStage::kWarmup, TrainStage::kSparse,
                                           TrainStage::kFull, TrainStage::kWindow,
                                           TrainStage::kDsa),
                         [](const auto& info) { return train_stage_name(info.param); });

// training.md §16: rotary positions of one row used for all; a loss mean over rows that packing
// changes.
TEST_P(Training,
       a_pack_of_uneven_documents_equals_each_document_alone_and_any_split_into_micro_batches) {
  const auto documents = uneven_documents();
  const Gradients together = gradients({documents});
  const TrainSums all = sums;
  std::vector<std::vector<TestDocument>> alone;
  for (const TestDocument& document : documents) alone.push_back({document});
  expect_close(set, gradients(alone), together, 1e-5);
  EXPECT_NEAR(sums.ce / all.ce, 1, 1e-6);
  EXPECT_EQ(sums.text_experts_LE, all.text_experts_LE);
  EXPECT_EQ(sums.media_experts_LE, all.media_experts_LE);
  const auto d = [&](int i) { return documents[i]; };
  expect_close(set, gradients({{d(5), d(0)}, {d(4), d(2), d(1)}, {d(3)}}), together, 1e-5);
}

// training.md §16: recomputation replays a stale plan; another token count in every micro-batch.
TEST_P(Training, recomputation_gives_the_same_bits_with_changing_token_counts) {
  const auto documents = uneven_documents();
  const std::vector<std::vector<TestDocument>> packs = {
      {documents[3], documents[0]}, {documents[4]}, documents};
  const Gradients kept = gradients(packs);
  const TrainSums kept_sums = sums;
  options.recompute = Recompute::kLayer;
  EXPECT_EQ(gradients(packs), kept);
  EXPECT_EQ(sums.ce, kept_sums.ce);
  EXPECT_EQ(sums.kl_L, kept_sums.kl_L);
}

TEST_P(Training, twenty_runs_and_any_number_of_threads_give_the_same_bits) {
  const Gradients first = gradients({uneven_documents()});
  const int before = num_threads();
  for (int run = 0; run < 20; ++run) {
    if (run % 9 == 0) set_num_threads(run / 9 + 1);  // 9 runs on one, 9 on two, 2 on three
    EXPECT_EQ(gradients({uneven_documents()}), first) << "run " << run;
  }
  set_num_threads(before);
}

TEST_P(Training, bf16_weights_and_activations_come_close) {
  // Dense layers and full attention only where choices could flip.
  ModelConfig config = tiny_train_config();
  config.text.is_moe = {0, 0, 0};
  const TrainSet exact(config);
  TrainSet rounded(config);
  rounded.arena = Arena(
      "test", 2 * parameter_bytes(config, DType::kF32) + parameter_bytes(config, DType::kBF16));
  rounded.weights = alloc_parameters(config, DType::kBF16, rounded.arena);
  rounded.gradients = alloc_parameters(config, DType::kF32, rounded.arena);
  std::vector<Tensor> from;
  for_each_parameter(config, exact.weights,
                     [&](const std::string&, const Tensor& t) { from.push_back(t); });
  size_t i = 0;
  for_each_parameter(config, rounded.weights,
                     [&](const std::string&, const Tensor& t) { cast(from[i++], t); });
  // The same rounded values in f32.
  TrainSet wide(config);
  i = 0;
  std::vector<Tensor> bf16_values;
  for_each_parameter(config, rounded.weights,
                     [&](const std::string&, const Tensor& t) { bf16_values.push_back(t); });
  for_each_parameter(config, wide.weights,
                     [&](const std::string&, const Tensor& t) { cast(bf16_values[i++], t); });

  const std::vector<TestDocument> documents = {
      {9, {}, 1}, {16, {{1, 2, 4}}, 2}, {12, {}, 3}};  // all blocks are chosen
  const TestPack pack(config, documents);
  run_step(wide, options, {&pack});
  options.dtype = DType::kBF16;
  options.activations = DType::kBF16;
  run_step(rounded, options, {&pack});
  const Gradients got = rounded.snapshot(), want = wide.snapshot();
  const std::vector<std::string> names = wide.names();
  for (size_t n = 0; n < names.size(); ++n) {
    // The ReLU of the lightning indexer is a choice too: rounding moves keys across it.
    const bool relu = GetParam() == TrainStage::kDsa && is_index(names[n]);
    EXPECT_LE(relative_error(got[n], want[n]), relu ? 0.2 : 5e-2) << names[n];
  }
}

// training.md §3, msa.md T44, T49: exact zeros both ways, and exactly the same bits whatever the
// other loss does.
TEST_P(Training, ce_never_reaches_the_index_and_the_kl_nothing_else) {
  const Gradients both = gradients({uneven_documents()});
  options.lambda = 0;
  const Gradients ce_only = gradients({uneven_documents()});
  options.lambda = 0.7;
  options.freeze = Freeze::kIndexOnly;
  const Gradients kl_only = gradients({uneven_documents()});
  options.freeze = Freeze::kFrozenIndex;
  const Gradients frozen = gradients({uneven_documents()});
  for (double kl : sums.kl_L) EXPECT_EQ(kl, 0);
  const std::vector<std::string> names = set.names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (is_router_bias(names[i])) {
      EXPECT_TRUE(all_zero(both[i])) << names[i];
    } else if (is_index(names[i])) {
      EXPECT_TRUE(all_zero(ce_only[i])) << names[i];
      EXPECT_TRUE(all_zero(frozen[i])) << names[i];
      EXPECT_EQ(all_zero(both[i]), !teaches_index(GetParam())) << names[i];
      EXPECT_EQ(kl_only[i], both[i]) << names[i];
    } else {
      EXPECT_TRUE(all_zero(kl_only[i])) << names[i];
      EXPECT_EQ(ce_only[i], both[i]) << names[i];
      EXPECT_EQ(frozen[i], both[i]) << names[i];
    }
  }
}

// training.md §16: tower and projector left out of training; a non-zero norm in some tensors proves
// nothing about others.
TEST_P(Training, every_parameter_has_a_gradient_and_a_pack_without_media_none_in_the_tower) {
  const Gradients with_media = gradients({uneven_documents()});
  const Gradients text = gradients({{{33, {}, 1}, {20, {}, 2}}});
  const std::vector<std::string> names = set.names();
  for (size_t i = 0; i < names.size(); ++i) {
    const bool expected =
        !is_router_bias(names[i]) && (teaches_index(GetParam()) || !is_index(names[i]));
    EXPECT_EQ(!all_zero(with_media[i]), expected) << names[i];
    if (is_vision(names[i])) {
      EXPECT_TRUE(all_zero(text[i])) << names[i];
    }
  }
  options.train_vision = false;
  const Gradients frozen = gradients({uneven_documents()});
  for (size_t i = 0; i < names.size(); ++i) {
    EXPECT_EQ(frozen[i], is_vision(names[i]) ? std::vector<float>(frozen[i].size()) : with_media[i])
        << names[i];
  }
}

class TrainingOnce : public Training {};
INSTANTIATE_TEST_SUITE_P(Train, TrainingOnce, ::testing::Values(TrainStage::kSparse),
                         [](const auto& info) { return train_stage_name(info.param); });

// training.md §16: all pictures in one bidirectional sequence; videos of different frame counts
// fail to batch.
TEST_P(TrainingOnce, two_images_in_one_pack_equal_each_alone_and_a_five_step_video_splits_4_and_1) {
  const TestDocument first{20, {{1, 4, 4}}, 1}, second{20, {{1, 2, 6}}, 2},
      clip{24, {{3, 2, 4}}, 3};
  expect_close(set, gradients({{first}, {second}, {clip}}), gradients({{first, second, clip}}),
               1e-5);

  // The same patches as one clip of five steps, and as clips of four and of one whose rows follow
  // each other.
  TestPack five(set.config, {{20, {{5, 2, 4}}, 4}});
  run_step(set, options, {&five});
  const Gradients whole = set.snapshot();
  const TrainMedia item = five.batch().media[0];
  const int64_t cut = 4 * 2 * 4, rows = cut / 4;
  const std::vector<TrainMedia> pieces = {
      {{4, 2, 4}, item.patches_NP.rows(0, cut), item.rows.first(rows)},
      {{1, 2, 4}, item.patches_NP.rows(cut, cut + 8), item.rows.subspan(rows)}};
  MicroBatch batch = five.batch();
  batch.media = pieces;
  set.clear();
  TrainableModel model(set.config, set.weights, set.gradients, options, {20, 40});
  model.forward_backward(batch, normalisers_of(batch, options));
  EXPECT_EQ(set.snapshot(), whole);
}

// msa.md T48.
TEST_P(TrainingOnce, warm_up_equals_the_sparse_stage_where_all_blocks_are_chosen) {
  const std::vector<TestDocument> documents = {{16, {}, 1}, {9, {}, 2}, {3, {}, 3}};
  const Gradients sparse = gradients({documents});
  options.stage = TrainStage::kWarmup;
  expect_close(set, gradients({documents}), sparse, 2e-6);
}

// nano.md §4: documents of one block have nothing to select.
TEST_P(TrainingOnce, short_documents_take_no_part_in_the_kl) {
  options.kl_min_tokens = 8;
  const Gradients mixed = gradients({{{8, {}, 1}, {33, {}, 2}, {5, {}, 3}}});
  const TrainSums mixed_sums = sums;
  const Gradients alone = gradients({{{33, {}, 2}}});
  EXPECT_EQ(mixed_sums.counts.kl_queries, 33);
  const std::vector<std::string> names = set.names();
  for (size_t i = 0; i < names.size(); ++i) {
    if (is_index(names[i])) {
      EXPECT_LE(relative_error(mixed[i], alone[i]), 1e-5) << names[i];
    }
  }
  for (size_t l = 0; l < mixed_sums.kl_L.size(); ++l)
    EXPECT_NEAR(mixed_sums.kl_L[l], sums.kl_L[l], 1e-5 * sums.kl_L[l]);
  gradients({{{8, {}, 1}, {5, {}, 3}}});
  EXPECT_EQ(sums.counts.kl_queries, 0);
  for (double kl : sums.kl_L) EXPECT_EQ(kl, 0);
}

TEST_P(TrainingOnce, forward_only_gives_the_losses_and_leaves_the_gradients_alone) {
  const TestPack pack(set.config, uneven_documents());
  run_step(set, options, {&pack});
  const Gradients before = set.snapshot();
  TrainableModel model(set.config, set.weights, set.gradients, options,
                       {pack.num_tokens(), pack.num_patches});
  const MicroBatchResult eval = model.forward_only(pack.batch());
  EXPECT_EQ(set.snapshot(), before);
  const MicroBatchResult train =
      model.forward_backward(pack.batch(), normalisers_of(pack.batch(), options));
  EXPECT_EQ(eval.loss_T, train.loss_T);
  EXPECT_EQ(eval.sums.ce, train.sums.ce);
  double ce = 0;
  for (int64_t t = 0; t < pack.num_tokens(); ++t) {
    EXPECT_EQ(eval.argmax_T[t] >= 0, pack.targets[t] >= 0);
    if (pack.targets[t] >= 0) ce += double{pack.weights[t]} * eval.loss_T[t];
  }
  EXPECT_NEAR(ce / eval.sums.ce, 1, 1e-12);
}

TEST_P(TrainingOnce, the_arena_that_was_planned_is_enough_for_packs_of_any_shape) {
  const int64_t T = 96;
  for (const Recompute recompute : {Recompute::kNone, Recompute::kLayer}) {
    options.recompute = recompute;
    TrainableModel model(set.config, set.weights, set.gradients, options, {T, 0});
    for (const int64_t length : {int64_t{1}, int64_t{7}, int64_t{16}, int64_t{40}, T}) {
      std::vector<TestDocument> documents(T / length, TestDocument{length, {}, 1});
      const TestPack pack(set.config, documents);
      MemoryPlan plan;
      model.add_to_plan(plan);
      EXPECT_NO_THROW(model.forward_backward(pack.batch(), normalisers_of(pack.batch(), options)));
      EXPECT_LE(model.peak_bytes(), plan.total_bytes()) << "documents of " << length;
    }
  }
}

TEST_P(TrainingOnce, wrong_batches_are_refused_by_name) {
  const TestPack pack(set.config, {{20, {{1, 2, 4}}, 1}});
  TrainableModel model(set.config, set.weights, set.gradients, options, {20, 8});
  const Normalisers good = normalisers_of(pack.batch(), options);
  const auto refuses = [&](const MicroBatch& batch, const Normalisers& global,
                           const std::string& text) {
    try {
      model.forward_backward(batch, global);
      ADD_FAILURE() << "accepted; wanted: " << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    }
  };
  refuses(pack.batch(), Normalisers{}, "smaller than those of this micro-batch");
  MicroBatch batch = pack.batch();
  const std::vector<int32_t> beyond(20, 40), short_cu = {0, 19};
  batch.ids_T = beyond;
  refuses(batch, good, "ids_T[0] is 40");
  batch = pack.batch();
  batch.cu_seqlens = short_cu;
  refuses(batch, good, "cu_seqlens must ascend");
  std::vector<TrainMedia> media(pack.batch().media.begin(), pack.batch().media.end());
  media[0].rows = media[0].rows.first(1);
  batch = pack.batch();
  batch.media = media;
  refuses(batch, good, "has 1 placeholder rows");
  const TestPack large(set.config, {{21, {}, 1}});
  refuses(large.batch(), normalisers_of(large.batch(), options), "memory was planned for 20");
}

}  // namespace
}  // namespace m3
