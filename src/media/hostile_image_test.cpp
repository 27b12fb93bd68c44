// Damaged and hostile pictures: refused with a reason, or loaded with every pixel right. Never a crash, a
// hang or much memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>

#include "base/rng.h"
#include "media/test_pictures.h"

namespace m3 {
namespace {

using namespace test;

const char* const kWhole[] = {"resize/exif_6.jpg", "resize/progressive.jpg", "resize/cmyk.jpg", "resize/grey.jpg",
                              "resize/rgba.png", "resize/interlaced.png", "resize/palette_transparent.png", "resize/rgb16.png",
                              "resize/lossy.webp", "resize/lossless_alpha.webp", "resize/animated.gif", "resize/interlaced.gif"};

// Refused, or exactly the picture of the undamaged file.
void expect_refused_or_equal(const std::string& damaged, const Image& want, const std::string& what) {
  try {
    const Image got = decode(damaged);
    EXPECT_TRUE(got.height == want.height && got.rgb_HW3 == want.rgb_HW3) << what << ": loaded with other pixels";
  } catch (const Error& error) {
    EXPECT_GT(std::string(error.what()).size(), 10u) << what;
  }
}

TEST(HostileImage, AFileCutAnywhereIsRefusedOrComplete) {
  for (const char* name : kWhole) {
    const std::string whole = golden(name);
    const Image want = decode(whole);
    const size_t step = std::max<size_t>(1, whole.size() / 400);
    for (size_t size = 0; size < whole.size(); size += step) {
      expect_refused_or_equal(whole.substr(0, size), want, fmt::format("{} cut to {} bytes", name, size));
    }
  }
}

TEST(HostileImage, AFlippedByteInAPngIsRefusedOrHarmless) {
  for (const char* name : {"resize/rgba.png", "resize/palette_transparent.png", "resize/interlaced.png"}) {
    const std::string whole = golden(name);
    const Image want = decode(whole);
    for (size_t at = 0; at < whole.size(); at += 3) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 0x55);
      expect_refused_or_equal(damaged, want, fmt::format("{} byte {} flipped", name, at));
    }
  }
}

TEST(HostileImage, RandomDamageNeverCrashes) {
  constexpr uint64_t kSeed = 7;
  Philox random(kSeed);
  for (const char* name : kWhole) {
    const std::string whole = golden(name);
    for (int trial = 0; trial < 150; ++trial) {
      std::string damaged = whole;
      for (uint64_t flips = 1 + random.below(8); flips > 0; --flips) {
        damaged[random.below(damaged.size())] = static_cast<char>(random.below(256));
      }
      const MediaLimits small{.max_pixels = 1'000'000};
      const std::string message = refusal(damaged, small);
      EXPECT_TRUE(message.empty() || message.size() > 10) << name << " trial " << trial;
    }
  }
}

struct HostileCase {
  const char* name;
  std::string bytes;
  const char* word;  // in the message
};

std::vector<HostileCase> hostile_pngs() {
  const std::string pixel = std::string("\0\x55", 2), header = png_header(1, 1, 8, 0);
  const std::string pixels = png_chunk("IDAT", deflate_bytes(pixel)), end = png_chunk("IEND", "");
  std::string bad_trns = png_chunk("tRNS", std::string("\0\x55", 2));
  bad_trns[9] = 1;  // data changed, checksum kept
  return {
      {"unknown critical chunk", header + png_chunk("CgBI", "1234") + pixels + end, "CgBI"},
      {"chunk longer than the file", header + big_u32(0xfffffff0) + "IDAT....", "truncated"},
      {"chunk name of control bytes", header + big_u32(0) + std::string(8, '\1'), "damaged"},
      {"two headers", header + png_header(1, 1, 8, 0).substr(8) + pixels + end, "PNG"},
      {"header not first", kPngSignature + png_chunk("gAMA", big_u32(1)) + header.substr(8) + pixels + end, "IHDR"},
      {"header of twelve bytes", kPngSignature + png_chunk("IHDR", std::string(12, '\1')) + pixels + end, "IHDR"},
      {"damaged transparency", header + bad_trns + pixels + end, "tRNS"},
      {"no pixel chunk", header + end, "IDAT"},
      {"empty pixel chunk", header + png_chunk("IDAT", "") + end, "PNG"},
      {"pixels torn apart", png_header(1, 9000, 8, 0) + png_chunk("IDAT", deflate_bytes(std::string(18000, '\0')).substr(0, 12)) +
                                png_chunk("tEXt", "k") + png_chunk("IDAT", deflate_bytes(std::string(18000, '\0')).substr(12)) + end,
       "early"},
      {"no zlib stream", header + png_chunk("IDAT", "garbage!") + end, "PNG"},
      {"unknown filter", png(1, 1, 8, 0, std::string("\x09\x55", 2)), "filter"},
      {"bit depth 3", png(1, 1, 3, 0, pixel), "PNG"},
      {"depth 16 with a palette", png(1, 1, 16, 3, std::string(3, '\0'), png_chunk("PLTE", "abc")), "PNG"},
      {"interlace method 7", kPngSignature + png_chunk("IHDR", big_u32(1) + big_u32(1) + std::string("\x08\0\0\0\7", 5)) + pixels + end, "PNG"},
      {"palette of four bytes", png(1, 1, 8, 3, std::string(2, '\0'), png_chunk("PLTE", "abcd")), "PNG"},
      {"colour beyond the palette", png(1, 1, 8, 3, std::string("\0\5", 2), png_chunk("PLTE", "abc")), "palette"},
      {"negative size", png_header(0x80000001u, 1, 8, 0) + pixels + end, "too large"},
      {"less than one row", png(4000, 1, 8, 2, std::string(10, '\0')), "truncated"},
  };
}

