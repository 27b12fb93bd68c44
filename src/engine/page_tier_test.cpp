// Pages that make room and come back: nothing of it shows in the answers, whatever the disk does.
#include "engine/page_tier.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "engine/fake_engine_test.h"
#include "model/kv_lanes.h"

namespace m3::test {
namespace {

namespace fs = std::filesystem;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / fmt::format("m3-tier-{}", ::getpid())) {}
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }
  bool is_empty() const { return fs::is_empty(path_); }

 private:
  fs::path path_;
};

// The open file without a name below a folder.
std::string open_file(const fs::path& folder) {
  for (const auto& entry : fs::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = fs::read_symlink(entry.path(), gone).string();
    if (target.starts_with((folder / "m3-pages-").string())) return entry.path().string();
  }
  return {};
}

// Twelve pages of 16 tokens for one request at a time; by default the tier has room for everything.
FakeOptions few_pages(const Folder* folder, int64_t slots = 200) {
  FakeOptions options{.num_pages = 12, .max_sequences = 2};
  if (folder != nullptr) options.engine.offload_dir = folder->path();
  options.engine.offload_bytes = slots * FakeEngineModel::page_bytes(options.page_tokens);
  return options;
}

// Rounds of eight chats, so that each has been evicted when it comes again; cached tokens are added up.
int64_t expect_right_chats(FakeEngine& fake, int rounds) {
  int64_t cached = 0;
  for (int round = 0; round < rounds; ++round) {
    for (uint64_t chat = 0; chat < 8; ++chat) {
      const GenerationRequest request = greedy(random_ids(chat, 40 + 9 * static_cast<int64_t>(chat) + 20 * round), 20);
      Result result;
      fake.engine.submit(request, result.callback());
      fake.run();
      EXPECT_EQ(result.tokens, expected_answer(fake.model, request, 20)) << "chat " << chat << " of round " << round;
      cached += result.last.timings.cached_tokens;
    }
  }
  return cached;
}

TEST(FilePageTier, cache_04_sched_07_chats_come_back_from_the_file_and_nothing_is_computed_twice) {
  const Folder folder;
  FakeEngine without(few_pages(nullptr)), with(few_pages(&folder));
  EXPECT_EQ(expect_right_chats(without, 3), 0) << "eight chats are more than twelve pages hold";
  // Whatever the round before had as its prompt. Answers differ from what follows in the next prompt.
  EXPECT_GE(expect_right_chats(with, 3), 8 * 2 * 40 + 2 * 9 * 28 + 8 * 20);
  const EngineMetrics& metrics = with.engine.metrics();
  EXPECT_GT(metrics.pages_restored, 50);
  EXPECT_EQ(metrics.pages_offloaded, metrics.pages_evicted);
  EXPECT_GT(metrics.offload_used, 50);
  EXPECT_EQ(metrics.offload_slots, 200);
  EXPECT_EQ(metrics.offload_failures, 0);
  EXPECT_EQ(without.engine.metrics().pages_offloaded, 0);
}

TEST(FilePageTier, preempted_requests_resume_from_it) {
  const Folder folder;
  FakeOptions options = few_pages(&folder);
  options.max_sequences = 4;
  FakeEngine fake(options);
  std::vector<Result> results(4);
  for (uint64_t i = 0; i < 4; ++i) fake.engine.submit(greedy(random_ids(i, 20), 100), results[i].callback());
  fake.run();
  for (uint64_t i = 0; i < 4; ++i) {
    EXPECT_EQ(results[i].tokens, expected_answer(fake.model, greedy(random_ids(i, 20), 100), 100)) << i;
  }
  EXPECT_GT(fake.engine.metrics().preemptions, 0);
  EXPECT_GT(fake.engine.metrics().pages_restored, 0);
}

TEST(FilePageTier, the_file_has_no_name_and_never_more_than_its_size) {
  const Folder folder;
  {
    FakeEngine fake(few_pages(&folder, 5));
    expect_right_chats(fake, 2);
    EXPECT_GT(fake.engine.metrics().pages_offloaded, 20);
    EXPECT_EQ(fake.engine.metrics().offload_used, 5);
    EXPECT_EQ(fs::file_size(open_file(folder.path())), static_cast<uint64_t>(5 * fake.model.sizes().page_bytes));
    EXPECT_TRUE(folder.is_empty()) << "what has no name cannot stay behind";
  }
  EXPECT_EQ(open_file(folder.path()), "");
}

