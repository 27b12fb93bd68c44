// Pages, with what they hold written down beside them: an array of keys per page, filled as a model would.
#include "engine/page_cache.h"

#include <gtest/gtest.h>

#include "base/rng.h"

namespace m3 {
namespace {

using Key = PageCache::Key;
constexpr int kPage = 4;

struct World : PageTier {
  explicit World(int64_t num_pages, bool reuse = true, int64_t num_slots = 0)
      : stored(num_slots * kPage), cache(num_pages, kPage, reuse, num_slots > 0 ? this : nullptr), contents(num_pages * kPage) {}

  // A second tier that fails as often as a test wants.
  int64_t num_slots() const override { return std::ssize(stored) / kPage; }
  bool store(int32_t page, int32_t slot) override {
    if (fails()) return false;
    std::copy_n(contents.begin() + page * kPage, kPage, stored.begin() + slot * kPage);
    std::fill_n(contents.begin() + page * kPage, kPage, 0);
    return true;
  }
  bool load(int32_t slot, int32_t page) override {
    if (fails()) return false;
    std::copy_n(stored.begin() + slot * kPage, kPage, contents.begin() + page * kPage);
    return true;
  }
  bool fails() { return fail_one_of > 0 && chance.below(fail_one_of) == 0; }
  uint64_t fail_one_of = 0;  // 0: never, 1: always
  Philox chance{2};
  std::vector<Key> stored;

  struct Sequence {
    std::vector<Key> keys;
    PageCache::Pages pages;
    int64_t computed = 0;
  };

  // Writes the sequence's keys to its pages up to `end`.
  void compute(Sequence& s, int64_t end) {
    for (; s.computed < end; ++s.computed) at(s, s.computed) = s.keys[s.computed];
    cache.publish(s.pages, std::span(s.keys).first(s.computed));
  }
  // false: no room.
  bool start(Sequence& s) {
    s.computed = cache.attach(s.pages, std::span(s.keys).first(s.keys.size() - 1), [this](int32_t from, int32_t to) {
      std::copy_n(contents.begin() + from * kPage, kPage, contents.begin() + to * kPage);
    });
    return cache.grow(s.pages, static_cast<int64_t>(s.keys.size()));
  }
  void end(Sequence& s) {
    cache.release(s.pages, std::span(s.keys).first(s.computed));
    s.computed = 0;
  }
  // All that is computed is where it should be.
  void expect_contents(Sequence& s) {
    for (int64_t i = 0; i < s.computed; ++i) ASSERT_EQ(at(s, i), s.keys[i]) << "position " << i;
  }
  Key& at(const Sequence& s, int64_t position) { return contents[s.pages.ids.at(position / kPage) * kPage + position % kPage]; }
  void check(std::vector<const Sequence*> sequences) const {
    std::vector<const PageCache::Pages*> pages;
    for (const Sequence* s : sequences) pages.push_back(&s->pages);
    cache.check(pages);
  }