std::vector<HostileCase> hostile_gifs() {
  const std::string one = std::string("\2") + gif_codes({4, 1, 5}, 3);
  std::vector<uint32_t> endless(64, 4);  // clear codes only
  return {
      {"code size 0", gif(1, 1, gif_frame(0, 0, 1, 1, std::string(1, '\0') + gif_codes({1}, 1))), "code size 0"},
      {"code size 12", gif(1, 1, gif_frame(0, 0, 1, 1, std::string("\x0c") + gif_codes({1}, 12))), "code size 12"},
      {"code beyond the table", gif(2, 1, gif_frame(0, 0, 2, 1, std::string("\2") + gif_codes({4, 1, 7}, 3))), "not defined"},
      {"table code first", gif(2, 1, gif_frame(0, 0, 2, 1, std::string("\2") + gif_codes({4, 6, 1}, 3))), "not defined"},
      {"end at once", gif(1, 1, gif_frame(0, 0, 1, 1, std::string("\2") + gif_codes({4, 5}, 3))), "early"},
      {"only clear codes", gif(1, 1, gif_frame(0, 0, 1, 1, std::string("\2") + gif_codes(endless, 3))), "early"},
      {"too few pixels", gif(3, 1, gif_frame(0, 0, 3, 1, one)), "early"},
      {"frame of no width", gif(1, 1, gif_frame(0, 0, 0, 1, one)), "zero"},
      {"frame far outside", gif(1, 1, gif_frame(65535, 65535, 1, 1, one)), "too large"},
      {"unknown block", gif(1, 1, "\x77"), "damaged"},
      {"endless extension", gif(1, 1, "!\xfe\x01" "a"), "truncated"},
      {"colour beyond the palette", std::string("GIF89a") + little_u16(1) + little_u16(1) + std::string("\x80\0\0", 3) + std::string(6, 'x') +
                                       gif_frame(0, 0, 1, 1, std::string("\2") + gif_codes({4, 3, 5}, 3)), "palette"},
  };
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  M3_CHECK(at != text.npos, "the golden file has no such bytes");
  return text.replace(at, from.size(), to);
}

std::vector<HostileCase> hostile_jpegs() {
  const std::string good = golden("broken/jpeg_named.png");
  const std::string frame_header("\xff\xc0\x00\x11\x08", 5);
  std::string no_tables = good;
  for (size_t at; (at = no_tables.find("\xff\xdb")) != no_tables.npos;) no_tables[at + 1] = '\xe5';
  return {
      {"start only", "\xff\xd8\xff", "JPEG"},
      {"12-bit samples", replaced(good, frame_header, std::string("\xff\xc0\x00\x11\x0c", 5)), "JPEG"},
      {"lossless process", replaced(good, frame_header, std::string("\xff\xc3\x00\x11\x08", 5)), "JPEG"},
      {"no quantisation tables", no_tables, "JPEG"},
      {"two frame headers", replaced(good, frame_header, good.substr(good.find(frame_header), 19) + frame_header), "JPEG"},
      {"no pixels", good.substr(0, good.find("\xff\xda")) + "\xff\xd9", "JPEG"},
  };
}

std::vector<HostileCase> hostile_webps() {
  const std::string good = golden("broken/webp_without_extension");
  return {
      {"nothing inside", good.substr(0, 12), "WebP"},
      {"unknown bitstream", replaced(good, "VP8 ", "VP9 "), "WebP"},
      {"lying size", good.substr(0, 4) + std::string("\xff\xff\xff\x7f", 4) + good.substr(8, 40), "WebP"},
      {"animation", std::string("RIFF\x16\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\0\0\0\0\0\0", 30), "WebP"},
  };
}

TEST(HostileImage, EachIsRefusedByNameAndQuickly) {
  std::vector<HostileCase> cases;
  for (auto* make : {hostile_pngs, hostile_gifs, hostile_jpegs, hostile_webps}) {
    for (HostileCase& entry : make()) cases.push_back(std::move(entry));
  }
  EXPECT_GE(cases.size(), 40u);
  for (const HostileCase& entry : cases) {
    const auto start = std::chrono::steady_clock::now();
    const std::string message = refusal(entry.bytes);
    EXPECT_NE(message.find(entry.word), std::string::npos) << entry.name << ": '" << message << "'";
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(1)) << entry.name;
  }
}

// A progressive file of a few kilobytes that asks for thousands of passes over 25 million pixels.
TEST(HostileImage, AJpegOfTooManyScansIsRefusedQuickly) {
  std::string bytes = golden("resize/progressive.jpg");
  const size_t size_at = bytes.find("\xff\xc2") + 5;
  bytes.replace(size_at, 4, "\x07\xd0\x07\xd0", 4);  // 2000 x 2000
  const size_t first = bytes.find("\xff\xda"), second = bytes.find("\xff\xc4", first);
  const std::string scan = bytes.substr(first, second - first);
  const std::string head = bytes.substr(0, second);
  std::string bomb = head;
  for (int i = 0; i < 3000; ++i) bomb += scan;
  const auto start = std::chrono::steady_clock::now();
  EXPECT_FALSE(refusal(bomb).empty());
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
}

TEST(HostileImage, LimitsAreNamed) {
  const std::string picture = golden("resize/noise.png");  // 150 x 200
  EXPECT_EQ(refusal(picture, {.max_pixels = 30000}), "");
  EXPECT_NE(refusal(picture, {.max_pixels = 29999}).find("150 x 200 pixels (height x width) is too large: the limit is 29999"),
            std::string::npos);
  EXPECT_NE(refusal(picture, {.max_file_bytes = 100}).find("the limit is 100"), std::string::npos);
}

}  // namespace
}  // namespace m3
