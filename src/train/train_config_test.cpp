#include "train/train_config.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/check.h"
#include "base/file.h"
#include "text/json_value.h"
#include "train/init.h"
#include "train/schedule.h"
#include "train/synthetic/clips.h"
#include "train/test_support.h"

namespace m3::train {
namespace {

std::string error_of(const std::vector<std::string>& overrides) {
  try {
    parse_train_config(tiny_config_json(), "run.json", overrides);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

void expect_error(const std::vector<std::string>& overrides,
                  std::initializer_list<const char*> parts) {
  const std::string message = error_of(overrides);
  for (const char* part : parts)
    EXPECT_NE(message.find(part), std::string::npos)
        << "'" << message << "' lacks '" << part << "'";
}

TEST(TrainConfig, ErrorsNameTheKeyTheValueAndWhatIsAllowed) {
  expect_error({"optimizer.momentum=1"}, {"momentum", "unknown key", "beta1"});
  expect_error({"stepz=3"}, {"stepz", "unknown key"});
  expect_error({"optimizer.lr=-1"}, {"optimizer.lr", "-1", "from 0"});
  expect_error({"schedule.kind=cosinus"}, {"schedule.kind", "cosinus", "stable_decay"});
  expect_error({"stages.0.until=0.5"}, {"stages", "end at 1"});
  expect_error({"stages.0.attention=none"}, {"stages[0].attention", "none", "warmup", "window"});
  expect_error({"sources.cards.family=cards"}, {"sources[0].family", "cards", "picture"});
  expect_error({"sources.cards.tokens=7"}, {"tokens", "unknown key"});  // a key of another family
  expect_error({"sources.1.name=cards"}, {"sources[1].name", "already"});
  expect_error({"sources.missing.count=1"}, {"missing"});
  expect_error({"compute.dtype=fp16"}, {"compute.dtype", "fp16", "bf16"});
  expect_error({"steps=0"}, {"steps", "0", "from 1"});
  expect_error({"model.text_config.hidden_size=0"}, {"hidden_size"});
  expect_error({"sources.0.family=text"}, {"corpus"});
  expect_error({"sources.clips.kind=both"}, {"sources[1].kind", "both", "two_objects"});
  expect_error({"sources.clips.ask=event"}, {"sources[1].ask", "one_object"});
  expect_error({"sources.clips.frames=4"}, {"sources[1].frames", "4", "from 8"});
  expect_error({"loss.balance_alpha=-1"}, {"loss.balance_alpha", "-1"});
  expect_error({"lr"}, {"KEY=VALUE"});
}

TEST(TrainConfig, OverridesReachListsByNameAndNumber) {
  const TrainConfig config =
      parse_train_config(tiny_config_json(), "run.json",
                         {"sources.clips.count=9", "sources.0.count=3", "optimizer.lr=1e-2"});
  EXPECT_EQ(config.sources[0].count, 3);
  EXPECT_EQ(config.sources[1].name, "clips");
  EXPECT_EQ(config.sources[1].count, 9);
  EXPECT_DOUBLE_EQ(config.optimizer.lr, 0.01);
}

TEST(TrainConfig, KeysOfTheExperimentsAreRead) {
  const TrainConfig plain = parse_train_config(tiny_config_json(), "run.json");
  EXPECT_TRUE(plain.loss.detach_index_input);
  EXPECT_EQ(plain.loss.balance_alpha, 0);
  EXPECT_EQ(plain.sources[1].clip_kind, synthetic::ClipKind::kAny);
  EXPECT_EQ(plain.sources[1].frames, 8);
  const TrainConfig config = parse_train_config(
      tiny_config_json(), "run.json",
      {"loss.detach_index_input=false", "loss.balance_alpha=1e-4", "sources.clips.kind=one_object",
       "sources.clips.ask=event", "sources.clips.frames=16"});
  EXPECT_FALSE(config.loss.detach_index_input);
  EXPECT_DOUBLE_EQ(config.loss.balance_alpha, 1e-4);
  EXPECT_EQ(config.sources[1].clip_kind, synthetic::ClipKind::kOneObject);
  EXPECT_EQ(config.sources[1].clip_ask, synthetic::ClipAsk::kEvent);
  EXPECT_EQ(config.sources[1].frames, 16);
}

TEST(TrainConfig, IdentityLeavesOutWhatDoesNotDecideWeights) {
  const std::string a = parse_train_config(tiny_config_json(), "run.json").identity;
  EXPECT_EQ(a, parse_train_config(tiny_config_json(), "run.json",
                                  {"output=elsewhere", "save.every=3", "compute.threads=1"})
                   .identity);
  EXPECT_NE(a, parse_train_config(tiny_config_json(), "run.json", {"seed=7"}).identity);
}

TEST(TrainConfig, ShippedConfigurationsAreRead) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(M3_SOURCE_DIR "/configs/train")) {
    if (entry.path().extension() != ".json") continue;
    EXPECT_NO_THROW(read_train_config(entry.path())) << entry.path();
    ++count;
  }
  EXPECT_GT(count, 0);
}

// As scripts/experiments.py joins them: base.json, the keys of the experiment, those of the arm.
TEST(TrainConfig, ArmsOfTheExperimentsAreRead) {
  const std::filesystem::path folder = M3_SOURCE_DIR "/configs/experiments";
  int arms = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename() == "base.json") continue;
    const auto experiment = JsonValue::try_parse(read_file(entry.path()));
    ASSERT_TRUE(experiment) << entry.path();
    const JsonValue* list = experiment->find("arms");
    for (const std::string& arm : list->keys()) {
      if (list->find(arm)->find("same_as") != nullptr) continue;
      std::vector<std::string> overrides;
      for (const JsonValue* keys : {experiment->find("set"), list->find(arm)}) {
        for (const std::string& key : keys->keys()) {
          if (key != "eval_attention") overrides.push_back(key + "=" + keys->find(key)->dump());
        }
      }
      EXPECT_NO_THROW(read_train_config(folder / "base.json", overrides)) << entry.path() << " " << arm;
      ++arms;
    }
  }
  EXPECT_EQ(arms, 15);
}

