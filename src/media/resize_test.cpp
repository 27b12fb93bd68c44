#include "media/resize.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "base/cpu_features.h"
#include "base/rng.h"
#include "base/threads.h"
#include "media/patches.h"
#include "media/sampling.h"

namespace m3 {
namespace {

Image random_image(int height, int width, uint64_t seed) {
  Philox random(seed);
  Image image(height, width);
  for (uint8_t& v : image.rgb_HW3) v = static_cast<uint8_t>(random.next_u32());
  return image;
}

TEST(Resize, InstructionSetsAndThreadCountsGiveTheSameBytes) {
  const CpuIsa best = cpu_isa_detected();
  if (best < CpuIsa::kAvx2) GTEST_SKIP() << "this CPU has no AVX2";
  Philox random(11);
  for (int trial = 0; trial < 60; ++trial) {
    const int height = 1 + static_cast<int>(random.below(90)), width = 1 + static_cast<int>(random.below(90));
    const ImageSize size{1 + static_cast<int>(random.below(120)), 1 + static_cast<int>(random.below(120))};
    const Image image = random_image(height, width, trial);
    cpu_isa_override(CpuIsa::kPortable);
    const int threads = num_threads();
    set_num_threads(1);
    const Image plain = resize_bicubic(image, size);
    set_num_threads(threads);
    cpu_isa_override(best);
    const Image fast = resize_bicubic(image, size);
    ASSERT_EQ(plain.rgb_HW3, fast.rgb_HW3) << height << " x " << width << " to " << size.height << " x " << size.width;
  }
}

TEST(Resize, AConstantPictureStaysConstantAndSameSizeIsTheIdentity) {
  Image flat(31, 57);
  for (uint8_t& v : flat.rgb_HW3) v = 201;
  for (const ImageSize size : {ImageSize{7, 9}, ImageSize{100, 200}, ImageSize{31, 80}}) {
    for (uint8_t v : resize_bicubic(flat, size).rgb_HW3) ASSERT_EQ(v, 201);
  }
  const Image noise = random_image(31, 57, 3);
  EXPECT_EQ(resize_bicubic(noise, {31, 57}).rgb_HW3, noise.rgb_HW3);
}

TEST(SmartResize, TableOfTheModelSpecification) {  // model.md §12
  const struct { int h, w, H, W; } kTable[] = {{1080, 1920, 504, 896}, {864, 1536, 476, 868}, {480, 640, 476, 644},
                                               {3000, 4000, 560, 756}, {100, 100, 112, 112}, {14, 14, 56, 56},
                                               {42, 42, 56, 56}, {70, 70, 56, 56}, {20, 2000, 28, 1988}, {19, 19, 84, 84}};
  for (const auto& row : kTable) {
    const ImageSize size = smart_resize(row.h, row.w, kImageBounds);
    EXPECT_EQ(size, (ImageSize{row.H, row.W})) << row.h << " x " << row.w << ": " << size.height << " x " << size.width;
  }
  EXPECT_THROW(smart_resize(1, 201, kImageBounds), Error);
  EXPECT_THROW(smart_resize(0, 5, kImageBounds), Error);
  EXPECT_THROW(smart_resize(int64_t{1} << 62, 1, kImageBounds), Error);
}

TEST(Patches, EveryValueLiesWhereTheOrderSays) {
  // model.md §8.6: t, block row, block column, row in block, column in block; channel, temporal, y, x.
  const std::vector<Image> frames = {random_image(56, 84, 1), random_image(56, 84, 2), random_image(56, 84, 3)};
  const Grid grid = patch_grid(3, 56, 84);
  ASSERT_EQ(grid, (Grid{2, 4, 6}));
  EXPECT_EQ(grid.num_tokens(), 12);
  std::vector<float> rows(grid.num_rows() * kPatchValues);
  write_patch_rows(frames, rows);
  const double mean[] = {0.48145466, 0.4578275, 0.40821073}, std[] = {0.26862954, 0.26130258, 0.27577711};
  for (int t = 0; t < 2; ++t)
    for (int py = 0; py < 4; ++py)
      for (int px = 0; px < 6; ++px) {
        const int row = ((t * 2 + py / 2) * 3 + px / 2) * 4 + py % 2 * 2 + px % 2;
        for (int i = 0; i < kPatchValues; i += 7) {
          const int c = i / 392, tau = i / 196 % 2, y = i / 14 % 14, x = i % 14;
          const Image& frame = frames[std::min(2 * t + tau, 2)];
          const double v = frame.row(py * 14 + y)[3 * (px * 14 + x) + c];
          ASSERT_NEAR(rows[row * kPatchValues + i], (v / 255 - mean[c]) / std[c], 1e-6) << row << " " << i;
        }
      }
}

TEST(Patches, WrongSizesAreRefused) {
  std::vector<float> rows(16 * kPatchValues);
  const std::vector<Image> odd = {Image(56, 57)}, mixed = {Image(56, 56), Image(56, 84)}, right = {Image(56, 56)};
  EXPECT_THROW(write_patch_rows(odd, rows), Error);
  EXPECT_THROW(write_patch_rows(mixed, rows), Error);
  EXPECT_THROW(write_patch_rows({}, rows), Error);
  EXPECT_THROW(write_patch_rows(right, std::span(rows).first(1176)), Error);
  EXPECT_NO_THROW(write_patch_rows(right, rows));
}

TEST(Sampling, ExtremeRatesEndAndBadOnesAreRefused) {
  EXPECT_EQ(sample_frames(5, 30, 1e9), (std::vector<int64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(sample_frames(1000, 1e-9, 1e-9), sample_frames(1000, 30, 30));
  EXPECT_EQ(sample_frames(1000, 1e9, 1e-300), (std::vector<int64_t>{0}));
  EXPECT_TRUE(sample_frames(0, 30, 1).empty());
  EXPECT_THROW(sample_frames(5, 0, 1), Error);
  EXPECT_THROW(sample_frames(5, 30, -1), Error);
}

}  // namespace
}  // namespace m3
