// CPU path of attend. attend.cpp checks the tensors and calls these.
#pragma once
#include "ops/attend/attend.h"

namespace m3 {

struct AttendCpuArgs {
  const Tensor *q_THD, *k, *v, *o_THD;
  const int32_t* lists;  // or absent
  float* lse_TH;         // or absent
  void* workspace;
};

void attend_cpu_plan(AttendPlan& plan, const MsaBatch& batch);  // items and workspace_bytes
void attend_cpu(const AttendPlan& plan, const MsaBatch& batch, const AttendCpuArgs& args);

}  // namespace m3
