// Vision tower: segments, positions and placeholders (model.md §8, §9, §17). Values: the goldens.
#include "model/vision.h"

#include <gtest/gtest.h>

#include "base/rng.h"
#include "model/model.h"

namespace m3 {
namespace {

const Checkpoint& tiny() {
  static const Checkpoint checkpoint = Checkpoint::open(M3_SOURCE_DIR "/tests/golden/models/tiny-vl");
  return checkpoint;
}

std::vector<float> random_patches(uint64_t seed, const VisionGrid& grid) {
  Philox rng(seed);
  std::vector<float> patches(grid.num_patches() * tiny().config().vision->patch_numel());
  for (float& value : patches) value = static_cast<float>(rng.normal());
  return patches;
}

TEST(Vision, positions_enumerate_two_by_two_blocks) {
  VisionConfig config;
  std::vector<int32_t> pos;
  append_vision_positions(config, {2, 2, 2}, pos);
  EXPECT_EQ(pos, (std::vector<int32_t>{0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 1}));
  pos.clear();
  append_vision_positions(config, {1, 4, 4}, pos);
  const std::vector<std::pair<int, int>> want = {{0, 0}, {0, 1}, {1, 0}, {1, 1}, {0, 2}, {0, 3}, {1, 2}, {1, 3},
                                                 {2, 0}, {2, 1}, {3, 0}, {3, 1}, {2, 2}, {2, 3}, {3, 2}, {3, 3}};
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(pos[3 * i + 1], want[i].first) << i;
    EXPECT_EQ(pos[3 * i + 2], want[i].second) << i;
  }
}

TEST(Vision, a_clip_is_cut_into_segments_of_four_steps) {
  VisionConfig config;
  const std::vector<VisionGrid> five = {{4, 6, 8}, {1, 6, 8}};
  EXPECT_EQ(vision_segments(config, {5, 6, 8}), five);
  EXPECT_EQ(vision_segments(config, {4, 2, 2}).size(), 1u);
  EXPECT_THROW(vision_segments(config, {1, 3, 2}), Error);
  EXPECT_THROW(vision_segments(config, {0, 2, 2}), Error);
}

// Segments of one pass must not see each other, whatever they are packed with.
TEST(Vision, features_of_a_picture_do_not_change_when_another_is_added) {
  const ModelConfig& config = tiny().config();
  const ModelWeights weights = weights_of(tiny());
  const VisionGrid first = {1, 4, 6}, second = {2, 2, 4};
  std::vector<float> patches = random_patches(1, first);
  const int64_t C = config.text.hidden_size, N = first.num_patches();
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Arena arena("vision", int64_t{64} << 20);
    auto encode = [&](std::vector<VisionGrid> segments) {
      int64_t total = 0;
      for (const VisionGrid& segment : segments) total += segment.num_patches();
      const Tensor features = arena.alloc("features", dtype, {total / 4, C});
      vision_forward(config, weights.vision, segments,
                     Tensor(patches.data(), DType::kF32, {total, config.vision->patch_numel()}), features, dtype, {}, arena);
      const auto* bytes = static_cast<const char*>(features.data());
      return std::vector<char>(bytes, bytes + N / 4 * C * dtype_bytes(dtype));
    };
    patches.resize(first.num_patches() * config.vision->patch_numel());
    const auto alone = encode({first});
    const std::vector<float> more = random_patches(2, second);
    patches.insert(patches.end(), more.begin(), more.end());
    EXPECT_EQ(encode({first, second}), alone) << dtype_name(dtype);
    EXPECT_LE(vision_forward_bytes(config, N + second.num_patches(), dtype), arena.capacity_bytes());
  }
}

TEST(Vision, a_pass_stays_inside_its_plan) {
  const ModelConfig& config = tiny().config();
  const ModelWeights weights = weights_of(tiny());
  for (const VisionGrid grid : {VisionGrid{1, 2, 2}, {1, 10, 14}, {4, 6, 6}}) {
    std::vector<float> patches = random_patches(3, grid);
    Arena features_arena("features", 1 << 20), arena("vision", int64_t{256} << 20);
    const int64_t N = grid.num_patches();
    const Tensor features = features_arena.alloc("features", DType::kBF16, {N / 4, config.text.hidden_size});
    vision_forward(config, weights.vision, std::span(&grid, 1),
                   Tensor(patches.data(), DType::kF32, {N, config.vision->patch_numel()}), features, DType::kBF16, {}, arena);
    EXPECT_LE(arena.peak_bytes(), vision_forward_bytes(config, N, DType::kBF16)) << N;
  }
}

// A clip in several passes equals the clip in one.
TEST(Vision, passes_of_whole_segments_change_nothing) {
  const VisionGrid clip = {9, 2, 4};
  std::vector<float> patches = random_patches(4, clip);
  const Tensor patches_NP(patches.data(), DType::kF32, {clip.num_patches(), tiny().config().vision->patch_numel()});
  auto encode = [&](int64_t max_patches) {
    ModelOptions options;
    options.decoder.dtype = DType::kF32;
    options.step = {16, 1, 1, 16};
    options.max_vision_patches = max_patches;
    Model model(tiny(), options);
    Arena arena("features", 1 << 20);
    const Tensor features = arena.alloc("features", DType::kF32, {model.num_features(clip), tiny().config().text.hidden_size});
    int passes = 0;
    model.encode_media(clip, patches_NP, features, [&](const Tensor&) { ++passes; });
    EXPECT_EQ(passes, max_patches >= clip.num_patches() ? 1 : 3);
    return std::vector<float>(features.ptr<float>(), features.ptr<float>() + features.numel());
  };
  const int64_t segment = vision_pass_patches(*tiny().config().vision, clip);
  EXPECT_EQ(segment, 32);
  EXPECT_EQ(encode(segment), encode(clip.num_patches()));
  EXPECT_THROW(encode(segment - 1), Error);
}

TEST(Placeholders, take_features_of_their_own_kind_in_order) {
  ModelConfig config = tiny().config();
  config.image_token_id = 10;
  config.video_token_id = 11;
  const std::vector<int32_t> ids = {1, 10, 10, 11, 5, 10, 11, 11};
  const std::vector<PlaceholderItem> items = {{false, 2}, {true, 3}, {false, 1}};  // feature rows 0 1, 2 3 4, 5
  const PlaceholderMap map = map_placeholders(config, ids, items);
  EXPECT_EQ(map.positions, (std::vector<int32_t>{1, 2, 3, 5, 6, 7}));
  EXPECT_EQ(map.order, (std::vector<int32_t>{0, 1, 2, 5, 3, 4}));
}

TEST(Placeholders, counts_that_differ_are_refused_with_both_numbers) {
  const ModelConfig& config = tiny().config();
  const std::vector<int32_t> ids = {1, config.image_token_id, config.image_token_id};
  for (const int64_t rows : {1, 3}) {
    const PlaceholderItem item = {false, rows};
    try {
      map_placeholders(config, ids, std::span(&item, 1));
      FAIL() << rows;
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                fmt::format("the prompt has 2 image placeholder tokens, its media give {} rows", rows));
    }
  }
}

}  // namespace
}  // namespace m3
