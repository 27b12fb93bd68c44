#include "train/plot/svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace m3::plot {
namespace {

constexpr int kWidth = 460, kHeight = 260, kLeft = 56, kRight = 12, kTop = 28, kBottom = 34;
constexpr const char* kColours[] = {"#1f6fb4", "#d1495b", "#2e8b57", "#b8860b",
                                    "#7b4fa3", "#008b8b", "#8b5a2b", "#444444"};

std::string escape(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  }
  return out;
}

std::string short_number(double value) {
  const double size = std::abs(value);
  if (size >= 1e9) return fmt::format("{:.3g}e9", value / 1e9);
  if (size >= 1e6) return fmt::format("{:.3g} M", value / 1e6);
  if (size >= 1e4) return fmt::format("{:.3g} k", value / 1e3);
  return fmt::format("{:.3g}", value);
}

// Maps values to pixels.
struct Scale {
  double low, high;
  bool log;
  double share(double value) const {
    if (log) return (std::log(value) - std::log(low)) / (std::log(high) - std::log(low));
    return (value - low) / (high - low);
  }
};

struct Frame {
  Scale x, y;
  double px(double value) const { return kLeft + x.share(value) * (kWidth - kLeft - kRight); }
  double py(double value) const {
    return kHeight - kBottom - y.share(value) * (kHeight - kTop - kBottom);
  }
};

Frame frame_of(const Chart& chart) {
  double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
  for (const Curve& curve : chart.curves) {
    for (const Point& p : curve.points) {
      x0 = std::min(x0, p.x);
      x1 = std::max(x1, p.x);
      y0 = std::min(y0, p.y);
      y1 = std::max(y1, p.y);
    }
  }
  const bool log = chart.log_scale && y0 > 0;
  if (log) {
    y0 /= 1.1;
    y1 *= 1.1;
  } else {
    const double margin = y1 > y0 ? 0.05 * (y1 - y0) : std::max(std::abs(y1), 1.0) * 0.1;
    y0 -= margin;
    y1 += margin;
  }
  if (x1 <= x0) x1 = x0 + 1;
  return {{x0, x1, false}, {y0, y1, log}};
}

std::vector<double> log_ticks(double low, double high) {
  std::vector<double> out;
  const bool wide = high / low > 30;
  for (double decade = std::pow(10, std::floor(std::log10(low))); decade <= high; decade *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (wide && step != 1) continue;
      if (step * decade >= low && step * decade <= high) out.push_back(step * decade);
    }
  }
  return out;
}

}  // namespace

std::vector<double> ticks(double low, double high, int count) {
  const double raw = (high - low) / std::max(count, 1),
               power = std::pow(10, std::floor(std::log10(raw)));
  double step = 10 * power;
  for (const double factor : {5.0, 2.0, 1.0}) {
    if (factor * power >= raw * 0.999) step = factor * power;
  }
  std::vector<double> out;
  for (double i = std::ceil(low / step - 1e-9); i * step <= high * (1 + 1e-12) + 1e-12; ++i)
    out.push_back(i * step);
  return out;
}

std::string chart_svg(const Chart& chart, const std::vector<std::string>& runs,
                      const std::string& x_name) {
  const Frame frame = frame_of(chart);
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} "
      "{1}\" font-family=\"sans-serif\" "
      "font-size=\"11\"><rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>"
      "<text x=\"{2}\" y=\"17\" font-size=\"13\" font-weight=\"bold\">{3}</text>\n",
      kWidth, kHeight, kLeft, escape(chart.title));
  const int bottom = kHeight - kBottom, right = kWidth - kRight;
  std::vector<double> y_ticks =
      frame.y.log ? log_ticks(frame.y.low, frame.y.high) : ticks(frame.y.low, frame.y.high, 5);
  if (y_ticks.size() < 2) y_ticks = ticks(frame.y.low, frame.y.high, 4);
  for (const double y : y_ticks) {
    out += fmt::format(
        "<line x1=\"{}\" x2=\"{}\" y1=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"#ddd\"/>"
        "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
        kLeft, right, frame.py(y), frame.py(y), kLeft - 5, frame.py(y) + 4, short_number(y));
  }
  for (const double x : ticks(frame.x.low, frame.x.high, 5)) {
    out += fmt::format(
        "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#999\"/>"
        "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
        frame.px(x), bottom, bottom + 4, bottom + 16, short_number(x));
  }
  out += fmt::format(
      "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#999\"/>"
      "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}{}</text>\n",
      kLeft, kTop, right - kLeft, bottom - kTop, right, kHeight - 4, escape(x_name),
      frame.y.log ? ", logarithmic" : "");
  for (const Curve& curve : chart.curves) {
    const size_t run =
        static_cast<size_t>(std::find(runs.begin(), runs.end(), curve.run) - runs.begin());
    std::string path;
    for (const Point& p : curve.points)
      path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "" : " ", frame.px(p.x), frame.py(p.y));
    out += fmt::format(
        "<polyline fill=\"none\" stroke=\"{}\" stroke-width=\"1.5\" points=\"{}\"><title>{}: last "
        "{}</title></polyline>\n",
        kColours[run % std::size(kColours)], path, escape(curve.run),
        short_number(curve.points.back().y));
  }
  return out + "</svg>\n";
}

std::string charts_page(const std::vector<Chart>& charts, const std::vector<std::string>& runs,
                        const std::string& x_name) {
  std::string out =
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>m3 training "
      "curves</title>\n"
      "<style>body{font-family:sans-serif;margin:16px;color:#222}main{display:flex;flex-wrap:wrap;"
      "gap:10px}"
      "svg{border:1px solid #eee}.run{margin-right:18px}.run "
      "b{display:inline-block;width:18px;height:4px;margin-right:6px;"
      "vertical-align:middle}</style></head><body>\n<p>";
  for (size_t i = 0; i < runs.size(); ++i) {
    out += fmt::format("<span class=\"run\"><b style=\"background:{}\"></b>{}</span>",
                       kColours[i % std::size(kColours)], escape(runs[i]));
  }
  out += "</p>\n<main>\n";
  for (const Chart& chart : charts) out += chart_svg(chart, runs, x_name);
  return out + "</main></body></html>\n";
}

}  // namespace m3::plot
