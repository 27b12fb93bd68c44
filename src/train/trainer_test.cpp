#include "train/trainer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "base/threads.h"
#include "train/test_support.h"

namespace m3::train {
namespace {

// The same 32 documents in every step ("repeat").
TEST(Trainer, OverfitsThirtyTwoMultimodalDocuments) {
  const TestFolder folder("overfit");
  const TrainConfig config = parse_train_config(
      tiny_config_json(folder.str()), "run.json",
      {"steps=120", "optimizer.lr=8e-3", "optimizer.vision.lr_factor=0.5",
       "optimizer.text.weight_decay=0", "schedule.warmup_steps=20", "sources.cards.count=14",
       "sources.clips.count=4", "sources.chat.count=14", "sources.cards.repeat=true",
       "sources.clips.repeat=true", "sources.chat.repeat=true", "compute.micro_batch_tokens=1024",
       "compute.micro_batch_patches=4096", "save.every=100000"});
  double first = 0, last = 0;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    ASSERT_EQ(report.num_documents, 32);
    if (report.step == 0) first = report.loss.ce;
    last = report.loss.ce;
  };
  Trainer trainer(config, options);
  trainer.run();
  EXPECT_GT(first, 5.0);
  EXPECT_LT(last, 0.02);
}

TEST(Trainer, MicroBatchesDoNotChangeTheLoss) {
  const TestFolder one("one"), many("many");
  std::vector<double> losses;
  for (const auto& [folder, tokens] : {std::pair{one.str(), 100000}, {many.str(), 1}}) {
    const TrainConfig config =
        parse_train_config(tiny_config_json(folder), "run.json",
                           {"steps=4", fmt::format("compute.micro_batch_tokens={}", tokens)});
    RunOptions options;
    options.on_step = [&](const StepReport& report) {
      EXPECT_EQ(report.num_micro_batches, tokens == 1 ? 5 : 1);
      losses.push_back(report.loss.total());
    };
    Trainer(config, options).run();
  }
  // Gradients are sums in another order: the losses of later steps agree to fp32.
  for (int i = 0; i < 4; ++i) EXPECT_NEAR(losses[i], losses[i + 4], 2e-4) << i;
}

// Replicas are another order of sums; with them, threads and repetition still change nothing. 200 tokens of 4
// replicas: the clip is too long for one of them and runs on all threads.
TEST(Trainer, ReplicasDoNotChangeTheLoss) {
  std::vector<std::vector<double>> losses;
  std::vector<std::vector<float>> norms;
  const int before = num_threads();
  for (const auto& [replicas, threads] : {std::pair{1, 2}, {4, 1}, {4, 3}, {64, 2}}) {
    const TestFolder folder("replicas");
    set_num_threads(threads);
    const TrainConfig config = parse_train_config(
        tiny_config_json(folder.str()), "run.json",
        {"steps=4", fmt::format("compute.replicas={}", replicas), "compute.micro_batch_tokens=200"});
    std::vector<double>& loss = losses.emplace_back();
    RunOptions options;
    options.on_step = [&](const StepReport& report) { loss.push_back(report.loss.total()); };
    Trainer trainer(config, options);
    trainer.run();
    const Tensor norm = trainer.parameters().find("language_model.model.norm.weight").master;
    norms.emplace_back(norm.ptr<float>(), norm.ptr<float>() + norm.numel());
  }
  set_num_threads(before);
  EXPECT_EQ(losses[1], losses[2]);
  EXPECT_EQ(norms[1], norms[2]);
  for (const size_t run : {1, 3})
    for (int i = 0; i < 4; ++i) EXPECT_NEAR(losses[0][i], losses[run][i], 2e-4) << i;
}

TEST(Replicas, TheLargestDocumentsAreSpreadFirst) {
  const std::vector<int32_t> documents = {4, 7, 8, 9, 2};
  const std::vector<double> work = {1, 5, 3, 4, 2};
  EXPECT_EQ(spread_documents(documents, work, 2),
            (std::vector<std::vector<int32_t>>{{7, 2, 4}, {9, 8}}));
}

TEST(Trainer, NonFiniteGradientsAreSkippedWithARecordAndThenStop) {
  const TestFolder folder("nan");
  const TrainConfig config = parse_train_config(tiny_config_json(folder.str()), "run.json",
                                                {"guard.max_skipped=3", "steps=10"});
  std::vector<std::string> reasons;
  std::vector<size_t> documents;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    reasons.push_back(report.skipped);
    documents.push_back(report.documents.size());
  };
  Trainer trainer(config, options);
  float* norm = trainer.parameters().find("language_model.model.norm.weight").master.ptr<float>();
  norm[3] = NAN;
  EXPECT_THROW(trainer.run(), Error);
  ASSERT_EQ(reasons.size(), 2u);  // the third stops the run
  EXPECT_NE(reasons[0].find("not finite"), std::string::npos);
  EXPECT_EQ(documents[0], 5u);
  EXPECT_EQ(trainer.state().num_updates[0], 0);
}

