// A cache that moves to another process with the same model, and is refused by every other.
#include "engine/page_file.h"

#include <unistd.h>

#include <filesystem>
#include <set>

#include "base/file.h"
#include "engine/fake_engine_test.h"
#include "formats/random_init.h"

namespace m3::test {
namespace {

namespace fs = std::filesystem;

class PageFile : public ::testing::Test {
 protected:
  PageFile() { fs::create_directories(folder_); }
  ~PageFile() override { fs::remove_all(folder_); }

  FakeOptions options(int64_t num_pages = 64) const {
    FakeOptions options{.num_pages = num_pages};
    options.engine.cache_file = path();
    return options;
  }
  fs::path path() const { return folder_ / "cache"; }
  // Chats with a shared beginning; tokens of their prompts that were cached.
  int64_t expect_right_chats(FakeEngine& fake) const {
    int64_t cached = 0;
    const std::vector<int32_t> shared = random_ids(9, 70);
    for (uint64_t chat = 0; chat < 4; ++chat) {
      GenerationRequest request = greedy(shared, 12);
      for (const int32_t id : random_ids(chat, 30)) request.prompt.push_back(id);
      Result result;
      fake.engine.submit(request, result.callback());
      fake.run();
      EXPECT_EQ(result.tokens, expected_answer(fake.model, request, 12)) << chat;
      cached += result.last.timings.cached_tokens;
    }
    return cached;
  }
  void save_chats() const {
    FakeEngine fake(options());
    EXPECT_EQ(expect_right_chats(fake), 3 * 70);
    fake.engine.save_cache();
  }

  fs::path folder_ = fs::temp_directory_path() / fmt::format("m3-page-file-{}", ::getpid());
};

TEST_F(PageFile, a_place_that_takes_no_file_is_refused_at_the_start) {
  FakeOptions options;
  options.engine.cache_file = folder_ / "missing" / "cache";
  EXPECT_THROW(FakeEngine{options}, std::exception);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(PageFile, cache_03_the_next_process_finds_what_this_one_computed) {
  save_chats();
  EXPECT_EQ(fs::status(path()).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  FakeEngine next(options());
  next.engine.check_pages();
  EXPECT_EQ(expect_right_chats(next), 4 * 99) << "all but the last token";
  next.engine.save_cache();
  FakeEngine third(options());
  EXPECT_EQ(expect_right_chats(third), 4 * 99);
}

TEST_F(PageFile, a_smaller_cache_takes_what_was_used_last) {
  save_chats();
  FakeEngine small(options(8));  // one chat of seven pages
  small.engine.check_pages();
  const std::vector<int32_t> shared = random_ids(9, 70);
  GenerationRequest last = greedy(shared, 12);
  for (const int32_t id : random_ids(3, 30)) last.prompt.push_back(id);
  Result result;
  small.engine.submit(last, result.callback());
  small.run();
  EXPECT_EQ(result.tokens, expected_answer(small.model, last, 12));
  EXPECT_EQ(result.last.timings.cached_tokens, 99);
}

TEST_F(PageFile, a_file_that_is_cut_or_changed_anywhere_gives_no_wrong_answer) {
  save_chats();
  const std::string whole = read_file(path());
  Philox rng(3);
  for (int trial = 0; trial < 60; ++trial) {
    std::string bytes = whole;
    const size_t at = rng.below(bytes.size());
    if (trial % 2 == 0) {
      bytes.resize(at);
    } else {
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << trial / 2 % 8);
    }
    write_file_atomic(path(), bytes);
    FakeEngine fake(options());
    fake.engine.check_pages();
    EXPECT_GE(expect_right_chats(fake), 3 * 70) << at;
  }
}

TEST_F(PageFile, cache_07_pages_of_another_layout_or_other_weights_are_refused_by_name) {
  save_chats();
  FakeEngine fake(options());
  fake.model.layout_note = "weights of somebody";
  PageCache cache(64, 16, true);
  try {
    load_pages(path(), fake.model.page_layout(), fake.model, cache);
    FAIL() << "taken";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("'weights of nobody', here 'weights of somebody'"), std::string::npos) << error.what();
  }
  EXPECT_EQ(cache.num_free(), 64);
}

TEST_F(PageFile, a_disk_that_does_not_take_it_leaves_the_old_file) {
  save_chats();
  const std::string before = read_file(path());
  FakeEngine fake(options());
  expect_right_chats(fake);
  fs::create_directory(path().string() + ".tmp");  // in the way
  EXPECT_THROW(fake.engine.save_cache(), Error);
  EXPECT_EQ(read_file(path()), before);
}

std::string layout_of(const Checkpoint& checkpoint, DType dtype, AttentionMode mode) {
  ModelOptions options;
  options.decoder.dtype = dtype;
  options.decoder.attention = mode;
  options.step = {256, 1, 1, 4096};
  if (checkpoint.config().vision) options.max_vision_patches = 64;
  Model model(checkpoint, options);
  CpuEngineModel engine_model(model, 2);
  const std::string layout = engine_model.page_layout();
  EXPECT_EQ(layout, engine_model.page_layout()) << "the same again";
  return layout;
}

// The layout of a real cache tells types, lanes, axes and weights apart, where pages may have equally many bytes.
TEST_F(PageFile, cache_07_08_the_layout_names_each_lane_and_tells_weights_apart) {
  const fs::path golden = M3_SOURCE_DIR "/tests/golden/models/tiny-vl";
  const Checkpoint checkpoint = Checkpoint::open(golden);
  const std::string text = layout_of(checkpoint, DType::kF32, AttentionMode::kMsa);
  for (const char* part : {"lanes version 1\n", "page of 16 positions\n", "layer 0 keys f32 heads, positions, dim = [",
                           "layer 0 values f32 heads, positions, dim = [", " index keys f32 positions, dim = ["}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  // Another type; no index keys; and two sets of weights that differ in nothing but their values.
  std::set<std::string> layouts = {text, layout_of(checkpoint, DType::kBF16, AttentionMode::kMsa),
                                   layout_of(checkpoint, DType::kF32, AttentionMode::kFull)};
  for (const uint64_t seed : {1, 2}) {
    const fs::path folder = folder_ / std::to_string(seed);
    write_random_checkpoint(read_file(golden / "config.json"), "config.json", folder, init_normal(seed));
    layouts.insert(layout_of(Checkpoint::open(folder), DType::kF32, AttentionMode::kMsa));
  }
  EXPECT_EQ(layouts.size(), 5u);
}

}  // namespace
}  // namespace m3::test
