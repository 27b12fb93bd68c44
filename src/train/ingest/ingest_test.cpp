// Real material: what comes out of pages, captions, sequences, films and conversations, and what is left out.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>

#include "base/check.h"
#include "base/rng.h"
#include "media/video.h"
#include "text/chat.h"
#include "text/utf8.h"
#include "train/data/shard_set.h"
#include "train/ingest/html.h"
#include "train/ingest/importer.h"

namespace m3::ingest {
namespace {

namespace fs = std::filesystem;
using data::Document;
using data::Segment;

TEST(Clean, LineEndsControlCharactersAndEmptyLines) {
  EXPECT_EQ(clean_text("\xEF\xBB\xBF\n\n a \t\r\nb\rc\f\x01" "d\x7F\n\n\n\n e\xC2\xAD" "f \n\n"), " a\nb\nc\nd\n\n ef");
  EXPECT_EQ(clean_text(""), "");
  EXPECT_EQ(to_utf8("Gr\xFC\xDF"), "Gr\xC3\xBC\xC3\x9F");
  EXPECT_EQ(to_utf8("Gr\xC3\xBC"), "Gr\xC3\xBC");
}

TEST(Clean, ReasonsToDrop) {
  const CleanOptions options{.min_letters = 20};
  EXPECT_EQ(reason_to_drop("A sentence of quite enough letters.", options), "");
  EXPECT_EQ(reason_to_drop("Short.", options), "too short");
  EXPECT_EQ(reason_to_drop("letters letters letters !!!! ---- ==== #### //// $$$$ %%%% &&&&", options), "mostly symbols");
  EXPECT_EQ(reason_to_drop("the same line\nthe same line\nthe same line\nthe same line\n", options), "repeated lines");
}

TEST(Clean, CutTextKeepsEveryByteAndPrefersEmptyLines) {
  std::string text;
  for (int i = 0; i < 60; ++i) text += fmt::format("Paragraph {} with \xC3\xA4 words.\nSecond line.\n\n", i);
  text += std::string(500, 'x');
  for (int64_t most : {100, 173, 1000}) {
    std::string joined;
    for (const std::string& piece : cut_text(text, most)) {
      EXPECT_LE(static_cast<int64_t>(piece.size()), most);
      EXPECT_EQ(utf8_find_invalid(piece), std::string_view::npos);
      joined += piece;
    }
    EXPECT_EQ(joined, text);
  }
  for (const std::string& piece : cut_text(text.substr(0, 2000), 400)) EXPECT_TRUE(piece.starts_with("Paragraph")) << piece;
}

std::string shown(const HtmlPage& page) {
  std::string out;
  for (const HtmlPart& part : page.parts) out += clean_text(part.text) + (part.image.empty() ? "" : "{" + part.image + "}");
  return out;
}

TEST(Html, TextAndPicturesInTheirOrder) {
  const HtmlPage page = parse_html(
      "<!DOCTYPE html><html><head><title>The &quot;Title&quot;</title><style>p { x }</style></head><body><nav><p>Menu</nav>"
      "<h1>Head   line</h1><p>One &amp; two<br>three &#228;&#x2014;<b>b</b>old.</p><img src=\"a%20b.png\" alt='A &lt; B'>"
      "<ul><li>first</li><li><p>second</p></li></ul><pre>  keep\n   this</pre><script>if (a < b) x();</script>"
      "<div class=\"x sphinxsidebar\"><div>hidden</div><img src=h.png></div>after 1 < 2 <!-- <p>no</p> -->end</body></html>");
  EXPECT_EQ(page.title, "The \"Title\"");
  ASSERT_EQ(page.parts.size(), 2u);
  EXPECT_EQ(page.parts[0].image, "a%20b.png");
  EXPECT_EQ(page.parts[0].alt, "A < B");
  EXPECT_EQ(clean_text(page.parts[0].text), "Head line\n\nOne & two\nthree \xC3\xA4\xE2\x80\x94" "bold.");
  EXPECT_EQ(clean_text(page.parts[1].text), "- first\n- second\n\n  keep\n   this\n\nafter 1 < 2 end");
  EXPECT_EQ(decode_percent("a%20b%2"), "a b%2");
}

TEST(Html, AnyBytesGiveAPage) {
  const std::string whole = "<div class='nav'><p>a<img src=x.png>b</p><pre>c</pre></div><!-- d --><script>e</script>&amp;&#99;<";
  for (size_t size = 0; size <= whole.size(); ++size) parse_html(std::string_view(whole).substr(0, size));
  Philox random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    for (uint64_t n = random.below(60); n > 0; --n) text += "<>/='\"&;!-ap \n#x1"[random.below(17)];
    parse_html(text);
  }
  EXPECT_EQ(shown(parse_html("no tags at all")), "no tags at all");
}

std::string words(int begin, int end) {
  std::string text;
  for (int i = begin; i < end; ++i) text += fmt::format("word{} ", i * 7919 % 1009);
  return text;
}

TEST(Dedup, TextsExactNearAndNew) {
  TextDedup dedup(.8);
  EXPECT_EQ(dedup.add(words(0, 300)), TextDedup::Verdict::kNew);
  EXPECT_EQ(dedup.add("  " + words(0, 300) + "!"), TextDedup::Verdict::kExact);  // other white space and signs
  EXPECT_EQ(dedup.add(words(0, 150) + "changed " + words(151, 300)), TextDedup::Verdict::kNear);
  EXPECT_EQ(dedup.add(words(300, 600)), TextDedup::Verdict::kNew);
  EXPECT_EQ(dedup.add(words(150, 450)), TextDedup::Verdict::kNew);  // half of it is old
  EXPECT_EQ(dedup.add("tiny"), TextDedup::Verdict::kNew);
  EXPECT_EQ(dedup.add("Tiny."), TextDedup::Verdict::kExact);
}

Image pattern(int height, int width, double phase) {
  Image image(height, width);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) {
        image.row(y)[3 * x + c] = static_cast<uint8_t>(127 + 120 * std::sin(phase + 9.0 * x / width + 5.0 * y * (1 + phase) / height));
      }
    }
  }
  return image;
}

