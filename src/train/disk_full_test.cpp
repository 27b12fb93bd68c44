// A disk that fills up: the error names the file, what was there before stays usable. The limit of a file's size
// stands in for the disk: writes beyond it fail in the same place.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <csignal>

#include "base/file.h"
#include "train/test_support.h"
#include "train/trainer.h"

namespace m3::train {
namespace {

class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    before_handler_ = std::signal(SIGXFSZ, SIG_IGN);  // else it ends the program
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FileSizeLimit() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, before_handler_);
  }

 private:
  rlimit before_;
  void (*before_handler_)(int);
};

template <class Run>
std::string error_of(Run&& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

std::vector<float> final_weights(Trainer& trainer) {
  const Tensor w = trainer.parameters().find("language_model.model.norm.weight").master;
  return {w.ptr<float>(), w.ptr<float>() + w.numel()};
}

TEST(DiskFull, AFailedCheckpointLeavesTheOneBeforeAndTheRunGoesOn) {
  const TestFolder folder("full"), undisturbed("undisturbed");
  const auto config = [](const TestFolder& output) {
    return parse_train_config(tiny_config_json(output.str()), "run.json",
                              {"steps=8"});  // saves at 4 and 8
  };
  Trainer(config(folder), {.stop_after = 4}).run();
  const int64_t log_bytes =
      static_cast<int64_t>(std::filesystem::file_size(folder.path() / "train.jsonl"));
  std::string message;
  {
    Trainer trainer(config(folder), {.resume = true});
    // Enough for four more lines of the log, too little for tokenizer and weights.
    const FileSizeLimit limit(static_cast<rlim_t>(3 * log_bytes));
    message = error_of([&] { trainer.run(); });
  }
  EXPECT_NE(message.find("step-00000008"), std::string::npos) << message;  // the file being written
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "step-00000008"));

  Trainer resumed(config(folder), {.resume = true});
  EXPECT_EQ(resumed.state().step, 4);
  resumed.run();
  Trainer whole(config(undisturbed), {});
  whole.run();
  EXPECT_EQ(final_weights(resumed), final_weights(whole));
}

TEST(DiskFull, ALogThatCannotBeWrittenStopsTheRunAndKeepsTheCheckpoint) {
  const TestFolder folder("full-log");
  const TrainConfig config =
      parse_train_config(tiny_config_json(folder.str()), "run.json", {"steps=8"});
  Trainer(config, {.stop_after = 4}).run();
  const int64_t log_bytes =
      static_cast<int64_t>(std::filesystem::file_size(folder.path() / "train.jsonl"));
  std::string message;
  {
    Trainer trainer(config, {.resume = true});
    const FileSizeLimit limit(static_cast<rlim_t>(log_bytes + 10));  // cuts the next line
    message = error_of([&] { trainer.run(); });
  }
  EXPECT_NE(message.find("train.jsonl"), std::string::npos) << message;
  EXPECT_NE(message.find("cannot write"), std::string::npos) << message;
  Trainer resumed(config, {.resume = true});  // drops the line that was cut
  EXPECT_EQ(resumed.state().step, 4);
  resumed.run();
  EXPECT_EQ(resumed.state().step, 8);
  const std::string log = read_file(folder.path() / "train.jsonl");
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 8);
}

}  // namespace
}  // namespace m3::train
