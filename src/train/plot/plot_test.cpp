#include <gtest/gtest.h>
#include <unistd.h>

#include <map>

#include "base/check.h"
#include "base/file.h"
#include "train/plot/svg.h"

namespace m3::plot {
namespace {

namespace fs = std::filesystem;

TEST(Plot, TicksAreRoundAndInside) {
  EXPECT_EQ(ticks(0, 10, 5), (std::vector<double>{0, 2, 4, 6, 8, 10}));
  EXPECT_EQ(ticks(3, 97, 4), (std::vector<double>{50}));
  const std::vector<double> small = ticks(0.011, 0.019, 4);
  ASSERT_EQ(small.size(), 4u);  // 0.012, 0.014, 0.016, 0.018
  EXPECT_NEAR(small[0], 0.012, 1e-12);
}

TEST(Plot, ALogBecomesCurvesAndTheCutLastLineIsPassedOver) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("m3-plot-{}", ::getpid());
  fs::create_directories(folder);
  std::string log;
  for (int step = 0; step < 4; ++step) {
    log += fmt::format(
        R"({{"step":{},"loss":{{"ce":{}}},"by_source":{{"cards":{{"answer":{},"answers":3}}}},"data":{{"tokens":10}}}})",
        step, 4 - step, 8 - step);
    log += "\n";
  }
  write_file_atomic(folder / "train.jsonl", log + R"({"step":4,"lo)");
  const std::vector<Chart> by_step = read_charts({folder}, Axis::kStep, 100);
  ASSERT_EQ(by_step.size(), 2u);
  EXPECT_EQ(by_step[1].title, "loss: cards");
  ASSERT_EQ(by_step[1].curves[0].points.size(), 4u);
  EXPECT_EQ(by_step[1].curves[0].points[3].y, 5);
  const std::vector<Chart> by_tokens =
      read_charts({folder}, Axis::kTokens, 2);  // means of two steps
  ASSERT_EQ(by_tokens[0].curves[0].points.size(), 2u);
  EXPECT_EQ(by_tokens[0].curves[0].points[0].x, 15);
  EXPECT_EQ(by_tokens[0].curves[0].points[0].y, 3.5);
  const std::string page = charts_page(by_step, {by_step[0].curves[0].run}, "step");
  EXPECT_NE(page.find("<polyline"), std::string::npos);
  EXPECT_EQ(page.find("src="), std::string::npos);  // nothing is loaded from elsewhere
  EXPECT_EQ(page.find("href="), std::string::npos);
  EXPECT_THROW(read_charts({folder / "none"}, Axis::kStep, 10), Error);
  fs::remove_all(folder);
}

TEST(Plot, InstrumentsOfLayersHaveCharts) {
  const fs::path folder = fs::temp_directory_path() / fmt::format("m3-plot-layers-{}", ::getpid());
  fs::create_directories(folder);
  write_file_atomic(folder / "train.jsonl",
                    R"({"step":0,"gradients":{"layers":[0.5,0.25]},"groups":{"text":{"update_ratio":0.01}},)"
                    R"("layers":[{"layer":1,"largest_logit":7,"media_mass":0.6,"media_share":0.4}]})"
                    "\n");
  std::map<std::string, double> values;
  for (const Chart& chart : read_charts({folder}, Axis::kStep, 10))
    values[chart.title] = chart.curves[0].points[0].y;
  EXPECT_EQ(values.size(), 5u);
  EXPECT_EQ(values["gradient norm: layer 1"], 0.25);
  EXPECT_EQ(values["update / weights: text"], 0.01);
  EXPECT_EQ(values["largest attention logit: layer 1"], 7);
  EXPECT_NEAR(values["text to media attention, 1: uniform: layer 1"], 1.5, 1e-12);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace m3::plot