TEST(Dedup, PicturesByTheirLook) {
  PictureIndex index;
  EXPECT_FALSE(index.find_or_add(perceptual_hash(pattern(200, 300, 0)), 0));
  EXPECT_EQ(index.find_or_add(perceptual_hash(pattern(100, 150, 0)), 1), 0u);  // the same, smaller
  EXPECT_FALSE(index.find_or_add(perceptual_hash(pattern(200, 300, 2)), 2));
}

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / fmt::format("m3-ingest-test-{}-{}", ::getpid(), ++counter)) {
    fs::remove_all(path_);
    fs::create_directories(path_ / "in");
  }
  ~Folder() { fs::remove_all(path_); }
  fs::path in() const { return path_ / "in"; }
  fs::path out() const { return path_ / "out"; }
  void write(const std::string& name, std::string_view content) const {
    fs::create_directories((in() / name).parent_path());
    std::ofstream(in() / name, std::ios::binary) << content;
  }
  void write(const std::string& name, const Image& image) const {
    const std::vector<std::byte> png = encode_png(image);
    write(name, std::string_view(reinterpret_cast<const char*>(png.data()), png.size()));
  }
  // Imports the folder and reads everything back, by id.
  std::map<std::string, Document> run(void (Importer::*import)(const Source&), ImportOptions options = {}) {
    data::ShardWriter writer(out(), {.rule = {.seed = 1, .valid = .3, .test = .3}});
    Importer importer(writer, options);
    (importer.*import)({.name = "s", .path = in(), .licence = "GPL-2", .weight = 1});
    manifest = writer.finish();
    std::map<std::string, Document> documents;
    for (data::Split split : {data::Split::kTrain, data::Split::kValid, data::Split::kTest}) {
      const data::ShardSet set(out(), split);
      for (int64_t i = 0; i < set.num_documents(); ++i) {
        Document document = set.read(i);
        splits[document.id] = split;
        documents.emplace(document.id, std::move(document));
      }
    }
    return documents;
  }
  data::Manifest manifest;
  std::map<std::string, data::Split> splits;

 private:
  static inline int counter = 0;
  fs::path path_;
};