TEST(Trainer, AGroupWithoutGradientKeepsItsWeights) {
  const TestFolder folder("late");
  // Pictures come in the second half only: until then weight decay must not touch the tower.
  const TrainConfig config =
      parse_train_config(tiny_config_json(folder.str()), "run.json",
                         {"steps=6", "sources.cards.from=0.5", "sources.clips.from=0.5"});
  {
    Trainer trainer(config, {.stop_after = 3});
    const Tensor master = trainer.parameters().find("multi_modal_projector.linear_1.weight").master;
    const std::vector<float> before(master.ptr<float>(), master.ptr<float>() + master.numel());
    trainer.run();
    EXPECT_EQ(before,
              std::vector<float>(master.ptr<float>(), master.ptr<float>() + master.numel()));
    EXPECT_EQ(trainer.state().num_updates[static_cast<int>(Group::kVision)], 0);
    EXPECT_THROW(Trainer(config, {.resume = true}), Error);  // the folder is in use
  }
  Trainer resumed(config, {.resume = true});
  resumed.run();
  EXPECT_EQ(resumed.state().num_updates[static_cast<int>(Group::kVision)], 3);
}

TEST(Trainer, SpikesAreSkippedAndCounted) {
  const TestFolder folder("spike");
  // Everything above the mean counts as a spike: some steps after the guard's 50 updates must be
  // skipped.
  const TrainConfig config = parse_train_config(
      tiny_config_json(folder.str()), "run.json",
      {"steps=70", "guard.spike_factor=1", "sources.clips.count=0", "save.every=1000"});
  int64_t spikes = 0;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    if (report.skipped.empty()) return;
    EXPECT_GE(report.step, 50);
    EXPECT_TRUE(report.skipped.starts_with("spike")) << report.skipped;
    EXPECT_FALSE(report.groups[0].updated);
    ++spikes;
  };
  Trainer trainer(config, options);
  trainer.run();
  EXPECT_GT(spikes, 0);
  EXPECT_EQ(trainer.state().num_skipped, spikes);
  EXPECT_EQ(trainer.state().num_updates[0], 70 - spikes);
}

// Backbone weights after two steps, and the balance loss of the last one.
struct ShortRun {
  std::vector<float> backbone;
  double balance = 0, total = 0, ce = 0, kl = 0;
};
ShortRun short_run(std::vector<std::string> overrides) {
  const TestFolder folder("short");
  overrides.push_back("steps=2");
  ShortRun out;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    out.balance = report.loss.balance;
    out.total = report.loss.total();
    out.ce = report.loss.ce;
    out.kl = report.loss.kl;
  };
  Trainer trainer(parse_train_config(tiny_config_json(folder.str()), "run.json", overrides), options);
  trainer.run();
  const Tensor q = trainer.parameters().find("language_model.model.layers.1.self_attn.q_proj.weight").master;
  out.backbone.assign(q.ptr<float>(), q.ptr<float>() + q.numel());
  return out;
}

