// Training logs (train.jsonl, docs/training.md) as curves.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace m3::plot {

struct Point {
  double x, y;
};

// One quantity of one run.
struct Curve {
  std::string run;
  std::vector<Point> points;
};

// Charts by title, "loss: cards" or "KL: layer 1", each with a curve per run that has it.
struct Chart {
  std::string title;
  bool log_scale = false;
  std::vector<Curve> curves;
};

enum class Axis { kStep, kTokens, kFlops };
const char* axis_name(Axis axis);  // "step", "tokens", "FLOP"

// `runs`: output folders of m3 train, or log files. Points are means over buckets of steps, at most
// `max_points` a curve. Records that are not sound JSON (the last line of a killed run) are passed
// over.
std::vector<Chart> read_charts(const std::vector<std::filesystem::path>& runs, Axis axis,
                               int max_points);

}  // namespace m3::plot