TEST(Import, TextIsCleanedCutAndDeduplicated) {
  Folder folder;
  folder.write("a.txt", "First document.\r\n" + words(0, 200));
  folder.write("b/copy.txt", "First  document!\n" + words(0, 200));
  folder.write("c.md", words(300, 900) + "\n\n" + words(900, 1500));
  folder.write("short.txt", "Hi.");
  folder.write("picture.bin", "not asked for");
  const auto documents = folder.run(&Importer::text, {.max_document_bytes = 6000});
  ASSERT_EQ(documents.size(), 3u);
  EXPECT_TRUE(documents.at("s:a.txt").segments[0].text.starts_with("First document.\nword"));
  EXPECT_EQ(documents.at("s:a.txt").licence, "GPL-2");
  EXPECT_EQ(folder.splits.at("s:c.md#0"), folder.splits.at("s:c.md#1"));  // one item, one split
  EXPECT_EQ(folder.manifest.dropped, (std::map<std::string, int64_t>{{"duplicate", 1}, {"too short", 1}}));
}

TEST(Import, PagesKeepTheirPicturesInPlaceAndDropDecoration) {
  Folder folder;
  folder.write("img/a b.png", pattern(40, 60, 1));
  folder.write("img/logo.png", pattern(30, 30, 3));
  folder.write("img/dot.png", pattern(4, 4, 0));
  folder.write("img/bad.png", "this is no picture");
  for (int i = 0; i < 6; ++i) {
    folder.write(fmt::format("p{}.html", i), fmt::format("<p>Page {} {}</p><img src='img/logo.png'>", i, words(100 * i, 100 * i + 60)));
  }
  folder.write("main.html", "<p>Before.</p><img src='img/a%20b.png?x=1'><p>After.</p><img src=img/dot.png><img src=img/bad.png>"
                            "<img src=http://host/x.png><img src=img/none.png>");
  const auto documents = folder.run(&Importer::html, {.max_picture_uses = 5});
  ASSERT_EQ(documents.size(), 7u);
  const std::vector<Segment>& segments = documents.at("s:main.html").segments;
  ASSERT_EQ(segments.size(), 3u);
  EXPECT_EQ(segments[0].text, "Before.");
  EXPECT_EQ(segments[1].pictures.at(0).decode().rgb_HW3, pattern(40, 60, 1).rgb_HW3);
  EXPECT_EQ(segments[2].text, "\n\nAfter.");
  EXPECT_EQ(folder.manifest.dropped.at("picture: decoration"), 6);
  EXPECT_EQ(folder.manifest.dropped.at("picture: too small"), 1);
  EXPECT_EQ(folder.manifest.dropped.at("picture: cannot be read"), 1);
  EXPECT_EQ(folder.manifest.dropped.at("picture: not here"), 2);
}

TEST(Import, CaptionsGoWithTheirPictureAndCopiesShareItsSplit) {
  Folder folder;
  for (int i = 0; i < 12; ++i) {
    folder.write(fmt::format("p{}.png", i), pattern(100, 100, .37 * i));
    folder.write(fmt::format("p{}.txt", i), fmt::format("Picture {}.\nde.utf8=Bild {}.\n", i, i));
    folder.write(fmt::format("q{}.png", i), pattern(50, 50, .37 * i));  // the same, smaller, other words
    folder.write(fmt::format("q{}.txt", i), fmt::format("Small picture {}.", i));
  }
  folder.write("alone.png", pattern(60, 60, 9));
  const auto documents = folder.run(&Importer::captions);
  ASSERT_EQ(documents.size(), 24u);
  EXPECT_EQ(documents.at("s:p3").segments[1].text, "Picture 3.");
  for (int i = 0; i < 12; ++i) {
    EXPECT_EQ(documents.at(fmt::format("s:q{}", i)).item, documents.at(fmt::format("s:p{}", i)).item);
    EXPECT_EQ(folder.splits.at(fmt::format("s:q{}", i)), folder.splits.at(fmt::format("s:p{}", i)));
  }
  EXPECT_EQ(folder.manifest.dropped.at("no caption"), 1);
}

