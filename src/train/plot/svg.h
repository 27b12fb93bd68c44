// Charts as SVG, and a page of them as one HTML file that needs nothing else.
#pragma once
#include <string>

#include "train/plot/run_curves.h"

namespace m3::plot {

// Run i of `runs` has colour i wherever it appears.
std::string chart_svg(const Chart& chart, const std::vector<std::string>& runs,
                      const std::string& x_name);
std::string charts_page(const std::vector<Chart>& charts, const std::vector<std::string>& runs,
                        const std::string& x_name);

// Round numbers that cover [low, high]: about `count` of them; powers of ten and their halves and
// fifths.
std::vector<double> ticks(double low, double high, int count);

}  // namespace m3::plot