TEST(Schedule, ValuesByHand) {
  ScheduleConfig cosine{
      .kind = ScheduleConfig::Kind::kCosine, .warmup_steps = 4, .final_factor = 0.1};
  EXPECT_DOUBLE_EQ(lr_factor(cosine, 0, 104), 0.25);
  EXPECT_DOUBLE_EQ(lr_factor(cosine, 3, 104), 1);
  EXPECT_DOUBLE_EQ(lr_factor(cosine, 4, 104), 1);
  EXPECT_NEAR(lr_factor(cosine, 54, 104), 0.55, 1e-12);               // half way: (1 + 0.1) / 2
  EXPECT_NEAR(lr_factor(cosine, 29, 104), 0.868198051533946, 1e-12);  // 0.1 + 0.45 (1 + sqrt(1/2))
  ScheduleConfig stable{.kind = ScheduleConfig::Kind::kStableDecay,
                        .warmup_steps = 0,
                        .final_factor = 0,
                        .decay_share = 0.2};
  EXPECT_DOUBLE_EQ(lr_factor(stable, 79, 100), 1);
  EXPECT_DOUBLE_EQ(lr_factor(stable, 80, 100), 1);
  EXPECT_NEAR(lr_factor(stable, 90, 100), 0.5, 1e-12);
  EXPECT_NEAR(lr_factor(stable, 99, 100), 0.05, 1e-12);
  EXPECT_FALSE(in_final_decay(stable, 79, 100));
  EXPECT_TRUE(in_final_decay(stable, 80, 100));
}

TEST(Schedule, CurriculumOfTheRecipe) {  // nano.md §4
  const TrainConfig nano = read_train_config(M3_SOURCE_DIR "/configs/train/nano.json");
  const auto source = [&](const char* name) {
    return *std::find_if(nano.sources.begin(), nano.sources.end(),
                         [&](const SourceConfig& s) { return s.name == name; });
  };
  EXPECT_DOUBLE_EQ(easy_share(source("pictures"), 0.05), 0.75);
  EXPECT_DOUBLE_EQ(easy_share(source("clips"), 0.3), 0);
  EXPECT_DOUBLE_EQ(bare_share(source("facts"), 0), 1);
  EXPECT_DOUBLE_EQ(bare_share(source("facts"), 0.9), 0.15);
  EXPECT_EQ(stage_at(nano, 3419).attention, TrainStage::kWarmup);  // f = 0.29991
  EXPECT_EQ(stage_at(nano, 3420).attention, TrainStage::kSparse);  // f = 0.3
  int64_t documents_4096 = 0;
  for (int64_t step = 0; step < nano.steps; ++step)
    documents_4096 += documents_at(source("facts 4096"), step, nano.steps);
  EXPECT_NEAR(static_cast<double>(documents_4096), 142, 1);
}

