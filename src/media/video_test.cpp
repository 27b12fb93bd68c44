// Films beyond the goldens: cut and damaged ones, limits, streaming.
#include "media/video.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "media/preprocess.h"
#include "media/sampling.h"
#include "media/test_pictures.h"

namespace m3 {
namespace {

using namespace test;

std::vector<Image> all_frames(const std::string& film, const MediaLimits& limits = {}) {
  VideoReader reader(as_bytes(film), limits);
  std::vector<Image> frames;
  while (reader.next()) frames.push_back(reader.image());
  return frames;
}

std::string film_refusal(const std::string& film, const MediaLimits& limits = {}) {
  try {
    all_frames(film, limits);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

class Video : public testing::Test {
 protected:
  void SetUp() override {
    if (!video_supported()) GTEST_SKIP() << "this build lacks FFmpeg";
  }
};

TEST_F(Video, AFilmCutAnywhereIsRefusedOrComplete) {
  for (const char* name : {"broken/mp4_good.mp4", "broken/webm_vp8.webm", "broken/mp4_audio_first.mp4"}) {
    const std::string whole = golden(name);
    const std::vector<Image> want = all_frames(whole);
    ASSERT_EQ(want.size(), 12u);
    for (size_t size = 0; size < whole.size(); size += 29) {
      try {
        const std::vector<Image> got = all_frames(whole.substr(0, size));
        ASSERT_EQ(got.size(), want.size()) << name << " cut to " << size << " of " << whole.size();
        for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i].rgb_HW3, want[i].rgb_HW3) << name << " cut to " << size;
      } catch (const Error& error) {
        ASSERT_GT(std::string(error.what()).size(), 10u);
      }
    }
  }
}

TEST_F(Video, RandomDamageIsRefusedOrKeepsTheFrameCount) {
  constexpr uint64_t kSeed = 5;
  Philox random(kSeed);
  const MediaLimits small{.max_pixels = 1'000'000, .max_source_frames = 1000};
  int num_refused = 0;
  for (const char* name : {"broken/mp4_good.mp4", "broken/webm_vp8.webm", "broken/mp4_edit_list.mp4"}) {
    const std::string whole = golden(name);
    for (int trial = 0; trial < 120; ++trial) {
      std::string damaged = whole;
      for (uint64_t flips = 1 + random.below(6); flips > 0; --flips) {
        damaged[random.below(damaged.size())] = static_cast<char>(random.below(256));
      }
      num_refused += !film_refusal(damaged, small).empty();
    }
  }
  EXPECT_GT(num_refused, 60) << "seed " << kSeed;
}

TEST_F(Video, LimitsAreNamed) {
  const std::string film = golden("broken/mp4_good.mp4");  // 48 x 64, 12 frames
  EXPECT_EQ(film_refusal(film, {.max_pixels = 3072, .max_source_frames = 12}), "");
  EXPECT_NE(film_refusal(film, {.max_pixels = 3071}).find("48 x 64 pixels (height x width) is too large"), std::string::npos);
  EXPECT_NE(film_refusal(film, {.max_source_frames = 11}).find("the limit is 11"), std::string::npos);
  EXPECT_NE(film_refusal(film, {.max_file_bytes = 10}).find("the limit is 10"), std::string::npos);
  VideoOptions options{.target_fps = 25, .limits = {.max_sampled_frames = 11}};
  EXPECT_THROW(preprocess_video(as_bytes(film), options), Error);
  options.limits = {.max_video_pixels = 12 * 56 * 56 - 1};
  EXPECT_THROW(preprocess_video(as_bytes(film), options), Error);
  options.limits = {};
  EXPECT_EQ(preprocess_video(as_bytes(film), options).grid.t, 6);
}

TEST_F(Video, KeptFramesEqualThoseOfTheWholeFilm) {
  const std::string film = golden("files/clip.mp4");
  const MediaRows streamed = preprocess_video(as_bytes(film), {.target_fps = 2});
  std::vector<Image> kept;
  VideoReader reader(as_bytes(film));
  const std::vector<int64_t> indices = sample_frames(190, reader.fps(), 2);
  for (int64_t n = 0; reader.next(); ++n) {
    if (std::find(indices.begin(), indices.end(), n) != indices.end()) kept.push_back(reader.image());
  }
  const MediaRows whole = preprocess_frames(std::move(kept), reader.fps(), indices);
  EXPECT_EQ(streamed.rows, whole.rows);
  EXPECT_EQ(streamed.seconds, whole.seconds);
}

TEST_F(Video, TwoReadersAtOnceAndAReaderLeftEarly) {
  const std::string film = golden("broken/mp4_good.mp4");
  VideoReader a(as_bytes(film)), b(as_bytes(film));
  ASSERT_TRUE(a.next());
  ASSERT_TRUE(a.next());
  ASSERT_TRUE(b.next());
  const Image second = a.image(), first = b.image();
  ASSERT_TRUE(b.next());
  EXPECT_EQ(b.image().rgb_HW3, second.rgb_HW3);
  EXPECT_NE(first.rgb_HW3, second.rgb_HW3);
}

TEST_F(Video, PicturesAndOtherFilesAreNamed) {
  EXPECT_NE(film_refusal(golden("resize/rgba.png")).find("picture (PNG)"), std::string::npos);
  EXPECT_NE(film_refusal("hello").find("not a video"), std::string::npos);
  EXPECT_NE(film_refusal("").find("empty"), std::string::npos);
  EXPECT_NE(film_refusal(std::string("\x1a\x45\xdf\xa3", 4) + std::string(500, 'x')), "");
  EXPECT_NE(film_refusal("OggS" + std::string(500, 'x')), "");
  EXPECT_NE(film_refusal(std::string("\0\0\1\xba", 4) + std::string(5000, 'x')), "");
}

}  // namespace
}  // namespace m3
