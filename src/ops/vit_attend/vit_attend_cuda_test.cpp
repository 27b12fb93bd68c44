// Vision attention on the GPU against vit_attend_ref (fp64); tolerances of msa.md §14 for bf16
// attention.
#include <gtest/gtest.h>

#include "ops/common/paged_case.h"
#include "ops/vit_attend/vit_attend.h"
#include "ops/vit_attend/vit_attend_sm90.h"

namespace m3 {
namespace {

struct Result {
  std::vector<uint16_t> o;
  std::vector<float> lse;
};

// q, k, v lie in one joint projection [T, 3, H, D].
struct VisionCase {
  std::vector<int32_t> cu;
  int heads, dim;
  uint64_t seed;
  float loud = 1;

  int64_t tokens() const { return cu.back(); }
  void values(Mirror& joint) const {
    const ValueSource source(seed);
    for (int64_t i = 0; i < joint.host().numel(); ++i)
      joint.ptr<bf16>()[i] = bf16(loud * source.normal(1, i));
  }
};

Result run(const VisionCase& c, Mirror& joint) {
  const int64_t T = c.tokens(), row = int64_t{c.heads} * c.dim;
  Mirror o(DType::kBF16, {T, c.heads, c.dim}, true), lse(DType::kF32, {T, c.heads}, true);
  for (Mirror* m : {&o, &lse}) m->fill_bytes(0xff), m->upload();
  const std::vector<VitTile> list = vit_attend_tiles(c.cu);
  Mirror tiles(DType::kI32, {static_cast<int64_t>(list.size()) * 4 + 1}, true);
  std::memcpy(tiles.ptr<char>(), list.data(), list.size() * sizeof(VitTile));
  tiles.upload(), joint.upload();
  vit_attend_sm90({.q_THD = joint.device_ptr<bf16>(),
                   .k_THD = joint.device_ptr<bf16>() + row,
                   .v_THD = joint.device_ptr<bf16>() + 2 * row,
                   .token_stride = 3 * row,
                   .o_THD = o.device_ptr<bf16>(),
                   .lse_TH = lse.device_ptr<float>(),
                   .heads = c.heads,
                   .head_dim = c.dim,
                   .scale = static_cast<float>(1 / std::sqrt(c.dim)),
                   .tiles = tiles.device_ptr<VitTile>(),
                   .num_tiles = static_cast<int>(list.size())},
                  {});
  o.download(), lse.download();
  return {{o.ptr<uint16_t>(), o.ptr<uint16_t>() + o.host().numel()},
          {lse.ptr<float>(), lse.ptr<float>() + lse.host().numel()}};
}

void check(const VisionCase& c, Mirror& joint, const Result& got) {
  const int64_t T = c.tokens(), row = int64_t{c.heads} * c.dim;
  const Shape shape = {T, c.heads, c.dim};
  std::vector<bf16> parts[3];
  for (int part = 0; part < 3; ++part) {
    for (int64_t t = 0; t < T; ++t) {
      const bf16* source = joint.ptr<bf16>() + (t * 3 + part) * row;
      parts[part].insert(parts[part].end(), source, source + row);
    }
  }
  std::vector<float> o(T * row), lse(T * c.heads);
  vit_attend_ref(
      Tensor(parts[0].data(), DType::kBF16, shape), Tensor(parts[1].data(), DType::kBF16, shape),
      Tensor(parts[2].data(), DType::kBF16, shape), c.cu, static_cast<float>(1 / std::sqrt(c.dim)),
      Tensor(o.data(), DType::kF32, shape), Tensor(lse.data(), DType::kF32, {T, c.heads}));
  double square = 0;
  for (float x : o) square += double{x} * x;
  const double floor = 0.1 * std::sqrt(square / static_cast<double>(T * c.heads));
  double sum = 0;
  for (int64_t r = 0; r < T * c.heads; ++r) {
    double difference = 0, length = 0;
    for (int d = 0; d < c.dim; ++d) {
      bf16 mine;
      mine.bits = got.o[r * c.dim + d];
      const double want = o[r * c.dim + d], error = to_float(mine) - want;
      difference += error * error, length += want * want;
    }
    const double error = std::sqrt(difference) / std::max(std::sqrt(length), floor);
    ASSERT_LE(error, 8e-3) << "seed " << c.seed << " token " << r / c.heads << " head "
                           << r % c.heads;
    ASSERT_NEAR(got.lse[r], lse[r], 5e-4 + std::abs(lse[r]) * 0x1p-21)
        << "seed " << c.seed << " row " << r;
    sum += error;
  }
  ASSERT_LE(sum, 4e-3 * static_cast<double>(T * c.heads));
}

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

TEST(VitAttendCuda, SegmentsOfManyLengthsMatchReference) {
  M3_NEEDS_GPU();
  const std::vector<int32_t> cu = {0, 1, 1, 16, 79, 143, 208, 335, 463, 592, 1000};
  for (const int dim : {80, 64}) {
    for (const float loud : {1.0f, 2.0f}) {
      const VisionCase c = {cu, 3, dim, static_cast<uint64_t>(dim), loud};
      Mirror joint(DType::kBF16, {c.tokens(), 3, c.heads, c.dim}, true);
      c.values(joint);
      check(c, joint, run(c, joint));
    }
  }
}

TEST(VitAttendCuda, OneImageOf2304PatchesMatchesReference) {
  M3_NEEDS_GPU();
  const VisionCase c = {{0, 2304}, 2, 80, 7};
  Mirror joint(DType::kBF16, {c.tokens(), 3, c.heads, c.dim}, true);
  c.values(joint);
  check(c, joint, run(c, joint));
}

TEST(VitAttendCuda, OtherSegmentsChangeNoBitsEvenIfTheyAreNan) {
  M3_NEEDS_GPU();
  const VisionCase c = {{0, 100, 333, 400}, 4, 80, 8};
  Mirror joint(DType::kBF16, {c.tokens(), 3, c.heads, c.dim}, true);
  c.values(joint);
  const Result clean = run(c, joint);
  const int64_t row = int64_t{3} * c.heads * c.dim;
  const bf16 nan(std::numeric_limits<float>::quiet_NaN());
  std::fill_n(joint.ptr<bf16>(), 100 * row, nan);
  std::fill_n(joint.ptr<bf16>() + 333 * row, 67 * row, nan);
  const Result poisoned = run(c, joint);
  const int64_t width = int64_t{c.heads} * c.dim;
  EXPECT_TRUE(std::equal(clean.o.begin() + 100 * width, clean.o.begin() + 333 * width,
                         poisoned.o.begin() + 100 * width));
  EXPECT_TRUE(std::equal(clean.lse.begin() + 100 * c.heads, clean.lse.begin() + 333 * c.heads,
                         poisoned.lse.begin() + 100 * c.heads));
}

TEST(VitAttendCuda, TilesCoverEveryRowOnce) {
  const std::vector<int32_t> cu = {0, 5, 5, 300, 428};
  std::vector<int> seen(428, 0);
  for (const VitTile& tile : vit_attend_tiles(cu)) {
    EXPECT_LE(tile.end - tile.begin, 128);
    for (int i = tile.begin; i < tile.end; ++i) {
      ++seen[i];
      EXPECT_LE(tile.first_key, i);
      EXPECT_GT(tile.last_key, i);
    }
  }
  for (int i = 0; i < 428; ++i) EXPECT_EQ(seen[i], 1) << i;
}

}  // namespace
}  // namespace m3