// A limit of the process stands for a full disk: writes behind it fail.
TEST(FilePageTier, a_full_disk_costs_only_the_pages_that_it_does_not_take) {
  const Folder folder;
  FakeEngine fake(few_pages(&folder));
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  // Three pages and a piece of the fourth.
  const rlimit full = {static_cast<rlim_t>(fake.model.sizes().page_bytes * 7 / 2), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &full), 0);
  expect_right_chats(fake, 2);
  EXPECT_EQ(fake.engine.metrics().offload_used, 3);
  EXPECT_GT(fake.engine.metrics().offload_failures, 10);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  const int64_t failures = fake.engine.metrics().offload_failures;
  expect_right_chats(fake, 2);
  EXPECT_GT(fake.engine.metrics().offload_used, 20) << "there is room again";
  EXPECT_EQ(fake.engine.metrics().offload_failures, failures);
}

TEST(FilePageTier, what_the_disk_damages_or_loses_is_computed_again) {
  for (const bool truncate : {false, true}) {
    const Folder folder;
    FakeEngine fake(few_pages(&folder));
    expect_right_chats(fake, 1);
    const int64_t stored = fake.engine.metrics().offload_used;
    const int file = ::open(open_file(folder.path()).c_str(), O_RDWR);
    ASSERT_GE(file, 0);
    for (int64_t slot = 0; slot < stored; ++slot) {  // one bit of each page
      const int64_t at = slot * fake.model.sizes().page_bytes + slot * 37 % fake.model.sizes().page_bytes;
      char byte = 0;
      ASSERT_EQ(::pread(file, &byte, 1, at), 1);
      byte = static_cast<char>(byte ^ 1 << slot % 8);
      ASSERT_EQ(::pwrite(file, &byte, 1, at), 1);
    }
    if (truncate) {
      ASSERT_EQ(::ftruncate(file, 0), 0);
    }
    ::close(file);
    expect_right_chats(fake, 1);
    EXPECT_GE(fake.engine.metrics().offload_failures, 7) << "each chat but the last was stored";
  }
}

TEST(FilePageTier, what_cannot_work_is_refused_at_the_start) {
  const Folder folder;
  EXPECT_THROW(FakeEngine(few_pages(&folder, 0)), Error);
  FakeOptions options = few_pages(&folder);
  options.engine.prefix_cache = false;
  EXPECT_THROW(FakeEngine{options}, Error);
  options = few_pages(&folder);
  options.engine.offload_dir = "/proc/no-such-folder";
  try {
    const FakeEngine fake(options);
    FAIL() << "files below /proc";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("/proc/no-such-folder: cannot create a file"), std::string::npos) << error.what();
  }
}

// cache-04: every lane of a page goes, in the order in which kv_lanes() describes them.
TEST(KvCache, cache_04_a_page_read_and_written_is_all_of_its_lanes) {
  const TextConfig& config = tiny_checkpoint().config().text;
  for (const bool with_index : {true, false}) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      KvCache cache(config, 3, dtype, with_index);
      const std::vector<KvLane> lanes = kv_lanes(cache, config.num_layers);
      Philox rng(1);
      std::vector<std::byte> want;
      for (const KvLane& lane : lanes) {
        auto* page = static_cast<std::byte*>(lane.first_page) + lane.page_stride_bytes;
        for (int64_t i = 0; i < lane.page_stride_bytes; ++i) want.push_back(page[i] = static_cast<std::byte>(rng.below(256)));
      }
      std::vector<std::byte> bytes(cache.page_bytes());
      cache.read_page(1, bytes);
      EXPECT_EQ(bytes, want);
      cache.write_page(2, bytes);
      std::vector<std::byte> again(cache.page_bytes());
      cache.read_page(2, again);
      EXPECT_EQ(again, want);
      bytes.pop_back();
      EXPECT_THROW(cache.read_page(1, bytes), Error);
      EXPECT_THROW(cache.write_page(1, bytes), Error);
    }
  }
}

}  // namespace
}  // namespace m3::test
