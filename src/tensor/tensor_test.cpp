#include "tensor/tensor.h"

#include <gtest/gtest.h>

#include "tensor/arena.h"
#include "tensor/device.h"

namespace m3 {
namespace {

TEST(Shape, counts_and_prints) {
  EXPECT_EQ(Shape({}).numel(), 1);
  EXPECT_EQ(Shape({3, 0, 5}).numel(), 0);
  EXPECT_EQ(Shape({3, 4}).str(), "[3, 4]");
  EXPECT_THROW(Shape({int64_t{1} << 40, int64_t{1} << 40}).numel(), Error);
  EXPECT_THROW(Shape({-1}), Error);
}

TEST(Tensor, views_share_memory) {
  float data[24];
  for (int i = 0; i < 24; ++i) data[i] = static_cast<float>(i);
  const Tensor t(data, DType::kF32, {4, 2, 3});
  EXPECT_EQ(t.rows(1, 3).ptr<float>()[0], 6);
  EXPECT_EQ(t.rows(1, 3).shape(), Shape({2, 2, 3}));
  EXPECT_EQ(t[3][1].ptr<float>()[2], 23);
  EXPECT_EQ(t.reshape({8, 3})[7].ptr<float>()[0], 21);
  EXPECT_THROW(t.reshape({5, 5}), Error);
  EXPECT_THROW(t.rows(2, 5), Error);
  EXPECT_THROW(t.ptr<bf16>(), Error);
}

TEST(Arena, carves_aligned_and_gives_back) {
  Arena arena("test", 4096);
  const Tensor a = arena.alloc("a", DType::kF32, {3});
  const Tensor b = arena.alloc("b", DType::kBF16, {5, 2});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % Arena::kAlignment, 0u);
  EXPECT_NE(a.data(), b.data());
  {
    ArenaScope scope(arena);
    arena.alloc("c", DType::kU8, {2048});
  }
  EXPECT_EQ(arena.used_bytes(), 256 + 20);
  EXPECT_EQ(arena.peak_bytes(), 512 + 2048);
  try {
    arena.alloc("too large", DType::kF32, {1 << 20});
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("arena test: too large needs 4194304 bytes"), std::string::npos)
        << error.what();
  }
}

TEST(Arena, measuring_counts_what_a_real_one_would_use) {
  auto carve = [](Arena& arena) {
    arena.alloc("a", DType::kF32, {3});
    ArenaScope scope(arena);
    EXPECT_TRUE(arena.alloc("b", DType::kBF16, {1000, 7}).defined());
  };
  Arena real("real", 1 << 20), measuring = Arena::measuring("measuring");
  carve(real);
  carve(measuring);
  EXPECT_EQ(measuring.peak_bytes(), real.peak_bytes());
  EXPECT_GT(measuring.peak_bytes(), 14000);
}

TEST(MemoryPlan, adds_up) {
  MemoryPlan plan;
  plan.add("weights", 1 << 20);
  plan.add("cache", 3 << 20);
  EXPECT_EQ(plan.total_bytes(), 4 << 20);
  EXPECT_NE(plan.str().find("total                                 4.0 MiB"), std::string::npos) << plan.str();
}

TEST(Memory, resident_bytes_grow_with_touched_memory_only) {
  const int64_t before = resident_bytes();
  Arena arena("test", int64_t{1} << 30);
  EXPECT_LT(resident_bytes(), before + (8 << 20));
  auto* bytes = static_cast<char*>(arena.alloc_bytes("touched", 64 << 20));
  for (int64_t i = 0; i < 64 << 20; i += 4096) bytes[i] = 1;
  EXPECT_GE(resident_bytes(), before + (60 << 20));
  EXPECT_GE(peak_resident_bytes(), before + (60 << 20));
  EXPECT_GT(available_memory_bytes(), 0);
  arena = Arena();
  reset_peak_resident_bytes();
  EXPECT_LT(peak_resident_bytes(), before + (30 << 20));
}

TEST(Device, a_machine_without_a_gpu_says_why) {
  if (num_cuda_devices() > 0) GTEST_SKIP() << "there is a GPU";
  EXPECT_FALSE(cuda_unavailable_reason().empty());
  EXPECT_THROW(Arena("gpu", 1024, Device{DeviceKind::kCuda, 0}), Error);
}

}  // namespace
}  // namespace m3