TEST(Trainer, StopGradientAndBalanceLossFollowTheConfiguration) {
  const ShortRun plain = short_run({});
  EXPECT_EQ(plain.balance, 0);
  // With the stop-gradient the KL's weight changes nothing in the backbone; without it, it does.
  EXPECT_EQ(plain.backbone, short_run({"loss.kl_weight=5"}).backbone);
  EXPECT_NE(short_run({"loss.detach_index_input=false"}).backbone, plain.backbone);
  // alpha times a sum that is at least 1 for the one layer with experts (training.md §8).
  const ShortRun balanced = short_run({"loss.balance_alpha=0.5"});
  EXPECT_GE(balanced.balance, 0.5 * 0.95);
  EXPECT_LT(balanced.balance, 0.5 * 4);
  EXPECT_NEAR(balanced.total, balanced.ce + balanced.kl + balanced.balance, 1e-9);
  EXPECT_NE(balanced.backbone, plain.backbone);
}

// Probes read, they change nothing.
TEST(Trainer, InstrumentsAreLoggedAndLeaveTheRunAlone) {
  std::vector<double> losses[2];
  for (const int every : {0, 2}) {
    const TestFolder folder("probe");
    RunOptions options;
    options.on_step = [&](const StepReport& report) {
      losses[every / 2].push_back(report.loss.total());
      const bool probed = every > 0 && report.step % every == 0;
      ASSERT_EQ(report.layers.size(), probed ? 2u : 0u);
      if (!probed) return;
      EXPECT_GT(report.layers[0].text_rms, 0);
      const std::string line = report.to_json(
          parse_train_config(tiny_config_json(), "run.json").model, 0);
      for (const char* key : {"\"text_rms\"", "\"clamped\"", "\"entropy\"", "\"largest_logit\"", "\"media_mass\""})
        EXPECT_NE(line.find(key), std::string::npos) << key;
    };
    Trainer(parse_train_config(tiny_config_json(folder.str()), "run.json",
                               {"steps=4", fmt::format("log.attention_every={}", every)}),
            options)
        .run();
  }
  EXPECT_EQ(losses[0], losses[1]);
}

// Norms by part from the gradients themselves, and how far the masters moved from copies of them.
TEST(Trainer, GradientNormsAndUpdateRatiosAreThoseOfTheParameters) {
  const TestFolder folder("norms");
  std::map<std::string, std::vector<float>> before;
  Trainer* running = nullptr;
  const auto snapshot = [&] {
    for (const Parameter& p : running->parameters().all())
      before[p.entry.name].assign(p.master.ptr<float>(), p.master.ptr<float>() + p.master.numel());
  };
  int probed = 0;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    std::map<std::string, double> squares;
    std::vector<std::string> zeros;
    double moved[kNumGroups] = {}, size[kNumGroups] = {};
    for (const Parameter& p : running->parameters().all()) {
      if (p.is_router_bias) continue;
      const std::string& name = p.entry.name;
      double sum = 0;
      for (int64_t i = 0; i < p.gradient.numel(); ++i) {
        sum += std::pow(double{p.gradient.ptr<float>()[i]}, 2);
        moved[static_cast<int>(p.group)] += std::pow(double{p.master.ptr<float>()[i]} - before[name][i], 2);
        size[static_cast<int>(p.group)] += std::pow(double{before[name][i]}, 2);
      }
      if (sum == 0) zeros.push_back(name);
      const bool index = name.find("index_") != std::string::npos;
      if (name.starts_with("vision_tower")) squares["tower"] += sum;
      if (name.find("projector") != std::string::npos || name.find("patch_merge") != std::string::npos)
        squares["projector"] += sum;
      for (const char* layer : {"0", "1"}) {
        if (!index && name.find(std::string("language_model.model.layers.") + layer + ".") == 0)
          squares[layer] += sum;
      }
      if (name.find("embed_tokens") != std::string::npos) squares["embedding"] += sum;
      if (name.find("lm_head") != std::string::npos) squares["head"] += sum;
      if (name.ends_with("block_sparse_moe.gate.weight")) squares["routers"] += sum;
    }
    const GradientNorms& norms = report.gradients;
    ASSERT_EQ(norms.layers.size(), 2u);
    for (const auto& [name, value] :
         {std::pair<std::string, double>{"0", norms.layers[0]}, {"1", norms.layers[1]},
          {"embedding", norms.embedding}, {"head", norms.head}, {"routers", norms.routers},
          {"tower", norms.tower}, {"projector", norms.projector}}) {
      EXPECT_GT(value, 0) << name;
      EXPECT_NEAR(value, std::sqrt(squares[name]), 1e-6 * value) << name;
    }
    EXPECT_EQ(norms.zeros, zeros);
    const std::string line = report.to_json(parse_train_config(tiny_config_json(), "run.json").model, 0);
    for (int i = 0; i < kNumGroups; ++i) {
      if (report.step % 2 != 0) {
        EXPECT_LT(report.groups[i].update_ratio, 0);
        continue;
      }
      ++probed;
      EXPECT_GT(report.groups[i].update_ratio, 0);
      EXPECT_NEAR(report.groups[i].update_ratio, std::sqrt(moved[i] / size[i]), 1e-6 * report.groups[i].update_ratio);
      EXPECT_NE(line.find("\"update_ratio\""), std::string::npos);
    }
    for (const char* key : {"\"layers\":[", "\"routers\"", "\"zeros\""}) EXPECT_NE(line.find(key), std::string::npos) << key;
    EXPECT_EQ(line.find("\"zero_names\"") != std::string::npos, report.zeros_changed);
    snapshot();
  };
  Trainer trainer(parse_train_config(tiny_config_json(folder.str()), "run.json",
                                     {"steps=4", "log.attention_every=2"}),
                  options);
  running = &trainer;
  snapshot();
  trainer.run();
  EXPECT_EQ(probed, 2 * kNumGroups);
}