TEST(Import, NumberedPicturesBecomeAClip) {
  Folder folder;
  for (int i = 1; i <= 10; ++i) folder.write(fmt::format("unit/red-knight-attack-{}.png", i), pattern(48, 48, .1 * i));
  for (int i = 1; i <= 3; ++i) folder.write(fmt::format("unit/short{}.png", i), pattern(48, 48, i));
  for (int i = 1; i <= 4; ++i) folder.write(fmt::format("unit/uneven-{}.png", i), pattern(48, 40 + i, i));
  const auto documents = folder.run(&Importer::sequences);
  ASSERT_EQ(documents.size(), 1u);
  const std::vector<Segment>& segments = documents.begin()->second.segments;
  ASSERT_EQ(segments.at(0).pictures.size(), 10u);  // in the order of numbers, not of names
  for (int i = 0; i < 10; ++i) EXPECT_EQ(segments[0].pictures[i].decode().rgb_HW3, pattern(48, 48, .1 * (i + 1)).rgb_HW3) << i;
  EXPECT_EQ(segments.at(1).text, "red knight attack");
  EXPECT_EQ(folder.manifest.dropped.at("sequence: too short"), 1);
  EXPECT_EQ(folder.manifest.dropped.at("sequence: frames of different sizes"), 1);
}

TEST(Import, FilmsAreSampledWithTheirTimes) {
  if (!video_supported()) GTEST_SKIP() << "this build lacks FFmpeg";
  Folder folder;
  folder.write("clip.mp4", read_file(M3_SOURCE_DIR "/tests/golden/media/files/clip.mp4"));
  folder.write("clip.txt", "Tall buildings.");
  folder.write("cut.mp4", read_file(M3_SOURCE_DIR "/tests/golden/media/broken/mp4_cut_pixels.mp4"));
  folder.write("cut.txt", "Nothing.");
  const auto documents = folder.run(&Importer::films);
  ASSERT_EQ(documents.size(), 1u);
  const Segment& clip = documents.at("s:clip").segments.at(0);
  EXPECT_EQ(clip.frames, (std::vector<int64_t>{0, 25, 50, 75, 100, 125, 150, 175}));
  EXPECT_EQ(clip.fps, 25);
  EXPECT_EQ(clip.pictures.at(0).height, 224);
  EXPECT_EQ(folder.manifest.dropped.at("film: cannot be read"), 1);
}

TEST(Chats, TheAssistantsTurnsAreTheTargets) {
  const std::string line =
      R"({"messages":[{"role":"system","content":"Be brief."},{"role":"user","content":"Hi"},{"role":"assistant","content":"Hello!"},)"
      R"({"role":"user","content":"2+2?"},{"role":"assistant","content":"4","reasoning_content":"two and two"}]})";
  const JsonValue conversation = JsonValue::parse(line, "line");
  const std::vector<Segment> segments = chat_segments(conversation, 2);
  std::string all, targets;
  for (const Segment& segment : segments) {
    all += segment.text;
    if (segment.weight > 0) targets += segment.text + "|";
    EXPECT_TRUE(segment.weight == 0 || segment.weight == 2);
  }
  EXPECT_EQ(targets, "</mm:think>Hello![e~[|<mm:think>two and two</mm:think>4[e~[|");
  const std::string rendered = render_chat(read_messages(*conversation.find("messages")), {}, {.add_generation_prompt = false});
  EXPECT_EQ(all + "\n", rendered);
  EXPECT_THROW(chat_segments(JsonValue::parse(R"({"messages":[{"role":"user","content":"Hi"}]})", "x"), 1), Error);
}

}  // namespace
}  // namespace m3::ingest
