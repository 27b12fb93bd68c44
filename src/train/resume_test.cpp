// Runs that are killed and resumed end with the same weights, bit for bit; broken checkpoints are
// refused.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstring>
#include <fstream>
#include <random>
#include <thread>

#include "base/file.h"
#include "base/sha256.h"
#include "base/threads.h"
#include "train/data/shard_writer.h"
#include "train/test_support.h"
#include "train/trainer.h"

extern char** environ;

namespace m3::train {
namespace {

namespace fs = std::filesystem;

constexpr const char* kChildFolder = "M3_TEST_TRAIN_FOLDER";

TrainConfig config_in(const fs::path& folder, std::vector<std::string> overrides = {}) {
  return parse_train_config(tiny_config_json(folder.string()), "run.json", overrides);
}

// Everything that a finished run leaves: weights, masters, moments. (state.json holds measured
// seconds.)
std::string result_hash(const fs::path& checkpoint) {
  return sha256_file(checkpoint / "model.safetensors") +
         sha256_file(checkpoint / "training/optimizer.safetensors");
}

std::string run_whole(const fs::path& folder, std::vector<std::string> overrides = {}) {
  Trainer trainer(config_in(folder, overrides), {});
  EXPECT_EQ(trainer.run(), RunEnd::kFinished);
  return result_hash(trainer.checkpoint_folder());
}

// The process that gets killed. It saves after every step, so that many kills fall into a save.
TEST(ResumeChild, DISABLED_Run) {
  const char* folder = std::getenv(kChildFolder);
  ASSERT_NE(folder, nullptr);
  Trainer trainer(config_in(folder, {"save.every=1"}), {.resume = true});
  trainer.run();
}

pid_t start_child(const fs::path& folder) {
  ::setenv(kChildFolder, folder.c_str(), 1);
  const char* arguments[] = {"test_train", "--gtest_also_run_disabled_tests",
                             "--gtest_filter=ResumeChild.*", nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
  pid_t child = -1;
  const int error = ::posix_spawn(&child, "/proc/self/exe", &actions, nullptr,
                                  const_cast<char**>(arguments), environ);
  posix_spawn_file_actions_destroy(&actions);
  EXPECT_EQ(error, 0) << std::strerror(error);
  return child;
}

TEST(Resume, KilledAtRandomMomentsEndsWithTheSameBits) {
  const TestFolder whole("whole"), killed("killed");
  const std::string expected = run_whole(whole.path());
  std::mt19937 random(20);
  CheckpointStore probe(killed.path(), {});
  int kills = 0;
  // Six kills early and late in a run, then one run to the end.
  for (int round = 0; round < 40; ++round) {
    const pid_t child = start_child(killed.path());
    ASSERT_GT(child, 0);
    int status = 0;
    if (kills < 6) {
      // Waits for a new checkpoint or its beginnings, then a little longer: step or save.
      const size_t before = probe.steps().empty() ? 0 : static_cast<size_t>(probe.steps().back());
      const auto moved = [&] {
        const auto steps = probe.steps();
        return (!steps.empty() && static_cast<size_t>(steps.back()) > before) ||
               fs::exists(killed.path() / ".saving");
      };
      while (!moved() && ::waitpid(child, &status, WNOHANG) == 0)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
      if (::kill(child, SIGKILL) == 0) ++kills;
      ::waitpid(child, &status, 0);
      continue;
    }
    ::waitpid(child, &status, 0);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the resumed run failed";
    break;
  }
  EXPECT_EQ(result_hash(killed.path() / "step-00000012"), expected);
}

TEST(Resume, StopAndThreadsDoNotChangeTheResult) {
  const TestFolder whole("whole1"), parts("parts");
  set_num_threads(2);
  const std::string expected = run_whole(whole.path());
  set_num_threads(1);
  {
    Trainer trainer(config_in(parts.path()), {.stop_after = 5});
    EXPECT_EQ(trainer.run(), RunEnd::kStopped);
  }
  set_num_threads(2);
  Trainer trainer(config_in(parts.path()), {.resume = true});
  EXPECT_EQ(trainer.state().step, 5);
  EXPECT_EQ(trainer.run(), RunEnd::kFinished);
  EXPECT_EQ(result_hash(trainer.checkpoint_folder()), expected);
  // The log has every step once.
  std::ifstream log(parts.path() / "train.jsonl");
  std::string line;
  int lines = 0;
  while (std::getline(log, line))
    EXPECT_NE(line.find(fmt::format("\"step\":{},", lines++)), std::string::npos) << line;
  EXPECT_EQ(lines, 12);
}

TEST(Resume, RecomputationDoesNotChangeTheResult) {
  const TestFolder a("keep"), b("again");
  EXPECT_EQ(run_whole(a.path()), run_whole(b.path(), {"compute.recompute=true"}));
}

TEST(Resume, ProbesOfTheSelectionDoNotChangeTheResult) {
  const TestFolder without("noprobe"), with("probe");
  int probes = 0;
  RunOptions options;
  options.on_step = [&](const StepReport& report) {
    for (const SelectionQuality& quality : report.selection) {
      ++probes;
      EXPECT_EQ(quality.layer, 1);
      EXPECT_GT(quality.captured, 0);
      EXPECT_LE(quality.captured, quality.oracle + 1e-9);
      EXPECT_LE(quality.oracle, 1 + 1e-9);
      EXPECT_GT(quality.block_recall, 0);
      EXPECT_LE(quality.block_recall, 1);
    }
  };
  Trainer trainer(config_in(with.path(), {"log.attention_every=1", "stages.0.attention=warmup"}),
                  options);
  trainer.run();
  EXPECT_GT(probes, 6);
  EXPECT_EQ(result_hash(trainer.checkpoint_folder()),
            run_whole(without.path(), {"stages.0.attention=warmup"}));
}

TEST(Resume, AFrozenIndexerHasNoStateAndResumes) {
  const TestFolder whole("frozen"), parts("frozen2");
  const std::vector<std::string> frozen = {"stages.0.freeze=frozen_index"};
  const std::string expected = run_whole(whole.path(), frozen);
  const SafetensorsFile state(whole.path() / "step-00000012/training/optimizer.safetensors");
  const std::string index = "language_model.model.layers.1.self_attn.index_q_proj.weight";
  EXPECT_TRUE(state.contains("master." + index));
  EXPECT_FALSE(state.contains("m." + index));
  Trainer(config_in(parts.path(), frozen), {.stop_after = 6}).run();
  Trainer trainer(config_in(parts.path(), frozen), {.resume = true});
  trainer.run();
  EXPECT_EQ(result_hash(trainer.checkpoint_folder()), expected);
}

TEST(Resume, ShardsGoOnWhereTheyStopped) {
  const TestFolder corpus("shards"), whole("shards1"), parts("shards2");
  data::ShardWriter writer(corpus.path() / "data", {});
  for (int i = 0; i < 40; ++i) {  // more than one epoch in 12 steps of 5 documents
    data::Document document;
    document.id = fmt::format("page {}", i);
    document.source = "pages";
    document.segments = {
        data::Segment::of_text(fmt::format("This is page {} of a short book.", i * i))};
    writer.add_to(data::Split::kTrain, document);
  }
  writer.finish();
  const std::vector<std::string> shards = {fmt::format(
      R"(sources=[{{"name": "pages", "family": "shards", "count": 5, "folder": "{}"}}])",
      (corpus.path() / "data").string())};
  const std::string expected = run_whole(whole.path(), shards);
  Trainer(config_in(parts.path(), shards), {.stop_after = 7}).run();
  Trainer trainer(config_in(parts.path(), shards), {.resume = true});
  EXPECT_EQ(trainer.state().streams.at("pages").position, 35);
  trainer.run();
  EXPECT_EQ(trainer.state().streams.at("pages").position, 60);
  EXPECT_EQ(result_hash(trainer.checkpoint_folder()), expected);
}

TEST(Resume, BrokenCheckpointsAreNotUsed) {
  const TestFolder folder("broken");
  Trainer(config_in(folder.path(), {"save.every=4"}), {.stop_after = 8}).run();
  const fs::path last = folder.path() / "step-00000008";
  // A flipped bit in the weights: back to step 4.
  {
    std::fstream file(last / "model.safetensors", std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-3, std::ios::end);
    file.put('\x5a');
  }
  EXPECT_THROW(verify_checkpoint(last), Error);
  EXPECT_EQ(Trainer(config_in(folder.path()), {.resume = true}).state().step, 4);
  // A cut optimizer state in the other one too: nothing is left.
  fs::resize_file(folder.path() / "step-00000004/training/optimizer.safetensors", 1000);
  EXPECT_THROW(Trainer(config_in(folder.path()), {.resume = true}), Error);
  EXPECT_THROW(Trainer(config_in(folder.path()), {}), Error);  // nor is the folder overwritten
}

TEST(Resume, AnotherConfigurationIsRefusedByName) {
  const TestFolder folder("other");
  Trainer(config_in(folder.path()), {.stop_after = 2}).run();
  try {
    Trainer(config_in(folder.path(), {"optimizer.lr=0.5"}), {.resume = true});
    FAIL() << "resumed with another learning rate";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("optimizer"), std::string::npos) << error.what();
  }
}

std::string refusal(const TrainConfig& config, std::vector<std::string> may_change = {}) {
  try {
    Trainer(config, {.resume = true, .may_change = std::move(may_change)});
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

// The default refuses and names key, values and the way; by request the run goes on as one that
// always had the new value from there on, and says so.
TEST(Resume, AKeyChangesByRequestAndOnTheRecord) {
  const TestFolder folder("change");
  Trainer(config_in(folder.path()), {.stop_after = 4}).run();
  const std::vector<std::string> moved = {"compute.micro_batch_tokens=64", "steps=8"};
  const std::string message = refusal(config_in(folder.path(), moved));
  for (const char* part : {"'compute.micro_batch_tokens': 128", "now it is 64",
                           "--allow-change compute.micro_batch_tokens"})
    EXPECT_NE(message.find(part), std::string::npos) << part << ": " << message;
  EXPECT_NE(refusal(config_in(folder.path(), moved), {"compute"}).find("--allow-change steps"),
            std::string::npos);  // compute covers what lies below it, not the other key
  EXPECT_NE(refusal(config_in(folder.path()), {"compute.replica"}).find("has such a key"),
            std::string::npos);
  EXPECT_NE(refusal(config_in(folder.path(), {"steps=3"}), {"steps"}).find("4 steps are done"),
            std::string::npos);
  {
    Trainer trainer(config_in(folder.path(), moved),
                    {.resume = true, .may_change = {"steps", "compute.micro_batch_tokens"}, .stop_after = 6});
    trainer.run();
    ASSERT_EQ(trainer.state().changes.size(), 2u);
  }
  // Now the checkpoint has the new values: no flag is needed, and the old ones are refused.
  EXPECT_NE(refusal(config_in(folder.path())).find("'compute.micro_batch_tokens': 64"),
            std::string::npos);
  Trainer trainer(config_in(folder.path(), moved), {.resume = true});
  EXPECT_EQ(trainer.run(), RunEnd::kFinished);
  EXPECT_EQ(trainer.state().step, 8);
  const std::vector<ConfigChange>& changes = trainer.state().changes;
  ASSERT_EQ(changes.size(), 2u);
  EXPECT_EQ(changes[0].key, "compute.micro_batch_tokens");
  EXPECT_EQ(changes[1].key, "steps");
  for (const ConfigChange& change : changes) EXPECT_EQ(change.step, 4);
  EXPECT_EQ(changes[1].from + " " + changes[1].to, "12 8");
  std::ifstream log(folder.path() / "train.jsonl");
  int records = 0;
  for (std::string line; std::getline(log, line); ++records) {
    const bool changed = line.find(R"("changes":[{"step":4,"key":"compute.micro_batch_tokens","from":"128","to":"64"})") !=
                         std::string::npos;
    EXPECT_EQ(changed, records == 4) << line;
  }
  EXPECT_EQ(records, 8);
}

TEST(Resume, AnotherCorpusIsRefusedWithBothHashes) {
  const TestFolder corpus("corpus"), folder("other-corpus");
  const auto make = [&](int pages) {
    fs::remove_all(corpus.path() / "data");
    data::ShardWriter writer(corpus.path() / "data", {});
    for (int i = 0; i < pages; ++i) {
      data::Document document;
      document.id = fmt::format("page {}", i);
      document.source = "pages";
      document.segments = {data::Segment::of_text(fmt::format("This is page {} of a book.", i))};
      writer.add_to(data::Split::kTrain, document);
    }
    writer.finish();
    return sha256_file(corpus.path() / "data/manifest.json");
  };
  const std::vector<std::string> shards = {fmt::format(
      R"(sources=[{{"name": "pages", "family": "shards", "count": 2, "folder": "{0}"}}])",
      (corpus.path() / "data").string())};
  const std::string before = make(30);
  Trainer(config_in(folder.path(), shards), {.stop_after = 2}).run();
  EXPECT_EQ(refusal(config_in(folder.path(), shards)), "accepted");
  const std::string after = make(40);
  const std::string message = refusal(config_in(folder.path(), shards));
  EXPECT_NE(message.find(before), std::string::npos) << message;
  EXPECT_NE(message.find(after), std::string::npos) << message;
  EXPECT_NE(message.find("--allow-change manifests.pages"), std::string::npos) << message;
  EXPECT_EQ(refusal(config_in(folder.path(), shards), {"manifests.pages"}), "accepted");
  // A checkpoint from before manifests were recorded is taken.
  const fs::path training = folder.path() / "step-00000002/training";
  std::string identity = read_file(training / "identity.json");
  identity.erase(identity.find(",\"manifests\""));
  write_file_atomic(training / "identity.json", identity + "}");
  std::string manifest = read_file(training / "manifest.json");
  const size_t at = manifest.find("identity.json");
  ASSERT_NE(at, std::string::npos);
  const std::string entry = fmt::format("identity.json\":{{\"bytes\":{},\"sha256\":\"{}\"", identity.size() + 1,
                                        sha256_file(training / "identity.json"));
  manifest.replace(at, manifest.find('}', at) - at, entry);
  write_file_atomic(training / "manifest.json", manifest);
  EXPECT_EQ(refusal(config_in(folder.path(), shards)), "accepted");
}

TEST(Resume, AFullDiskLeavesOlderCheckpointsAlone) {
  const TestFolder folder("full");
  Trainer trainer(config_in(folder.path()), {.stop_after = 4});
  trainer.run();
  // Stands for a disk that refuses: a file to copy that is not there.
  CheckpointStore store(folder.path(), {});
  TrainingState state = trainer.state();
  state.step = 5;
  EXPECT_THROW(store.save(config_in(folder.path()), trainer.parameters(), state,
                          {folder.path() / "no such companion"}),
               Error);
  EXPECT_EQ(store.steps(), std::vector<int64_t>{4});
  EXPECT_FALSE(fs::exists(folder.path() / ".saving"));
  EXPECT_NO_THROW(verify_checkpoint(store.folder(4)));
}

}  // namespace
}  // namespace m3::train
