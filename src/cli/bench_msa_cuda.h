// m3 bench msa --device cuda: the same operators on a GPU (bench_msa.cpp has the CPU).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "cli/commands.h"

namespace m3::cli {

struct MsaCudaFlags {
  std::vector<int64_t> contexts;   // keys of a sequence, new tokens included
  std::vector<std::string> kinds;  // of msa, full
  int64_t num_new = 0;             // 0: all
  std::string workload;            // prefill_shapes.json instead of contexts
  double rho = 0;                  // correlation of neighbouring index queries
  int64_t rounds = 20;
  std::string json;
};

int bench_msa_cuda(const MsaCudaFlags& flags, const Args& args);

}  // namespace m3::cli
