// What the goldens do not hold: orientation, alpha and palette corners, sniffing, writing.
#include "media/image.h"

#include <gtest/gtest.h>

#include "media/sniff.h"
#include "media/test_pictures.h"

namespace m3 {
namespace {

using namespace test;

std::vector<int> pixel(const Image& image, int y, int x) {
  const uint8_t* p = image.row(y) + 3 * x;
  return {p[0], p[1], p[2]};
}

// A 2 x 3 picture of six different pixels, numbered 0 to 5 by rows.
Image numbered() {
  Image image(2, 3);
  for (size_t i = 0; i < image.rgb_HW3.size(); ++i) image.rgb_HW3[i] = static_cast<uint8_t>(i / 3);
  return image;
}

std::vector<int> numbers(const Image& image) {
  std::vector<int> out;
  for (size_t i = 0; i < image.rgb_HW3.size(); i += 3) out.push_back(image.rgb_HW3[i]);
  return out;
}

TEST(Orientation, EveryValueShowsThePictureAsExifDefines) {
  // Where the stored first row and first column are shown: EXIF 2.3, table of tag Orientation.
  const std::pair<int, std::vector<int>> kShown[] = {
      {1, {0, 1, 2, 3, 4, 5}}, {2, {2, 1, 0, 5, 4, 3}}, {3, {5, 4, 3, 2, 1, 0}}, {4, {3, 4, 5, 0, 1, 2}},
      {5, {0, 3, 1, 4, 2, 5}}, {6, {3, 0, 4, 1, 5, 2}}, {7, {5, 2, 4, 1, 3, 0}}, {8, {2, 5, 1, 4, 0, 3}},
      {0, {0, 1, 2, 3, 4, 5}}, {9, {0, 1, 2, 3, 4, 5}}};
  for (const auto& [orientation, want] : kShown) {
    const Image shown = apply_orientation(numbered(), orientation);
    EXPECT_EQ(numbers(shown), want) << "orientation " << orientation;
    EXPECT_EQ(shown.height, orientation >= 5 && orientation <= 8 ? 3 : 2) << "orientation " << orientation;
  }
}

TEST(Png, TransparentColourBecomesWhiteAndItsNeighbourStays) {
  const std::string transparent = png_chunk("tRNS", std::string("\0\x0a\0\x14\0\x1e", 6));  // colour 10, 20, 30
  const Image image = decode(png(2, 1, 8, 2, std::string("\0\x0a\x14\x1e\x0a\x14\x1f", 7), transparent));
  EXPECT_EQ(pixel(image, 0, 0), (std::vector<int>{255, 255, 255}));
  EXPECT_EQ(pixel(image, 0, 1), (std::vector<int>{10, 20, 31}));
}

TEST(Png, AlphaIsComposedWithOneRounding) {
  // 100 at alpha 128: (100 * 128 + 255 * 127) / 255 = 177.196; grey 16 bit: high bytes 0x40 and 0xff.
  const Image rgba = decode(png(1, 1, 8, 6, std::string("\0\x64\x64\x64\x80", 5)));
  EXPECT_EQ(pixel(rgba, 0, 0), (std::vector<int>{177, 177, 177}));
  const Image grey = decode(png(1, 1, 16, 4, std::string("\0\x40\xff\xff\x00", 5)));
  EXPECT_EQ(pixel(grey, 0, 0), (std::vector<int>{64, 64, 64}));
}

TEST(Png, ExifChunkTurnsThePicture) {
  const std::string exif = std::string("MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0", 26);
  const std::string raw = std::string("\0\x01\0\0\x02\0\0", 7);
  const Image turned = decode(png(2, 1, 8, 2, raw, png_chunk("eXIf", exif)));
  EXPECT_EQ(turned.height, 2);
  EXPECT_EQ(numbers(turned), (std::vector<int>{1, 2}));
}

TEST(Png, ChunksThatDoNotMakePixelsAreNotRead) {
  // A profile that would unpack to 1 GB, a gamma, a damaged comment: all are passed over.
  const std::string junk = png_chunk("iCCP", std::string("p") + std::string(2, '\0') + "not zlib") + png_chunk("gAMA", big_u32(1)) +
                           png_chunk("tEXt", "k");
  const Image image = decode(png(1, 1, 8, 0, std::string("\0\x55", 2), junk));
  EXPECT_EQ(pixel(image, 0, 0), (std::vector<int>{0x55, 0x55, 0x55}));
}

TEST(Png, WrittenPictureReadsBackEqual) {
  Image image(37, 23);
  for (size_t i = 0; i < image.rgb_HW3.size(); ++i) image.rgb_HW3[i] = static_cast<uint8_t>(i * 37 + i / 7);
  const Image back = decode_image(encode_png(image));
  EXPECT_EQ(back.height, 37);
  EXPECT_EQ(back.rgb_HW3, image.rgb_HW3);
}

TEST(Gif, FrameSmallerThanTheScreenLeavesColourZero) {
  // Codes: clear 4, colours 1 and 2, end 5.
  const std::string frame = gif_frame(1, 0, 2, 1, std::string("\2") + gif_codes({4, 1, 2, 5}, 3)) + ";";
  const Image image = decode(gif(3, 2, frame));
  EXPECT_EQ(pixel(image, 0, 0), (std::vector<int>{255, 0, 0}));
  EXPECT_EQ(pixel(image, 0, 1), (std::vector<int>{0, 255, 0}));
  EXPECT_EQ(pixel(image, 0, 2), (std::vector<int>{0, 0, 255}));
  EXPECT_EQ(pixel(image, 1, 2), (std::vector<int>{255, 0, 0}));
}

TEST(Gif, TransparentIndexAndUncoveredScreenBecomeWhite) {
  const std::string control = std::string("!\xf9\4\1\0\0\2\0", 8);  // colour 2 is transparent
  const std::string frame = control + gif_frame(0, 0, 2, 1, std::string("\2") + gif_codes({4, 1, 2, 5}, 3)) + ";";
  const Image image = decode(gif(3, 1, frame));
  EXPECT_EQ(pixel(image, 0, 0), (std::vector<int>{0, 255, 0}));
  EXPECT_EQ(pixel(image, 0, 1), (std::vector<int>{255, 255, 255}));
  EXPECT_EQ(pixel(image, 0, 2), (std::vector<int>{255, 255, 255}));
}

TEST(Gif, FrameBeyondTheScreenWidensIt) {
  const Image image = decode(gif(1, 1, gif_frame(0, 0, 2, 1, std::string("\2") + gif_codes({4, 3, 1, 5}, 3))));
  EXPECT_EQ(image.width, 2);
  EXPECT_EQ(pixel(image, 0, 1), (std::vector<int>{0, 255, 0}));
}

TEST(Gif, StringsThatReferToThemselvesUnpack) {
  // 1, then code 6 = "1 1" before it is in the table, then 7 = "1 1 1".
  const Image image = decode(gif(6, 1, gif_frame(0, 0, 6, 1, std::string("\2") + gif_codes({4, 1, 6, 7}, 3))));
  for (int x = 0; x < 6; ++x) EXPECT_EQ(pixel(image, 0, x), (std::vector<int>{0, 255, 0})) << x;
}

TEST(Sniff, TypesByFirstBytes) {
  const std::pair<std::string, MediaKind> kCases[] = {
      {"", MediaKind::kEmpty}, {"\xff", MediaKind::kUnknown}, {"\xff\xd8\xff", MediaKind::kJpeg},
      {golden("resize/rgba.png"), MediaKind::kPng}, {golden("broken/webp_without_extension"), MediaKind::kWebp},
      {golden("resize/animated.gif"), MediaKind::kGif}, {golden("broken/picture.tif"), MediaKind::kTiff},
      {golden("broken/picture.bmp"), MediaKind::kBmp}, {golden("broken/picture.svg"), MediaKind::kSvg},
      {golden("broken/picture.avif"), MediaKind::kAvif}, {golden("broken/mp4_named.png"), MediaKind::kMp4},
      {golden("broken/webm_vp8.webm"), MediaKind::kMatroska}, {golden("broken/text_named.png"), MediaKind::kUnknown},
      {"%PDF-1.7", MediaKind::kPdf}, {"RIFF....AVI LIST", MediaKind::kAvi}, {"RIFF", MediaKind::kUnknown},
      {"BMP is a format", MediaKind::kUnknown}, {"<html><svg></html>", MediaKind::kSvg}};
  for (const auto& [bytes, want] : kCases) {
    EXPECT_STREQ(media_kind_name(sniff_media(as_bytes(bytes))), media_kind_name(want)) << bytes.substr(0, 16);
  }
}

}  // namespace
}  // namespace m3
