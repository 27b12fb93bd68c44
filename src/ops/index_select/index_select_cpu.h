// CPU path of index_select. index_select.cpp checks the tensors and calls these.
#pragma once
#include "ops/index_select/index_select.h"

namespace m3 {

struct IndexSelectCpuArgs {
  const void* qi_TRX;
  DType qi_dtype;
  const Tensor* ki;
  int32_t* ids_RTK;
  float* sel_scores_RTK;  // or absent
  void* workspace;
};

void index_select_cpu_plan(IndexSelectPlan& plan, const MsaBatch& batch);  // items and workspace_bytes
void index_select_cpu(const IndexSelectPlan& plan, const MsaBatch& batch, const IndexSelectCpuArgs& args);

}  // namespace m3