TEST(Source, AloneAsInAConfiguration) {
  const SourceConfig facts = parse_source(
      R"({"name": "bare", "family": "facts", "tokens": 0, "facts": [6, 6], "names": 16, "words": 24})");
  EXPECT_EQ(facts.num_names, 16);
  EXPECT_EQ(facts.num_words, 24);
  EXPECT_EQ(facts.min_facts, 6);
  const SourceConfig repeat = parse_source(R"({"name": "lists", "family": "repeat"})");
  EXPECT_EQ(repeat.min_facts, 4);  // nano.md §3
  EXPECT_EQ(repeat.max_facts, 9);
  EXPECT_EQ(repeat.num_words, 121);
  for (const char* bad :
       {R"({"name": "a", "family": "facts", "facts": [4, 10], "names": 8})", R"({"name": "a", "family": "repeat", "words": 122})",
        R"({"name": "a", "family": "clip", "hold": 2})", R"({"name": "a", "family": "clip", "cells": 4})",
        R"({"name": "a", "family": "card", "names": 8})", R"({"family": "card"})"})
    EXPECT_THROW(parse_source(bad), Error) << bad;
}

TEST(Init, FanInAndPositionalStart) {
  const TrainConfig nano = read_train_config(M3_SOURCE_DIR "/configs/train/nano.json");
  const InitScheme scheme = init_scheme(nano.init, nano.model, 1);
  const auto draw = [&](const char* name) {
    for (const TensorEntry& entry : tensor_table(nano.model)) {
      if (entry.name != name) continue;
      std::vector<float> values(static_cast<size_t>(entry.shape.numel()));
      scheme(entry, 0, values);
      return values;
    }
    ADD_FAILURE() << name;
    return std::vector<float>();
  };
  const auto deviation = [](const std::vector<float>& values) {
    double sum = 0;
    for (const float v : values) sum += double{v} * v;
    return std::sqrt(sum / static_cast<double>(values.size()));
  };
  const std::string layer = "language_model.model.layers.1.";
  EXPECT_NEAR(deviation(draw((layer + "self_attn.q_proj.weight").c_str())), 1 / std::sqrt(128.0),
              0.002);
  // Output matrices: fan-in 2048 and 1 / sqrt(2 · 3 layers).
  EXPECT_NEAR(deviation(draw((layer + "self_attn.o_proj.weight").c_str())),
              1 / std::sqrt(2048.0 * 6), 2e-4);
  EXPECT_NEAR(deviation(draw("vision_tower.vision_model.encoder.layers.0.mlp.fc2.weight")),
              1 / std::sqrt(512.0 * 8), 4e-4);
  EXPECT_NEAR(deviation(draw("language_model.lm_head.weight")), 0.02, 4e-4);

  const std::vector<float> embed = draw("language_model.model.embed_tokens.weight");
  EXPECT_EQ(embed[0], 2.0f);
  EXPECT_EQ(embed[7 * 128], 2.0f);
  const std::vector<float> q = draw("language_model.model.layers.0.self_attn.q_proj.weight");
  const std::vector<float> k = draw("language_model.model.layers.0.self_attn.k_proj.weight");
  const double h0 = 3.7843993;
  EXPECT_NEAR(k[1 * 128], 4.6 / h0, 1e-4);
  EXPECT_EQ(k[33 * 128], 0.0f);
  EXPECT_EQ(k[2 * 128 + 5], 0.0f);
  EXPECT_NE(k[3 * 128 + 5], 0.0f);  // other rows stay random
  const double f1 = std::pow(5e6, -1.0 / 32);
  EXPECT_NEAR(q[(2 * 128 + 1) * 128], 6.5 * std::cos(3 * f1) / h0,
              1e-4);  // head 2 looks 3 tokens back
  EXPECT_NEAR(q[(2 * 128 + 33) * 128], -6.5 * std::sin(3 * f1) / h0, 1e-4);
  EXPECT_EQ(q[(2 * 128 + 70) * 128 + 3], 0.0f);
}

}  // namespace
}  // namespace m3::train
