// m3 train: a training run by one configuration file.
#include <fmt/core.h>

#include <algorithm>
#include <csignal>

#include "base/check.h"
#include "base/log.h"
#include "base/machine_ceiling.h"
#include "base/progress.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "train/trainer.h"

namespace m3::cli {
namespace {

void on_signal(int) {
  train::Trainer::request_stop();
}

// The first Ctrl-C or TERM ends the run after its step; a second one ends the program at once.
void catch_signals() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

void check_memory(const MemoryPlan& plan) {
  fmt::print(stderr, "{}", plan.str());
  const int64_t available = available_memory_bytes();
  M3_CHECK(plan.total_bytes() <= available,
           "the run needs {} of memory and {} are free; lower compute.micro_batch_tokens or set "
           "compute.recompute=true",
           format_bytes(static_cast<double>(plan.total_bytes())),
           format_bytes(static_cast<double>(available)));
}

double ceiling_of(DType dtype) {
  const MachineCeiling ceiling = measure_machine_ceiling();
  const double gflops = dtype == DType::kBF16 ? std::max(ceiling.bf16_gflops, ceiling.fp32_gflops)
                                              : ceiling.fp32_gflops;
  log_info("this machine does {:.0f} GFLOP/s at best on {} threads", gflops, num_threads());
  return gflops;
}

}  // namespace

int command_train(const Args& args) {
  std::string file;
  std::vector<std::string> overrides;
  train::RunOptions run;
  int threads = 0;
  bool check = false;
  Options options("train",
                  "Trains a model by a configuration file (docs/training.md) and writes "
                  "checkpoints, which are model folders, and a "
                  "log into the configuration's output folder. Ctrl-C finishes the step, saves and "
                  "ends; --resume goes on, to the "
                  "bit as if nothing had happened, also after kill -9 or a power cut.",
                  "m3 train configs/train/tiny.json\n"
                  "  m3 train configs/train/nano.json --resume   (after scripts/train-nano.sh made its corpus)\n"
                  "  m3 train configs/train/nano.json --set seed=1 --set output=runs/nano-1 --set "
                  "sources.clips.count=14");
  options.positional("CONFIG", file, "the configuration, JSON");
  options.flag("--resume", run.resume, "go on from the newest checkpoint; start if there is none");
  options.add("--allow-change", run.may_change,
              "KEY: --resume may go on with another value of this key than the run was started "
              "with; log and checkpoints record it. E.g. compute.replicas, steps, manifests.corpus");
  options.add(
      "--set", overrides,
      "KEY=VALUE: replaces a value of the configuration; parts of the key are joined by dots");
  options.add("--stop-after", run.stop_after,
              "save and end after this many steps of the run (0: all)");
  options.threads(threads, "CPU threads (0: the configuration's)");
  options.flag("--check", check,
               "read the configuration, open the data, print the memory plan; no step");
  options.parse(args);
  if (run.stop_after < 0) throw UsageError{"--stop-after must be 0 or more (see m3 train --help)"};
  if (!run.may_change.empty() && !run.resume)
    throw UsageError{"--allow-change needs --resume (see m3 train --help)"};
  for (const std::string& text : overrides) {
    const size_t equals = text.find('=');
    if (equals == text.npos || equals == 0)
      throw UsageError{fmt::format("--set wants KEY=VALUE, got '{}'", text)};
  }

  const train::TrainConfig config = train::read_train_config(file, overrides);
  set_num_threads(threads > 0 ? threads : config.compute.threads);
  run.show_progress = true;
  train::Trainer trainer(config, run);
  check_memory(trainer.memory_plan());
  log_info("{} parameters; {} of {} steps are done",
           format_count(static_cast<double>(trainer.parameters().num_parameters())),
           trainer.state().step, config.steps);
  if (check) return 0;
  trainer.set_ceiling(ceiling_of(config.compute.dtype));
  catch_signals();
  const train::RunEnd end = trainer.run();
  const train::TrainingState& state = trainer.state();
  fmt::print("{} of {} steps, {} tokens, {:.3g} FLOP, {:.0f} s, {} updates skipped\n", state.step,
             config.steps, format_count(static_cast<double>(state.num_tokens)), state.flops,
             state.seconds, state.num_skipped);
  fmt::print("model: {}\n", trainer.checkpoint_folder().string());
  if (end == train::RunEnd::kStopped)
    fmt::print("stopped; go on with: m3 train {} --resume\n", file);
  return 0;
}

}  // namespace m3::cli
