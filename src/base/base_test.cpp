#include <gtest/gtest.h>
#include <sys/stat.h>

#include <atomic>
#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/bf16.h"
#include "base/check.h"
#include "base/file.h"
#include "base/progress.h"
#include "base/threads.h"

namespace m3 {
namespace {

TEST(Bf16, rounds_to_nearest_with_ties_to_even) {
  EXPECT_EQ(bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(bf16(1.00390625f).bits, 0x3f80);  // 1 + 2^-8: tie, down to even
  EXPECT_EQ(bf16(1.01171875f).bits, 0x3f82);  // 1 + 3 * 2^-8: tie, up to even
  EXPECT_EQ(bf16(-1.005f).bits, 0xbf81);
  EXPECT_EQ(bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  EXPECT_EQ(bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(static_cast<float>(bf16(std::numeric_limits<float>::quiet_NaN()))));
}

TEST(Check, message_and_place_are_kept) {
  try {
    M3_CHECK(1 == 2, "got {}, want {}", 1, 2);
    FAIL();
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "got 1, want 2");
    EXPECT_NE(error.where().find("base_test.cpp:"), std::string::npos);
  }
}

TEST(Threads, every_index_is_visited_once) {
  for (int64_t count : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> visits(count);
    parallel_for(count, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) visits[i]++;
    });
    parallel_for_dynamic(count, [&](int64_t i) { visits[i]++; });
    for (const auto& v : visits) EXPECT_EQ(v, 2);
  }
}

TEST(Threads, the_count_holds_in_every_thread_of_the_program) {
  const int before = num_threads();
  set_num_threads(3);
  std::set<std::thread::id> seen;
  std::mutex mutex;  // guards seen
  std::thread([&] {
    parallel_for(100, [&](int64_t, int64_t) {
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
    EXPECT_EQ(seen.size(), static_cast<size_t>(num_threads()));
  }).join();
  set_num_threads(before);
}

TEST(Threads, an_exception_reaches_the_caller) {
  EXPECT_THROW(parallel_for(8, [](int64_t, int64_t) { M3_FAIL("inside"); }), Error);
  EXPECT_THROW(parallel_for_dynamic(8, [](int64_t) { M3_FAIL("inside"); }), Error);
}

TEST(File, atomic_write_replaces_and_failure_keeps_the_old_content) {
  const auto folder = std::filesystem::temp_directory_path() / "m3_file_test";
  std::filesystem::create_directories(folder);
  const auto path = folder / "a.txt";
  write_file_atomic(path, "one");
  write_file_atomic(path, "two");
  EXPECT_EQ(read_file(path), "two");
  EXPECT_EQ(MappedFile(path).text(), "two");
  EXPECT_THROW(read_file(path, 2), Error);
  EXPECT_THROW(write_file_atomic(folder / "missing" / "b.txt", "x"), Error);
  EXPECT_THROW(MappedFile{folder}, Error);  // a folder is not a file
  std::filesystem::remove_all(folder);
}

TEST(File, a_full_disk_is_an_error_that_keeps_the_target) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  // The temporary name is a link to /dev/full, so the write itself fails.
  const auto folder = std::filesystem::temp_directory_path() / "m3_full_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const auto path = folder / "a.txt";
  write_file_atomic(path, "kept");
  std::filesystem::create_symlink("/dev/full", path.string() + ".tmp");
  EXPECT_THROW(write_file_atomic(path, "lost"), Error);
  EXPECT_EQ(read_file(path), "kept");
  std::filesystem::remove_all(folder);
}

TEST(File, a_pipe_is_refused_at_once_and_a_folder_or_device_is_never_replaced) {
  const auto folder = std::filesystem::temp_directory_path() / "m3_pipe_test";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder / "inside");
  ASSERT_EQ(::mkfifo((folder / "pipe").c_str(), 0600), 0);
  EXPECT_THROW(read_file(folder / "pipe"), Error);
  EXPECT_THROW(MappedFile{folder / "pipe"}, Error);
  EXPECT_THROW(write_file_atomic(folder / "pipe", "x"), Error);
  EXPECT_THROW(write_file_atomic(folder / "inside", "x"), Error);
  EXPECT_TRUE(std::filesystem::is_fifo(folder / "pipe"));
  std::filesystem::remove_all(folder);
}

TEST(File, content_beyond_the_reported_size_is_not_dropped_silently) {
  if (!std::filesystem::exists("/proc/self/maps")) GTEST_SKIP() << "no /proc";
  EXPECT_THROW(read_file("/proc/self/maps"), Error);
}

TEST(Format, sizes_and_counts) {
  EXPECT_EQ(format_bytes(512), "512 B");
  EXPECT_EQ(format_bytes(3.5 * 1024 * 1024), "3.5 MiB");
  EXPECT_EQ(format_count(427040140160.0), "427.0 B");
}

TEST(Threads, SerialScopeKeepsAParallelRegionOnItsThread) {
  const SerialScope serial;
  int num_pieces = 0;
  parallel_for(100, [&](int64_t begin, int64_t end) {
    ++num_pieces;
    EXPECT_EQ(begin, 0);
    EXPECT_EQ(end, 100);
  });
  EXPECT_EQ(num_pieces, 1);
}

}  // namespace
}  // namespace m3
