// m3 plot: curves of training runs as one HTML file.
#include <fmt/core.h>

#include <algorithm>

#include "base/file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "train/plot/svg.h"

namespace m3::cli {

int command_plot(const Args& args) {
  std::vector<std::string> runs;
  std::string out = "curves.html", axis = "step", filter;
  int points = 300;
  Options options("plot",
                  "Draws the curves of training runs, one colour a run: losses by source and by "
                  "what came before, KL by layer, gradient "
                  "norms, expert load, captured mass, speed. The page is one file without scripts; "
                  "a name that ends in .svg gives the "
                  "first chart alone.",
                  "m3 plot runs/nano/seed-0 runs/nano/seed-1 --out nano.html\n  m3 plot "
                  "runs/nano/seed-0 --only 'loss: facts' --out facts.svg");
  options.positional("RUN", runs, "output folders of m3 train, or their train.jsonl");
  options.add("--out", out, "the file to write");
  options.add("--only", filter, "only charts whose title contains this");
  options.choice("--x", axis, {"step", "tokens", "flops"}, "what the horizontal axis counts");
  options.add("--points", points, "most points of a curve; each is a mean over steps");
  options.parse(args);
  if (points < 2) throw UsageError{"--points must be at least 2"};

  const plot::Axis x = axis == "tokens"  ? plot::Axis::kTokens
                       : axis == "flops" ? plot::Axis::kFlops
                                         : plot::Axis::kStep;
  std::vector<plot::Chart> charts = plot::read_charts({runs.begin(), runs.end()}, x, points);
  std::erase_if(charts, [&](const plot::Chart& chart) {
    return chart.title.find(filter) == std::string::npos;
  });
  if (charts.empty()) throw UsageError{fmt::format("no chart's title contains '{}'", filter)};
  std::vector<std::string> names;
  for (const plot::Chart& chart : charts) {
    for (const plot::Curve& curve : chart.curves) {
      if (std::find(names.begin(), names.end(), curve.run) == names.end())
        names.push_back(curve.run);
    }
  }
  write_file_atomic(out, out.ends_with(".svg")
                             ? plot::chart_svg(charts[0], names, plot::axis_name(x))
                             : plot::charts_page(charts, names, plot::axis_name(x)));
  fmt::print("{}: {} charts\n", out, charts.size());
  return 0;
}

}  // namespace m3::cli
