#include "text/encode_cache.h"

#include <gtest/gtest.h>

#include <thread>

namespace m3 {
namespace {

std::vector<int32_t> ids_of(int text) { return {text, text + 1}; }
std::string text_of(int text) { return std::to_string(text) + std::string(84, 'x'); }
constexpr int64_t kEntryBytes = 86 + 8 + 160;  // texts of two digits

// Finds a text, or adds it.
void use(EncodeCache& cache, int text) {
  std::vector<int32_t> ids = {-1};
  if (!cache.find(text_of(text), ids)) {
    EXPECT_EQ(ids, (std::vector<int32_t>{-1})) << "nothing is appended";
    cache.add(text_of(text), ids_of(text));
  } else {
    EXPECT_EQ(ids, (std::vector<int32_t>{-1, text, text + 1}));
  }
}

TEST(EncodeCache, forgets_what_was_used_longest_ago_and_keeps_its_size) {
  EncodeCache cache(3 * kEntryBytes);
  for (const int text : {10, 11, 12, 10, 13}) use(cache, text);  // 11 makes room
  EXPECT_EQ(cache.counts().hits, 1);
  EXPECT_EQ(cache.counts().held_bytes, 3 * kEntryBytes);
  for (const int text : {10, 12, 13}) use(cache, text);
  EXPECT_EQ(cache.counts().hits, 4);
  EXPECT_EQ(cache.counts().hit_bytes, 4 * 86);
  EXPECT_EQ(cache.counts().encoded_bytes, 4 * 86);
  use(cache, 11);
  EXPECT_EQ(cache.counts().hits, 4);

  cache.add(std::string(4 * kEntryBytes, 'y'), {});
  EXPECT_EQ(cache.counts().held_bytes, 3 * kEntryBytes) << "what is larger than all of it is not kept";
  use(cache, 11);
  EXPECT_EQ(cache.counts().hits, 5);
}

TEST(EncodeCache, threads_may_share_it) {
  EncodeCache cache(20 * kEntryBytes);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&cache, t] {
      for (int i = 0; i < 3000; ++i) use(cache, 10 + (i * 7 + t * i) % 40);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cache.counts().held_bytes, 20 * kEntryBytes);
  EXPECT_GT(cache.counts().hits, 0);
}

}  // namespace
}  // namespace m3