TEST(Trainer, ADenseCheckpointBecomesMsaWithANewIndexBranch) {
  const TestFolder dense("dense"), sparse("sparse");
  const std::vector<std::string> as_dense = {
      "model.text_config.sparse_attention_config.sparse_attention_freq=[0,0]",
      "model.text_config.sparse_attention_config.sparse_disable_index_value=[0,0]",
      "stages.0.attention=full", "steps=2"};
  Trainer teacher(parse_train_config(tiny_config_json(dense.str()), "run.json", as_dense), {});
  teacher.run();
  const std::string from = "init.checkpoint=" + teacher.checkpoint_folder().string();
  Trainer pupil(parse_train_config(tiny_config_json(sparse.str()), "run.json",
                                   {"init.scheme=checkpoint", from}),
                {});
  const std::string attention = "language_model.model.layers.1.self_attn.";
  const float* q = pupil.parameters().find(attention + "q_proj.weight").master.ptr<float>();
  const float* q_dense = teacher.parameters().find(attention + "q_proj.weight").master.ptr<float>();
  for (int i = 0; i < 8; ++i)
    EXPECT_EQ(q[i], to_float(bf16(q_dense[i])));  // as the checkpoint stores it
  EXPECT_NE(pupil.parameters().find(attention + "index_q_proj.weight").master.ptr<float>()[0],
            0.0f);
  EXPECT_TRUE(pupil.parameters().has_state(Group::kIndexer));
  EXPECT_FALSE(teacher.parameters().has_state(Group::kIndexer));
}

TEST(Flops, ByHand) {
  EXPECT_EQ(causal_pairs(5), 15);
  EXPECT_EQ(selected_pairs(100, 128, 4), 5050);
  EXPECT_EQ(selected_pairs(8192, 128, 16), 14290944);  // msa.md §13, E at 8K
}

TEST(Flops, OfTheRecipesDocuments) {  // nano.md §1: a text row of 256 is 6.7 G, the tower takes
                                      // 0.39 G of a picture
  const ModelConfig nano = read_train_config(M3_SOURCE_DIR "/configs/train/nano.json").model;
  TrainOptions options;
  options.stage = TrainStage::kWarmup;
  options.kl_min_tokens = 128;
  std::vector<int32_t> ids(256, 1), targets(256, 1);
  targets.back() = -1;
  const std::vector<int32_t> cu_seqlens = {0, 256};
  MicroBatch row;
  row.ids_T = ids;
  row.targets_T = targets;
  row.cu_seqlens = cu_seqlens;
  EXPECT_NEAR(train_flops(nano, options, row).total(), 6.7e9, 0.02 * 6.7e9);
  const TrainMedia picture = {{1, 8, 8}, {}, {}};
  row.media = {&picture, 1};
  EXPECT_NEAR(train_flops(nano, options, row).vision, 0.39e9, 0.06 * 0.39e9);
}

}  // namespace
}  // namespace m3::train
