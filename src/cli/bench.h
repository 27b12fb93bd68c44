// The kinds of m3 bench, and what their reports share.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "base/machine_ceiling.h"
#include "cli/commands.h"

namespace m3::cli {

int bench_model(const Args& args);
int bench_msa(const Args& args);
int bench_msa_train(const Args& args);
int bench_serve(const Args& args);

std::vector<int64_t> parse_numbers(const std::string& flag, const std::string& text);  // "512,4096"; throws UsageError

// Ceilings beside each measurement: clocks and shared memory of many machines drift by more than what is measured.
class CeilingWatch {
 public:
  CeilingWatch() : first_(measure_machine_ceiling()), last_(first_) {}
  const MachineCeiling& first() const { return first_; }
  // Call after a measurement: the higher value, each, of now and of the call before.
  MachineCeiling beside();

 private:
  MachineCeiling first_, last_;
};

// Machine, instruction set, threads, build, date, command line and ceilings: the head of every result file.
nlohmann::ordered_json bench_head(const std::string& command, const Args& args, const MachineCeiling& ceiling);

}  // namespace m3::cli
