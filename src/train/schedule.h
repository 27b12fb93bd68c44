// What changes over a run: learning rate, stage, shares of easy documents. Pure functions of the
// step.
#pragma once
#include "train/train_config.h"

namespace m3::train {

// Share of the run that step `step` (from 0) begins at.
double run_share(int64_t step, int64_t steps);

// Factor of the peak rate in step `step`: rises linearly over the warm-up (step + 1 of
// warmup_steps), then
//   cosine        final + (1 - final) (1 + cos(pi t)) / 2, t: 0 after the warm-up to 1 at the end
//   stable_decay  1, then linearly to final over the last decay_share of the steps
//   constant      1
double lr_factor(const ScheduleConfig& schedule, int64_t step, int64_t steps);
// Whether the learning rate falls towards the end of the run.
bool in_final_decay(const ScheduleConfig& schedule, int64_t step, int64_t steps);

const StageConfig& stage_at(const TrainConfig& config, int64_t step);

// Documents of a source in this step: its count, or 0 outside its share of the run and between its
// steps.
int64_t documents_at(const SourceConfig& source, int64_t step, int64_t steps);
double easy_share(const SourceConfig& source, double f);
double bare_share(const SourceConfig& source, double f);

}  // namespace m3::train