  PageCache cache;
  std::vector<Key> contents;
};

std::vector<Key> keys(int64_t count, Key first = 100) {
  std::vector<Key> keys(count);
  for (int64_t i = 0; i < count; ++i) keys[i] = first + i;
  return keys;
}

TEST(PageCache, hits_end_at_any_token) {
  for (int64_t common = 0; common <= 13; ++common) {
    World world(16);
    World::Sequence first{.keys = keys(13)};
    ASSERT_TRUE(world.start(first));
    world.compute(first, 13);
    world.end(first);
    EXPECT_EQ(world.cache.num_idle(), 4);

    World::Sequence second{.keys = keys(13)};
    for (int64_t i = common; i < 13; ++i) second.keys[i] += 1000;
    ASSERT_TRUE(world.start(second));
    // The last token of a prompt is computed always.
    EXPECT_EQ(second.computed, std::min<int64_t>(common, 12)) << common;
    EXPECT_EQ(static_cast<int64_t>(second.pages.nodes.size()), std::min<int64_t>(common, 12) / kPage);
    world.expect_contents(second);
    world.compute(second, 13);
    world.check({&second});
    world.end(second);
    world.check({});
  }
}

TEST(PageCache, running_sequences_share_full_pages_and_write_only_to_their_own) {
  World world(16);
  World::Sequence a{.keys = keys(10)}, b{.keys = keys(11)};
  ASSERT_TRUE(world.start(a));
  world.compute(a, 10);
  b.keys[9] = 7;
  ASSERT_TRUE(world.start(b));
  EXPECT_EQ(b.computed, 8) << "the tail of a is its own while it runs";
  EXPECT_EQ(a.pages.ids[0], b.pages.ids[0]);
  EXPECT_EQ(a.pages.ids[1], b.pages.ids[1]);
  EXPECT_NE(a.pages.ids[2], b.pages.ids[2]);
  world.compute(b, 11);
  world.expect_contents(a);
  world.expect_contents(b);
  world.check({&a, &b});
  world.end(a);
  world.expect_contents(b);
  world.end(b);
  EXPECT_EQ(world.cache.num_available(), 16);
  EXPECT_EQ(world.cache.num_idle(), 4) << "two shared pages and two tails";
}

TEST(PageCache, two_that_compute_the_same_keep_one_copy) {
  World world(16);
  World::Sequence a{.keys = keys(8)}, b{.keys = keys(8)};
  ASSERT_TRUE(world.start(a));
  ASSERT_TRUE(world.start(b));
  EXPECT_EQ(world.cache.num_free(), 12);
  world.compute(a, 8);
  world.compute(b, 8);
  EXPECT_EQ(a.pages.ids, b.pages.ids);
  EXPECT_EQ(world.cache.num_free(), 14);
  world.check({&a, &b});
}

TEST(PageCache, the_longer_of_two_tails_takes_the_place_of_the_shorter) {
  World world(8);
  for (const int64_t length : {2, 3, 3, 2}) {
    World::Sequence s{.keys = keys(length)};
    ASSERT_TRUE(world.start(s));
    world.compute(s, length);
    world.end(s);
    world.check({});
    EXPECT_EQ(world.cache.num_idle(), 1) << length;
  }
  EXPECT_EQ(world.cache.match(keys(8)).tokens, 3);
}

TEST(PageCache, evicts_what_was_used_longest_ago_and_never_what_is_held) {
  World world(6);
  World::Sequence held{.keys = keys(8, 100)};
  ASSERT_TRUE(world.start(held));
  world.compute(held, 8);
  for (const Key first : {200, 300}) {
    World::Sequence s{.keys = keys(8, first)};
    ASSERT_TRUE(world.start(s));
    world.compute(s, 8);
    world.end(s);
  }
  EXPECT_EQ(world.cache.num_free(), 0);
  EXPECT_EQ(world.cache.match(keys(5, 200)).tokens, 5);
  World::Sequence again{.keys = keys(5, 200)};  // now 300 is the oldest
  ASSERT_TRUE(world.start(again));
  world.compute(again, 5);
  world.end(again);
  World::Sequence more{.keys = keys(4, 400)};
  ASSERT_TRUE(world.start(more));
  world.check({&held, &more});
  EXPECT_EQ(world.cache.match(keys(8, 300)).tokens, 4) << "from the leaves";
  EXPECT_EQ(world.cache.match(keys(5, 200)).tokens, 5);
  world.expect_contents(held);

  World::Sequence too_many{.keys = keys(20, 500)};
  EXPECT_FALSE(world.start(too_many));
  EXPECT_EQ(world.cache.num_available(), 3) << "what does not fit takes nothing";
}

TEST(PageCache, without_reuse_everything_is_free_at_once) {
  World world(8, false);
  World::Sequence s{.keys = keys(9)};
  ASSERT_TRUE(world.start(s));
  world.compute(s, 9);
  world.end(s);
  EXPECT_EQ(world.cache.num_free(), 8);
  EXPECT_EQ(world.cache.match(keys(9)).tokens, 0);
}

// A sequence that is computed and ends at once, beside others.
void live(World& world, std::vector<Key> keys, const std::vector<const World::Sequence*>& others = {}) {
  World::Sequence s{.keys = std::move(keys)};
  ASSERT_TRUE(world.start(s));
  world.expect_contents(s);
  world.compute(s, std::ssize(s.keys));
  world.end(s);
  world.check(others);
}

TEST(PageTier, cache_04_evicted_pages_come_back_from_the_tier_at_any_token) {
  for (int64_t common = 1; common <= 13; ++common) {
    World world(5, true, 8);
    live(world, keys(13));
    live(world, keys(17, 500));  // takes all five pages
    EXPECT_EQ(world.cache.num_stored(), 4);
    EXPECT_EQ(world.cache.match(keys(13)).tokens, 13);
    EXPECT_EQ(world.cache.match(keys(13)).full_pages, 0) << "what is stored needs a page";

    World::Sequence again{.keys = keys(13)};
    for (int64_t i = common; i < 13; ++i) again.keys[i] += 1000;
    ASSERT_TRUE(world.start(again));
    EXPECT_EQ(again.computed, std::min<int64_t>(common, 12));
    world.expect_contents(again);
    EXPECT_EQ(world.cache.counts().restored, (again.computed + kPage - 1) / kPage);
    world.compute(again, 13);
    world.check({&again});
    world.end(again);
    world.check({});
  }
}

TEST(PageTier, keeps_its_size_and_forgets_what_was_used_longest_ago) {
  World world(3, true, 4);
  for (const Key first : {100, 200, 300, 400}) live(world, keys(9, first));  // three pages each
  EXPECT_EQ(world.cache.num_stored(), 4);
  EXPECT_EQ(world.cache.match(keys(9, 400)).tokens, 9) << "in memory";
  EXPECT_EQ(world.cache.match(keys(9, 300)).tokens, 9) << "stored";
  EXPECT_EQ(world.cache.match(keys(9, 200)).tokens, 4) << "its end made room";
  EXPECT_EQ(world.cache.match(keys(9, 100)).tokens, 0);
  // A full tier gives its contents up for nobody while they are being brought back.
  World::Sequence again{.keys = keys(9, 300)};
  ASSERT_TRUE(world.start(again));
  EXPECT_EQ(again.computed, 8);
  world.expect_contents(again);
  world.check({&again});
}

TEST(PageTier, what_is_computed_anew_takes_the_place_of_what_is_stored) {
  World world(7, true, 4);
  World::Sequence early{.keys = keys(5)}, late{.keys = keys(5)};
  ASSERT_TRUE(world.start(early));  // before the contents are known
  live(world, keys(5), {&early});
  live(world, keys(20, 500), {&early});
  EXPECT_EQ(world.cache.num_stored(), 2);
  world.compute(early, 5);
  EXPECT_EQ(world.cache.num_stored(), 1) << "the end of it";
  world.check({&early});
  world.fail_one_of = 1;
  ASSERT_TRUE(world.start(late));
  EXPECT_EQ(late.computed, 4) << "nothing need be loaded";
  EXPECT_EQ(late.pages.ids[0], early.pages.ids[0]);
  world.expect_contents(late);
}

TEST(PageTier, what_is_lost_is_forgotten_with_all_behind_it) {
  World world(5, true, 8);
  live(world, keys(17));
  live(world, keys(17, 500));
  EXPECT_EQ(world.cache.num_stored(), 5);
  world.fail_one_of = 1;
  World::Sequence again{.keys = keys(17)};
  ASSERT_TRUE(world.start(again));
  EXPECT_EQ(again.computed, 0);
  EXPECT_EQ(world.cache.num_stored(), 0) << "pages of 500 were refused too";
  world.compute(again, 17);
  world.check({&again});
}

TEST(PageTier, a_tier_that_takes_nothing_leaves_a_cache_without_one) {
  World with(6, true, 4), without(6);
  with.fail_one_of = 1;
  for (const Key first : {100, 200, 300, 100, 250}) {
    live(with, keys(9, first));
    live(without, keys(9, first));
  }
  EXPECT_EQ(with.cache.num_stored(), 0);
  EXPECT_EQ(with.cache.counts().evicted, without.cache.counts().evicted);
  EXPECT_EQ(with.cache.counts().failed, with.cache.counts().evicted);
  for (const Key first : {100, 200, 300, 250}) {
    EXPECT_EQ(with.cache.match(keys(9, first)).tokens, without.cache.match(keys(9, first)).tokens) << first;
  }
}

struct Lives {
  int64_t num_slots;
  uint64_t fail_one_of;
};
class ThousandsOfSequences : public ::testing::TestWithParam<Lives> {};

// Random lives of sequences that share beginnings of all lengths, in too little memory.
TEST_P(ThousandsOfSequences, find_what_they_expect_and_leak_nothing) {
  Philox rng(1);
  World world(40, true, GetParam().num_slots);
  world.fail_one_of = GetParam().fail_one_of;
  std::vector<std::unique_ptr<World::Sequence>> running;
  std::vector<std::vector<Key>> known = {keys(1)};
  int64_t hits = 0;
  for (int round = 0; round < 4000; ++round) {
    if (running.size() < 6 && rng.below(2) == 0) {
      auto s = std::make_unique<World::Sequence>();
      const std::vector<Key>& base = known[rng.below(known.size())];
      s->keys.assign(base.begin(), base.begin() + static_cast<int64_t>(rng.below(base.size() + 1)));
      for (uint64_t i = 0, more = 1 + rng.below(12); i < more; ++i) s->keys.push_back(rng.below(3));
      if (s->keys.size() > 60) s->keys.resize(60);
      const auto reusable = std::span<const Key>(s->keys).first(s->keys.size() - 1);
      const PageCache::Match match = world.cache.match(reusable);
      const int64_t wanted = world.cache.pages_for(static_cast<int64_t>(s->keys.size())) - match.full_pages;
      if (wanted <= world.cache.num_available() - match.idle_pages) {
        ASSERT_TRUE(world.start(*s)) << "what admission promises";
        ASSERT_LE(s->computed, match.tokens);
        hits += s->computed;
        world.expect_contents(*s);
        known.push_back(s->keys);
        running.push_back(std::move(s));
      }
    } else if (!running.empty()) {
      const size_t i = rng.below(running.size());
      World::Sequence& s = *running[i];
      if (s.computed < static_cast<int64_t>(s.keys.size())) {
        world.compute(s, s.computed + 1 + static_cast<int64_t>(rng.below(s.keys.size() - s.computed)));
      }
      if (rng.below(3) == 0 && world.cache.grow(s.pages, static_cast<int64_t>(s.keys.size()) + 1)) s.keys.push_back(rng.below(3));
      if (rng.below(4) == 0) {
        world.end(s);
        running.erase(running.begin() + static_cast<int64_t>(i));
      }
    }
    std::vector<const World::Sequence*> all;
    for (const auto& s : running) {
      all.push_back(s.get());
      world.expect_contents(*s);
    }
    world.check(all);
  }
  EXPECT_GT(hits, 1000);
  const PageCache::Counts& counts = world.cache.counts();
  EXPECT_GT(counts.evicted, 100);
  EXPECT_EQ(counts.restored > 100, GetParam().num_slots > 0);
  EXPECT_EQ(counts.failed > 10, GetParam().fail_one_of > 0);
}

INSTANTIATE_TEST_SUITE_P(PageCache, ThousandsOfSequences, ::testing::Values(Lives{0, 0}, Lives{10, 0}, Lives{500, 0}, Lives{30, 10}),
                         [](const auto& info) { return fmt::format("{}_slots_{}", info.param.num_slots, info.index); });

}  // namespace
}  // namespace m3
