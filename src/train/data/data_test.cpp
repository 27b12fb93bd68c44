// Shards, order, streams: what is written is read back; every damage is found; a position is all it takes to go on.
#include <gtest/gtest.h>

#include <fstream>
#include <set>

#include "base/check.h"
#include "base/rng.h"
#include "train/data/shard_writer.h"
#include "train/data/stream.h"
#include "train/data/tar.h"

namespace m3::data {
namespace {

namespace fs = std::filesystem;

Image random_image(int height, int width, uint64_t seed) {
  Philox random(seed);
  Image image(height, width);
  for (uint8_t& v : image.rgb_HW3) v = static_cast<uint8_t>(random.next_u32());
  return image;
}

Document make_document(int i) {
  Document document;
  document.id = fmt::format("doc-{}", i);
  document.source = i % 2 ? "odd" : "even";
  document.licence = "CC0";
  document.segments.push_back(Segment::of_text(fmt::format("Text \"{}\" \n\xC3\xA4 ", i), 1, false));
  if (i % 3 == 0) document.segments.push_back(Segment::of_image(Picture::of(random_image(30, 40 + i, i))));
  if (i % 4 == 0) {
    std::vector<Picture> frames;
    for (int k = 0; k < 3; ++k) frames.push_back(Picture::of(random_image(28, 56, 100 * i + k)));
    document.segments.push_back(Segment::of_video(std::move(frames), 12.5, {0, 13, 25}));
  }
  document.segments.push_back(Segment::of_text("answer[e~[", 3, true));
  return document;
}

// A folder of `count` documents, all in the training split, removed at the end.
class DataFolder {
 public:
  explicit DataFolder(int count, int64_t shard_bytes = 20000) {
    path_ = fs::temp_directory_path() / fmt::format("m3-data-test-{}-{}", ::getpid(), ++counter);
    fs::remove_all(path_);
    ShardWriter writer(path_, {.shard_bytes = shard_bytes, .tool = "test"});
    for (int i = 0; i < count; ++i) writer.add_to(Split::kTrain, make_document(i));
    manifest = writer.finish();
  }
  ~DataFolder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }
  // Changes one byte of a file.
  void damage(const std::string& file, int64_t at) const {
    std::fstream stream(path_ / file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char c = static_cast<char>(stream.get() ^ 0x20);
    stream.seekp(at);
    stream.put(c);
  }
  Manifest manifest;

 private:
  static inline int counter = 0;
  fs::path path_;
};

void expect_equal(const Document& got, const Document& want) {
  EXPECT_EQ(got.id, want.id);
  EXPECT_EQ(got.source, want.source);
  EXPECT_EQ(got.licence, want.licence);
  ASSERT_EQ(got.segments.size(), want.segments.size());
  for (size_t i = 0; i < want.segments.size(); ++i) {
    const Segment &a = got.segments[i], &b = want.segments[i];
    EXPECT_EQ(a.kind, b.kind);
    EXPECT_EQ(a.text, b.text);
    EXPECT_EQ(a.weight, b.weight);
    EXPECT_EQ(a.markers, b.markers);
    EXPECT_EQ(a.fps, b.fps);
    EXPECT_EQ(a.frames, b.frames);
    ASSERT_EQ(a.pictures.size(), b.pictures.size());
    for (size_t k = 0; k < a.pictures.size(); ++k) {
      EXPECT_EQ(a.pictures[k].decode().rgb_HW3, b.pictures[k].decode().rgb_HW3);
    }
  }
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Tar, AHeaderHoldsWhatThePosixFormatAsksFor) {
  const std::string header = tar_header("000001.json", 1234);
  ASSERT_EQ(header.size(), 512u);
  EXPECT_STREQ(header.c_str(), "000001.json");
  EXPECT_EQ(header.substr(124, 12), std::string("00000002322\0", 12));
  EXPECT_EQ(header.substr(257, 8), std::string("ustar\00000", 8));
  uint32_t sum = 8 * ' ';
  for (int i = 0; i < 512; ++i) sum += i >= 148 && i < 156 ? 0 : static_cast<unsigned char>(header[i]);
  EXPECT_EQ(header.substr(148, 6), fmt::format("{:06o}", sum));
  EXPECT_THROW(tar_header(std::string(101, 'a'), 1), Error);
}

TEST(Shards, DocumentsAreReadBackEqualAndCounted) {
  const DataFolder folder(40);
  EXPECT_GT(folder.manifest.shards.size(), 2u);
  const ShardSet set(folder.path(), Split::kTrain);
  ASSERT_EQ(set.num_documents(), 40);
  DocumentCounts want;
  for (int i = 0; i < 40; ++i) {
    const Document document = make_document(i);
    expect_equal(set.read(i), document);
    if (i % 2) want.add(document);
    EXPECT_EQ(set.entry(i).media.size(), static_cast<size_t>((i % 3 == 0) + (i % 4 == 0)));
  }
  EXPECT_EQ(set.manifest().counts.at("train").at("odd"), want);
  EXPECT_EQ(ShardSet(folder.path(), Split::kTest).num_documents(), 0);
}

TEST(Shards, EqualDocumentsGiveEqualFiles) {
  const DataFolder a(15), b(15);
  for (size_t i = 0; i < a.manifest.shards.size(); ++i) EXPECT_EQ(a.manifest.shards[i].sha256, b.manifest.shards[i].sha256);
}

TEST(Shards, EveryDifferenceToTheManifestIsRefusedByName) {
  const std::string shard = "train-000001.tar", index = "train-000001.idx";
  const auto open = [](const DataFolder& folder) { return message_of([&] { ShardSet(folder.path(), Split::kTrain); }); };
  {
    const DataFolder folder(30);
    EXPECT_EQ(open(folder), "");
    fs::resize_file(folder.path() / shard, fs::file_size(folder.path() / shard) - 512);
    EXPECT_NE(open(folder).find(shard), std::string::npos);
  }
  {
    const DataFolder folder(30);
    fs::remove(folder.path() / shard);
    EXPECT_NE(open(folder).find("missing"), std::string::npos);
  }
  {
    const DataFolder folder(30);
    folder.damage(index, 8);
    EXPECT_NE(open(folder).find(index), std::string::npos);
  }
  {
    const DataFolder folder(30);
    folder.damage(shard, 5000);
    EXPECT_EQ(open(folder), "");
    const ShardSet set(folder.path(), Split::kTrain);
    EXPECT_NO_THROW(set.read(0));
    int num_refused = 0;
    for (int i = 0; i < 30; ++i) {
      const std::string message = message_of([&] { set.read(i); });
      num_refused += !message.empty();
      EXPECT_TRUE(message.empty() || message.find(shard) != std::string::npos) << message;
    }
    EXPECT_EQ(num_refused, folder.manifest.shards[1].documents);
  }
  {
    const DataFolder folder(3);
    EXPECT_NE(message_of([&] { ShardWriter(folder.path(), {}); }).find("already"), std::string::npos);
  }
}

TEST(Documents, AMemberTooFewTooManyOrWrongIsRefused) {
  const std::vector<Member> good = to_members(make_document(0), "000000");
  ASSERT_EQ(good.size(), 5u);  // JSON, one picture, three frames
  EXPECT_NO_THROW(from_members(good));
  std::vector<Member> fewer(good.begin(), good.end() - 1), more = good, swapped = good, renamed = good;
  more.push_back({"000000.9.png", "x"});
  std::swap(swapped[2], swapped[3]);
  for (const auto& members : {fewer, more, swapped, std::vector<Member>{}}) EXPECT_THROW(from_members(members), Error);
  const std::pair<const char*, const char*> kChanges[] = {
      {"\"type\":\"video\"", "\"type\":\"sound\""}, {"\"fps\"", "\"rate\""}, {"\"frames\":[0,", "\"frames\":["},
      {"\"weight\":3", "\"weight\":-3"}, {"\"id\"", "\"ID\""}, {"{", "["}};
  for (const auto& [from, to] : kChanges) {
    std::vector<Member> changed = good;
    const size_t at = changed[0].bytes.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    changed[0].bytes.replace(at, std::string(from).size(), to);
    EXPECT_THROW(from_members(changed), Error) << from;
  }
}

TEST(Splits, AnItemAlwaysHasTheSameSplitAndSharesAreRight) {
  const SplitRule rule{.seed = 3};
  int count[3] = {};
  for (int i = 0; i < 20000; ++i) ++count[static_cast<int>(split_of(fmt::format("item {}", i), rule))];
  EXPECT_NEAR(count[1], 1000, 120);
  EXPECT_NEAR(count[2], 1000, 120);
  EXPECT_EQ(split_of("x", rule), split_of("x", rule));
}

TEST(Order, EveryEpochHoldsEveryDocumentOnceInAnotherOrder) {
  for (const auto& [n, window] : {std::pair<int64_t, int64_t>{1, 4}, {10, 4}, {100, 7}, {64, 64}, {65, 64}}) {
    ShuffledOrder order(n, 5, window);
    std::vector<std::vector<int64_t>> epochs(3);
    for (int64_t p = 0; p < 3 * n; ++p) epochs[p / n].push_back(order.document(p));
    for (const auto& epoch : epochs) {
      const std::set<int64_t> seen(epoch.begin(), epoch.end());
      ASSERT_EQ(static_cast<int64_t>(seen.size()), n);
      ASSERT_EQ(*seen.begin(), 0);
      ASSERT_EQ(*seen.rbegin(), n - 1);
    }
    EXPECT_TRUE(n < 10 || epochs[0] != epochs[1]);
    ShuffledOrder again(n, 5, window);  // asked backwards: no memory of the way
    for (int64_t p = 3 * n - 1; p >= 0; --p) ASSERT_EQ(again.document(p), epochs[p / n][p % n]) << n << " " << p;
  }
}

// Bytes and the protocol's markers.
const Tokenizer& byte_tokenizer() {
  static const Tokenizer tokenizer = Tokenizer::load(M3_SOURCE_DIR "/tests/golden/tokenizer/tiny");
  return tokenizer;
}

std::shared_ptr<const SampleSource> samples(std::shared_ptr<const DocumentSource> source) {
  return std::make_shared<DocumentSamples>(std::move(source), std::make_shared<SampleBuilder>(byte_tokenizer()));
}

TEST(Samples, PlaceholdersMarksAndWeightsFollowTheSegments) {
  const Tokenizer& tokenizer = byte_tokenizer();
  const Document document = make_document(0);
  const SampleBuilder build(tokenizer);
  const Sample sample = build.build(document);
  ASSERT_EQ(sample.media.size(), 2u);
  ASSERT_EQ(sample.ids.size(), sample.weights.size());
  const int32_t image = tokenizer.require_added_id("]<]image[>["), video = tokenizer.require_added_id("]<]video[>[");
  int64_t num_image = 0, num_video = 0;
  for (size_t i = 0; i < sample.ids.size(); ++i) {
    num_image += sample.ids[i] == image;
    num_video += sample.ids[i] == video;
    EXPECT_TRUE(sample.weights[i] == 0 || (sample.ids[i] != image && sample.ids[i] != video));
  }
  EXPECT_EQ(num_image, build.num_vision_tokens({30, 40, 0}));
  EXPECT_EQ(num_video, build.num_vision_tokens({28, 56, 3}));
  EXPECT_EQ(num_video, sample.media[1].grid.num_tokens());
  EXPECT_EQ(sample.media[1].seconds, (std::vector<std::string>{"0.0", "2.0"}));
  const std::string text = tokenizer.decode(sample.ids);
  EXPECT_TRUE(text.starts_with("Text \"0\" \n\xC3\xA4 ]<]start of image[>[")) << text;
  EXPECT_NE(text.find("]<]2.0 seconds[>[]<]start of image[>[]<]video[>["), std::string::npos) << text;
  EXPECT_EQ(sample.ids.back(), tokenizer.require_added_id("[e~["));
  EXPECT_EQ(sample.weights.back(), 3);
}

TEST(Samples, TextWithoutMarkersNeverBecomesAMarker) {
  Document document;
  document.id = "page";
  document.segments.push_back(Segment::of_text("a ]~b]user ]<]image[>[ b"));
  const Sample sample = SampleBuilder(byte_tokenizer()).build(document);
  for (int32_t id : sample.ids) EXPECT_FALSE(byte_tokenizer().is_added(id));
  document.segments[0].markers = true;
  EXPECT_THROW(SampleBuilder(byte_tokenizer()).build(document), Error);
}

TEST(Streams, WorkersDoNotChangeTheOrderAndAPositionGoesOnExactly) {
  const DataFolder folder(30);
  const auto set = std::make_shared<ShardSet>(folder.path(), Split::kTrain);
  const auto source = samples(std::make_shared<ShardSource>(set, "test", 9, 8));
  std::vector<std::string> ids;
  SampleStream plain(source, {}, {.workers = 0});
  for (int i = 0; i < 70; ++i) ids.push_back(plain.next().id);
  SampleStream threads(source, {}, {.workers = 3, .depth = 5});
  for (int i = 0; i < 70; ++i) ASSERT_EQ(threads.next().id, ids[i]) << i;
  for (int stop : {0, 1, 29, 30, 47}) {
    StreamState state;
    {
      SampleStream first(source, {}, {.workers = 2});
      for (int i = 0; i < stop; ++i) first.next();
      state = StreamState::from_json(JsonValue::parse(first.state().to_json().dump(), "state"), "state");
    }
    SampleStream second(source, state, {.workers = 2});
    for (int i = stop; i < 70; ++i) ASSERT_EQ(second.next().id, ids[i]) << "stopped at " << stop;
  }
}

TEST(Streams, ABadShardIsSkippedWithARecordUpToTheLimit) {
  const DataFolder folder(30);
  folder.damage("train-000001.tar", 5000);
  const int64_t bad = folder.manifest.shards[1].documents;
  const auto set = std::make_shared<ShardSet>(folder.path(), Split::kTrain);
  const auto source = samples(std::make_shared<ShardSource>(set, "test", 1, 8));
  SampleStream lenient(source, {}, {.workers = 2, .max_broken_share = 1});
  std::set<std::string> seen;
  for (int64_t i = 0; i < 30 - bad; ++i) seen.insert(lenient.next().id);
  EXPECT_EQ(static_cast<int64_t>(seen.size()), 30 - bad);
  while (lenient.state().position < 30) lenient.next();
  EXPECT_EQ(lenient.state().skipped.at("read"), bad);
  SampleStream strict(source, {}, {.workers = 2, .broken_allowance = 0});
  const std::string message = message_of([&] {
    for (int i = 0; i < 30; ++i) strict.next();
  });
  EXPECT_NE(message.find("train-000001.tar"), std::string::npos) << message;
}

TEST(Streams, ABrokenPictureIsSkippedAsContent) {
  struct Source : DocumentSource {
    std::string name() const override { return "broken"; }
    Document document(int64_t position) const override {
      Document document = make_document(3);
      document.id = fmt::format("{}", position);
      if (position == 2) {
        document.segments[1].pictures[0] = Picture::of_file(read_file(M3_SOURCE_DIR "/tests/golden/media/resize/noise.png"));
        document.segments[1].pictures[0].bytes.resize(200);
      }
      return document;
    }
  };
  SampleStream stream(samples(std::make_shared<Source>()), {}, {.workers = 2});
  for (const char* id : {"0", "1", "3", "4"}) EXPECT_EQ(stream.next().id, id);
  EXPECT_EQ(stream.state().skipped.at("content"), 1);
}

TEST(Prefetch, ErrorsComeInOrderAndDestructionDoesNotHang) {
  Prefetcher<int64_t> prefetcher(
      [](int64_t position) {
        if (position == 5) throw std::runtime_error("five");
        return position * position;
      },
      3, 4, 6);
  EXPECT_EQ(prefetcher.next(), 9);
  EXPECT_EQ(prefetcher.next(), 16);
  EXPECT_THROW(prefetcher.next(), std::runtime_error);
  EXPECT_EQ(prefetcher.next(), 36);
  EXPECT_EQ(prefetcher.position(), 7);
}

}  // namespace
}  // namespace m3::data
