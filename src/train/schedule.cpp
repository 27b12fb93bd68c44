#include "train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace m3::train {

double run_share(int64_t step, int64_t steps) {
  return static_cast<double>(step) / static_cast<double>(steps);
}

namespace {

// Share of the last decay_share of the steps that is over; below 0: it has not begun.
double decay_progress(const ScheduleConfig& schedule, int64_t step, int64_t steps) {
  const double length = schedule.decay_share * static_cast<double>(steps);
  if (length == 0) return -1;
  return (static_cast<double>(step) - (static_cast<double>(steps) - length)) / length;
}

}  // namespace

double lr_factor(const ScheduleConfig& schedule, int64_t step, int64_t steps) {
  using Kind = ScheduleConfig::Kind;
  if (step < schedule.warmup_steps)
    return static_cast<double>(step + 1) / static_cast<double>(schedule.warmup_steps);
  const double falling = 1 - schedule.final_factor;
  if (schedule.kind == Kind::kConstant) return 1;
  if (schedule.kind == Kind::kStableDecay)
    return 1 - falling * std::max(0.0, decay_progress(schedule, step, steps));
  const double t = static_cast<double>(step - schedule.warmup_steps) /
                   static_cast<double>(steps - schedule.warmup_steps);
  return schedule.final_factor + falling * 0.5 * (1 + std::cos(std::numbers::pi * t));
}

bool in_final_decay(const ScheduleConfig& schedule, int64_t step, int64_t steps) {
  return schedule.kind != ScheduleConfig::Kind::kConstant &&
         decay_progress(schedule, step, steps) >= 0;
}

const StageConfig& stage_at(const TrainConfig& config, int64_t step) {
  const double f = run_share(step, config.steps);
  for (const StageConfig& stage : config.stages) {
    if (f < stage.until) return stage;
  }
  return config.stages.back();
}

int64_t documents_at(const SourceConfig& source, int64_t step, int64_t steps) {
  const double f = run_share(step, steps);
  return step % source.every == 0 && f >= source.from && f < source.until ? source.count : 0;
}

double easy_share(const SourceConfig& source, double f) {
  return source.easy_until > 0 ? std::max(0.0, 1 - f / source.easy_until) : 0;
}

double bare_share(const SourceConfig& source, double f) {
  return std::max(source.bare_min, source.bare_until > 0 ? 1 - f / source.bare_until : 0);
}

}  // namespace m3::train
