// The synthetic families against what can be seen in their pixels and read in their text: a measuring eye that
// shares no code with the renderer, disjoint splits, determinism, shares of the recipe.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include "base/sha256.h"
#include "train/synthetic/clips.h"
#include "train/synthetic/pictures.h"
#include "train/synthetic/texts.h"

namespace m3::synthetic {
namespace {

struct Blob {
  int area = 0;
  double x = 0, y = 0;
  double mean[3] = {};
};

bool near_colour(const uint8_t* p, Colour colour, float tolerance) {
  const Rgb c = kColourValues[colour];
  return std::abs(p[0] / 255.f - c.r) < tolerance && std::abs(p[1] / 255.f - c.g) < tolerance &&
         std::abs(p[2] / 255.f - c.b) < tolerance;
}

// Connected regions (eight neighbours) of pixels near a colour; specks are left out.
std::vector<Blob> find_blobs(const Image& image, Colour colour, float tolerance = .16f) {
  std::vector<int> label(static_cast<size_t>(image.height) * image.width, -1);
  std::vector<Blob> blobs;
  for (int y = 0; y < image.height; ++y) {
    for (int x = 0; x < image.width; ++x) {
      if (label[y * image.width + x] >= 0 || !near_colour(image.row(y) + 3 * x, colour, tolerance)) continue;
      Blob blob;
      std::vector<std::pair<int, int>> stack = {{y, x}};
      label[y * image.width + x] = 0;
      while (!stack.empty()) {
        const auto [cy, cx] = stack.back();
        stack.pop_back();
        ++blob.area;
        blob.x += cx + .5;
        blob.y += cy + .5;
        for (int c = 0; c < 3; ++c) blob.mean[c] += image.row(cy)[3 * cx + c] / 255.0;
        for (int k = 0; k < 9; ++k) {
          const int ny = cy + k / 3 - 1, nx = cx + k % 3 - 1;
          if (ny < 0 || nx < 0 || ny >= image.height || nx >= image.width || label[ny * image.width + nx] >= 0) continue;
          if (!near_colour(image.row(ny) + 3 * nx, colour, tolerance)) continue;
          label[ny * image.width + nx] = 0;
          stack.push_back({ny, nx});
        }
      }
      constexpr int kSpeck = 8;
      if (blob.area < kSpeck) continue;
      blob.x /= blob.area;
      blob.y /= blob.area;
      for (double& m : blob.mean) m /= blob.area;
      blobs.push_back(blob);
    }
  }
  return blobs;
}

// Is the eye to be trusted with this colour before this background?
bool stands_out(const Background& background, Colour colour) {
  const Rgb c = kColourValues[colour], b = background.base;
  const float distance = std::max({std::abs(c.r - b.r), std::abs(c.g - b.g), std::abs(c.b - b.b)});
  return background.noise < .02f && distance > .35f;
}

bool touch(const std::vector<SceneObject>& objects) {
  for (size_t i = 0; i < objects.size(); ++i) {
    for (size_t k = 0; k < i; ++k) {
      const float gap = std::hypot(objects[i].x - objects[k].x, objects[i].y - objects[k].y);
      if (gap < objects[i].radius + objects[k].radius + 3) return true;
    }
  }
  return false;
}

// Groups of a description, read back word by word.
std::vector<Group> parse_description(const std::string& text) {
  std::vector<Group> groups;
  std::string rest = text + " and ";
  while (!rest.empty()) {
    const size_t end = rest.find(" and ");
    std::string part = rest.substr(0, end);
    rest = rest.substr(end + 5);
    const size_t blank = part.find(' '), second = part.find(' ', blank + 1);
    const std::string number = part.substr(0, blank), colour = part.substr(blank + 1, second - blank - 1);
    std::string shape = part.substr(second + 1);
    Group group{};
    group.count = number == "a" || number == "an" ? 1 : number == "two" ? 2 : number == "three" ? 3 : number == "four" ? 4 : 0;
    if (group.count > 1) shape = shape == "crosses" ? "cross" : shape.substr(0, shape.size() - 1);
    group.colour = static_cast<Colour>(std::find(kColourNames.begin(), kColourNames.end(), colour) - kColourNames.begin());
    group.shape = static_cast<Shape>(std::find(kShapeNames.begin(), kShapeNames.end(), shape) - kShapeNames.begin());
    groups.push_back(group);
  }
  return groups;
}

TEST(Pictures, WhatTheDescriptionSaysIsInThePixels) {
  int num_checked = 0;
  for (uint64_t i = 0; i < 400; ++i) {
    Philox random(3, i);
    const PictureScene scene = draw_picture(i % 3 ? PictureKind::kPicture : PictureKind::kCard, Draw::kTrain, random, Ask::kDescribe);
    ASSERT_EQ(parse_description(describe(scene)), scene.groups) << describe(scene);
    if (touch(scene.objects)) continue;
    const Image image = scene.image();
    std::map<Colour, int> count;
    bool clear = true;
    for (const Group& group : scene.groups) {
      count[group.colour] += group.count;
      clear &= stands_out(scene.background, group.colour);
    }
    if (!clear) continue;
    for (const auto& [colour, want] : count) {
      const std::vector<Blob> blobs = find_blobs(image, colour);
      ASSERT_EQ(static_cast<int>(blobs.size()), want) << "scene " << i << ": " << describe(scene);
      ++num_checked;
      for (const Blob& blob : blobs) {
        EXPECT_NEAR(blob.mean[0], kColourValues[colour].r, .13) << "scene " << i;
        EXPECT_NEAR(blob.mean[1], kColourValues[colour].g, .13) << "scene " << i;
        EXPECT_NEAR(blob.mean[2], kColourValues[colour].b, .13) << "scene " << i;
        const bool at_an_object = std::any_of(scene.objects.begin(), scene.objects.end(), [&](const SceneObject& o) {
          return o.colour == colour && std::hypot(o.x - blob.x, o.y - blob.y) < 6;
        });
        EXPECT_TRUE(at_an_object) << "scene " << i;
      }
    }
  }
  EXPECT_GT(num_checked, 100);
}

// The shape of one object from its area, compared with the area of the ideal figure.
TEST(Pictures, ShapesHaveTheirAreas) {
  // In units of radius^2. The star: ten triangles of sides 1 and .42 and angle 36 degrees. The moon: the circle
  // of radius .9 less its overlap (lens) with one of radius .72 at distance .42.
  const double r = .9, s = .72, d = .42;
  const double lens = s * s * std::acos((d * d + s * s - r * r) / (2 * d * s)) + r * r * std::acos((d * d + r * r - s * s) / (2 * d * r)) -
                      .5 * std::sqrt((-d + s + r) * (d + s - r) * (d - s + r) * (d + s + r));
  const double want[kNumShapes] = {M_PI * .85 * .85, 4 * .72 * .72, 3 * std::sqrt(3.0) * .25, M_PI * (.81 - .25),
                                   2 * (.52 * 1.84) - .52 * .52, 5 * .42 * std::sin(M_PI / 5), M_PI * r * r - lens, 4 * .95 * .3};
  for (int shape = 0; shape < kNumShapes; ++shape) {
    for (float rotation : {-.4f, 0.f, .3f}) {
      Sprite sprite;
      sprite.shape = static_cast<Shape>(shape);
      sprite.colour = {1, 1, 1};
      sprite.x = 30.3f;
      sprite.y = 31.1f;
      sprite.radius = 20;
      sprite.rotation = rotation;
      const Image image = render(64, Background{}, {sprite});
      double area = 0;
      for (size_t i = 0; i < image.rgb_HW3.size(); i += 3) area += image.rgb_HW3[i] / 255.0;
      EXPECT_NEAR(area / 400, want[shape], .03) << kShapeNames[shape] << " turned by " << rotation;
    }
  }
}

TEST(Pictures, NumbersCanBeReadFromTheirSegments) {
  static constexpr float kMiddles[7][2] = {{0, -.9f}, {.5f, -.45f}, {.5f, .45f}, {0, .9f}, {-.5f, .45f}, {-.5f, -.45f}, {0, 0}};
  static const std::map<std::string, char> kDigits = {{"1111110", '0'}, {"0110000", '1'}, {"1101101", '2'}, {"1111001", '3'},
                                                      {"0110011", '4'}, {"1011011", '5'}, {"1011111", '6'}, {"1110000", '7'},
                                                      {"1111111", '8'}, {"1111011", '9'}};
  int num_checked = 0;
  for (uint64_t i = 0; i < 300; ++i) {
    Philox random(4, i);
    const PictureScene scene = draw_picture(PictureKind::kPicture, i % 2 ? Draw::kTrain : Draw::kHeldOut, random, Ask::kNumber);
    if (!stands_out(scene.background, scene.number_colour)) continue;
    const Image image = scene.image();
    std::string read;
    for (const Sprite& sprite : scene.sprites) {
      std::string lit;
      for (const auto& [u, v] : kMiddles) {
        const float c = std::cos(sprite.rotation), s = std::sin(sprite.rotation);
        const int x = static_cast<int>(sprite.x + sprite.radius * (c * u - s * v)), y = static_cast<int>(sprite.y + sprite.radius * (s * u + c * v));
        lit += near_colour(image.row(y) + 3 * x, scene.number_colour, .2f) ? '1' : '0';
      }
      read += kDigits.count(lit) ? kDigits.at(lit) : '?';
    }
    ASSERT_EQ(read, std::to_string(*scene.number)) << "scene " << i;
    ++num_checked;
  }
  EXPECT_GT(num_checked, 80);
}

// What happens, from the pixels alone.
std::string watch(const std::vector<Image>& frames, Colour colour) {
  std::vector<double> area, x, y;
  for (const Image& frame : frames) {
    double sum = 0, sx = 0, sy = 0;
    for (const Blob& blob : find_blobs(frame, colour)) {
      sum += blob.area;
      sx += blob.area * blob.x;
      sy += blob.area * blob.y;
    }
    area.push_back(sum);
    x.push_back(sum > 0 ? sx / sum : 0);
    y.push_back(sum > 0 ? sy / sum : 0);
  }
  if (*std::min_element(area.begin(), area.end()) == 0) return "blinks";
  const double dx = x.back() - x.front(), dy = y.back() - y.front();
  if (std::abs(dx) > 14) return dx > 0 ? "moves right" : "moves left";
  if (std::abs(dy) > 14) return dy > 0 ? "moves down" : "moves up";
  if (area.back() > 2 * area.front()) return "grows";
  if (area.front() > 2 * area.back()) return "shrinks";
  return "does not move";
}

TEST(Clips, WhatHappensCanBeSeen) {
  std::map<std::string, int> seen;
  for (uint64_t i = 0; i < 300; ++i) {
    Philox random(5, i);
    const ClipScene scene = draw_clip({.kind = i % 2 ? ClipKind::kOneObject : ClipKind::kTwoObjects, .draw = i % 3 ? Draw::kTrain : Draw::kHeldOut}, random);
    const std::vector<Image> frames = scene.frames();
    ASSERT_EQ(frames.size(), 8u);
    for (const Actor& actor : scene.actors) {
      const bool alone = std::count_if(scene.actors.begin(), scene.actors.end(), [&](const Actor& a) { return a.colour == actor.colour; }) == 1;
      const bool large_enough = actor.event < kGrows || actor.event >= kBlinks || actor.shape == kCircle || actor.shape == kSquare;
      if (!alone || !large_enough || !stands_out(scene.background, actor.colour)) continue;
      const std::string event = watch(frames, actor.colour);
      ASSERT_EQ(event, kEventNames[actor.event]) << "scene " << i << ": " << describe(scene);
      ASSERT_NE(describe(scene).find(one_text(actor.colour, actor.shape) + " " + event), std::string::npos);
      ++seen[event];
    }
  }
  EXPECT_EQ(seen.size(), 8u);
}

// The whole movement whatever the number of frames; the question alone that is wanted.
TEST(Clips, FramesAndQuestionAreObeyed) {
  Philox random(5, 1);
  ClipScene scene;
  do {
    scene = draw_clip({.kind = ClipKind::kOneObject, .num_frames = 16}, random);
  } while (scene.actors[0].event != kRight);
  EXPECT_EQ(scene.frames().size(), 16u);
  const Actor& actor = scene.actors[0];
  EXPECT_EQ(actor.sprite(0, 16).x, actor.x0);
  EXPECT_FLOAT_EQ(actor.sprite(15, 16).x, actor.x1);
  EXPECT_FLOAT_EQ(actor.sprite(5, 16).x, actor.x0 + (actor.x1 - actor.x0) / 3);
  for (uint64_t i = 0; i < 20; ++i) {
    const data::Document document = clip_document(
        7, i, {.kind = ClipKind::kOneObject, .ask = ClipAsk::kEvent, .num_frames = 16});
    std::string answers;
    for (const data::Segment& segment : document.segments) {
      if (segment.kind == data::Segment::Kind::kVideo) {
        EXPECT_EQ(segment.pictures.size(), 16u);
      }
      if (segment.weight == kAnswerWeight) answers += segment.text;
    }
    EXPECT_TRUE(answers.starts_with("it ") && answers.find("it ", 1) == std::string::npos) << answers;
  }
}

// Each picture stands in two frames: what differs between them is noise. Small clips stay in their picture.
TEST(Clips, HeldPicturesCellsAndEventsAreObeyed) {
  std::set<Event> events;
  for (uint64_t i = 0; i < 40; ++i) {
    Philox random(9, i);
    ClipScene scene = draw_clip({.kind = ClipKind::kOneObject, .draw = i % 2 ? Draw::kTrain : Draw::kHeldOut, .num_frames = 16,
                                 .events = ClipEvents::kMoves, .hold = 2, .cells = 2, .timestamps = false, .colour = kWhite}, random);
    EXPECT_EQ(scene.fps, 0);
    EXPECT_EQ(scene.actors[0].colour, kWhite);
    const Actor& actor = scene.actors[0];
    events.insert(actor.event);
    EXPECT_FLOAT_EQ(std::abs(actor.x1 - actor.x0) + std::abs(actor.y1 - actor.y0), kCell);
    // Red falls to the right, blue to the bottom.
    scene.background.noise = 0;
    Background tinted = scene.background;
    tinted.slope_x = tinted.slope_y = 0;
    tinted.base = {.5f, .5f, .5f};
    tinted.tint = .4f;
    const Image plain = render(56, tinted, {});
    EXPECT_NEAR(plain.row(9)[0] - plain.row(9)[3 * 55], .4 * 255 * 55 / 56, 1.5);
    EXPECT_NEAR(plain.row(0)[2] - plain.row(55)[2], .4 * 255 * 55 / 56, 1.5);
    EXPECT_EQ(plain.row(0)[1], plain.row(55)[3 * 55 + 1]);
    const std::vector<Image> frames = scene.frames();
    ASSERT_EQ(frames.size(), 16u);
    EXPECT_EQ(frames[0].width, 2 * kCell);
    for (int f = 0; f < 16; f += 2) EXPECT_EQ(frames[f].rgb_HW3, frames[f + 1].rgb_HW3);
    if (!stands_out(scene.background, actor.colour)) continue;
    EXPECT_NE(frames[0].rgb_HW3, frames[15].rgb_HW3);
    EXPECT_EQ(watch(frames, actor.colour), kEventNames[actor.event]);
  }
  EXPECT_EQ(events, (std::set<Event>{kLeft, kRight, kUp, kDown}));
}

TEST(Clips, OrderOfAppearanceCanBeSeen) {
  int num_checked = 0;
  for (uint64_t i = 0; i < 200; ++i) {
    Philox random(6, i);
    const ClipScene scene = draw_clip({.kind = ClipKind::kOrder}, random);
    const Colour a = scene.actors[0].colour, b = scene.actors[1].colour;
    if (a == b || !stands_out(scene.background, a) || !stands_out(scene.background, b)) continue;
    const std::vector<Image> frames = scene.frames();
    int first[2] = {-1, -1};
    for (int f = 0; f < 8; ++f) {
      if (first[0] < 0 && !find_blobs(frames[f], a).empty()) first[0] = f;
      if (first[1] < 0 && !find_blobs(frames[f], b).empty()) first[1] = f;
    }
    ASSERT_TRUE(first[0] >= 0 && first[0] <= 3 && first[1] >= first[0] + 2) << "scene " << i;
    EXPECT_TRUE(describe(scene).starts_with(one_text(a, scene.actors[0].shape) + " appears, then ")) << describe(scene);
    for (const Question& question : ask_about(scene, random)) {
      const int asked = question.text == "Which came first?" ? 0 : question.text == "Which came last?" ? 1 : -1;
      if (asked < 0) continue;
      EXPECT_EQ(question.answer, "the " + pair_text(scene.actors[asked].colour, scene.actors[asked].shape));
    }
    ++num_checked;
  }
  EXPECT_GT(num_checked, 40);
}

TEST(Clips, BlinkingFollowsItsPeriodInTheFrames) {
  Actor actor{};
  actor.blink_period = 4;
  actor.blink_phase = 1;
  std::string pattern;
  for (int f = 0; f < 8; ++f) pattern += actor.visible(f) ? '1' : '0';
  EXPECT_EQ(pattern, "10011001");
}

TEST(Questions, AnswersFollowFromTheScene) {
  std::map<std::string, int> answers;
  for (uint64_t i = 0; i < 3000; ++i) {
    Philox random(7, i);
    const PictureScene scene = draw_picture(PictureKind::kPicture, Draw::kTrain, random, i % 2 ? Ask::kCount : Ask::kPosition);
    for (const Question& q : ask_about(scene, random, i % 2 ? Ask::kCount : Ask::kPosition)) {
      ++answers[q.answer];
      if (i % 2) {
        int want = 0;
        for (const SceneObject& o : scene.objects) {
          const size_t at = q.text.find(plural(kShapeNames[o.shape]));  // a word of its own
          want += q.text == "How many shapes are there?" || (at != std::string::npos && at > 0 && q.text[at - 1] == ' ');
        }
        ASSERT_EQ(q.answer, kCountNames[want]) << q.text << " of " << describe(scene);
        continue;
      }
      const SceneObject *a = &scene.objects[0], *b = &scene.objects[1];
      if (q.text.find("the " + pair_text(a->colour, a->shape)) > q.text.find("the " + pair_text(b->colour, b->shape))) std::swap(a, b);
      const auto says = [&](const char* word) { return q.text.find(word) != std::string::npos; };
      const bool a_holds = says("left") ? a->x < b->x : says("right") ? a->x > b->x : says("above") || says("higher") ? a->y < b->y : a->y > b->y;
      const std::string winner = "the " + pair_text((a_holds ? a : b)->colour, (a_holds ? a : b)->shape);
      ASSERT_EQ(q.answer, q.text.starts_with("Is ") ? (a_holds ? "yes" : "no") : winner) << q.text;
    }
  }
  for (const char* answer : {"none", "one", "two", "three", "four", "yes", "no"}) EXPECT_GT(answers[answer], 30) << answer;
  EXPECT_NEAR(answers["yes"], answers["no"], 120);
}

TEST(HeldOut, TrainingNeverDrawsWhatTestsAsk) {
  std::set<std::string> train, test;
  const auto collect = [](const PictureScene& scene, std::set<std::string>& items) {
    if (scene.number && *scene.number >= 10) items.insert("number " + describe(scene));
    if (scene.groups.size() == 2) items.insert("groups " + describe(scene));
  };
  const auto collect_clip = [](const ClipScene& scene, std::set<std::string>& items, bool held) {
    for (const Actor& a : scene.actors) {
      const bool counts = !held || (scene.is_order ? held_out_order(a.colour, a.shape) : held_out_event(a.event, a.colour, a.shape));
      if (counts) items.insert(scene.is_order ? "order " + pair_text(a.colour, a.shape) : fmt::format("event {} {}", int(a.event), pair_text(a.colour, a.shape)));
    }
  };
  for (uint64_t i = 0; i < 10000; ++i) {
    Philox a(8, i), b(9, i), c(10, i), d(11, i);
    collect(draw_picture(PictureKind::kPicture, Draw::kTrain, a), train);
    collect(draw_picture(PictureKind::kPicture, Draw::kHeldOut, b), test);
    const ClipScene clip = draw_clip({}, c);
    for (const Actor& actor : clip.actors) ASSERT_FALSE(strong_pair(actor.colour, actor.shape));
    collect_clip(clip, train, false);
    collect_clip(draw_clip({.draw = Draw::kHeldOut}, d), test, true);
  }
  std::vector<std::string> both;
  std::set_intersection(train.begin(), train.end(), test.begin(), test.end(), std::back_inserter(both));
  EXPECT_TRUE(both.empty()) << both.size() << " items on both sides, one is " << both[0];
  const auto count = [](const std::set<std::string>& items, const char* kind) {
    return std::count_if(items.begin(), items.end(), [&](const std::string& s) { return s.starts_with(kind); });
  };
  EXPECT_NEAR(count(test, "number"), 99, 35);  // of 990
  EXPECT_GT(count(test, "groups"), 300);
  EXPECT_NEAR(count(test, "event"), 46, 20);   // of 8 x 58
  EXPECT_GT(count(train, "event"), 380);
}

TEST(HeldOut, StrongPairsAreInNoTrainingPictureAndInEveryStrongOne) {
  for (uint64_t i = 0; i < 3000; ++i) {
    Philox a(12, i), b(13, i);
    for (const Group& g : draw_picture(PictureKind::kCard, Draw::kTrain, a).groups) ASSERT_FALSE(strong_pair(g.colour, g.shape));
    const std::vector<Group> groups = draw_picture(PictureKind::kPicture, Draw::kStrong, b, Ask::kDescribe).groups;
    ASSERT_TRUE(std::any_of(groups.begin(), groups.end(), [](const Group& g) { return strong_pair(g.colour, g.shape); }));
  }
}

TEST(Pictures, SharesOfTheRecipe) {
  int numbers = 0, two_groups = 0, describes = 0, last = 0;
  constexpr int kCount = 3000;
  for (uint64_t i = 0; i < kCount; ++i) {
    Philox random(14, i);
    const PictureScene scene = draw_picture(PictureKind::kPicture, Draw::kTrain, random);
    numbers += scene.number.has_value();
    two_groups += scene.groups.size() == 2;
    const std::vector<Question> questions = ask_about(scene, random);
    ASSERT_EQ(questions.size(), scene.number ? 2u : 3u);
    describes += !scene.number && std::any_of(questions.begin(), questions.end(), [&](const Question& q) { return q.answer == describe(scene); });
    if (i >= kCount / 5) continue;  // drawing all of them takes seconds
    const data::Document document = picture_document(14, i, {});
    last += document.segments[0].text.find('?') != std::string::npos || document.segments[0].text.find("Describe") != std::string::npos ||
            document.segments[0].text.find("Count") != std::string::npos;
  }
  EXPECT_NEAR(numbers, .15 * kCount, 70);
  // Held-out and strong sets are drawn again, which two groups are more often.
  EXPECT_NEAR(two_groups, .65 * .85 * kCount, 120);
  EXPECT_NEAR(describes, .85 * 5 / 6 * kCount, 90);
  EXPECT_NEAR(last, .1 * kCount / 5, 27);
}

const Tokenizer& tokenizer() {
  static const Tokenizer instance = Tokenizer::load(M3_SOURCE_DIR "/tests/golden/tokenizer/tiny");
  return instance;
}

std::string hash_of(const data::Document& document) {
  std::string all;
  for (const data::Member& member : data::to_members(document, "k")) all += member.name + member.bytes;
  return sha256_hex(all);
}

std::shared_ptr<const TextPool> pool(bool held) {
  std::vector<TextPool::Page> pages;
  for (int p = 0; p < 200; ++p) {
    std::string text;
    for (int line = 0; line < 30; ++line) text += fmt::format("Page {} has a line {} of quite ordinary words.\n", p, line);
    pages.push_back({fmt::format("page-{}", p), text});
  }
  return std::make_shared<TextPool>(pages, held, tokenizer());
}

TEST(Documents, APureFunctionOfSeedAndIndex) {
  const auto text = pool(false);
  const std::vector<std::function<data::Document(uint64_t, uint64_t)>> families = {
      [](uint64_t s, uint64_t i) { return picture_document(s, i, {}); },
      [](uint64_t s, uint64_t i) { return picture_document(s, i, {.kind = PictureKind::kCard}); },
      [](uint64_t s, uint64_t i) { return clip_document(s, i, {}); },
      [&](uint64_t s, uint64_t i) { return fact_document(s, i, {}, *text); },
      [](uint64_t s, uint64_t i) { return repeat_document(s, i); },
      [](uint64_t s, uint64_t i) { return chat_document(s, i, Draw::kTrain); }};
  for (size_t f = 0; f < families.size(); ++f) {
    std::set<std::string> hashes;
    for (uint64_t i = 0; i < 12; ++i) {
      const std::string hash = hash_of(families[f](1, i));
      EXPECT_EQ(hash, hash_of(families[f](1, i)));
      hashes.insert(hash);
      hashes.insert(hash_of(families[f](2, i)));
    }
    EXPECT_GT(hashes.size(), 12u) << "family " << f;
  }
}

// Texts of the targets and of everything, as the model sees them.
std::pair<std::string, std::string> targets_and_all(const data::Document& document) {
  const data::Sample sample = data::SampleBuilder(tokenizer()).build(document);
  std::vector<int32_t> targets;
  for (size_t i = 0; i < sample.ids.size(); ++i) {
    if (sample.weights[i] == kAnswerWeight) targets.push_back(sample.ids[i]);
  }
  return {tokenizer().decode(targets), tokenizer().decode(sample.ids)};
}

TEST(Documents, TargetsAreAnswersWithTheirEndAndNothingElse) {
  const auto [targets, all] = targets_and_all(repeat_document(1, 5));
  EXPECT_TRUE(all.starts_with("]~!b[]~b]user\nRepeat: "));
  EXPECT_TRUE(targets.starts_with("Agents: ") && targets.ends_with(".[e~[")) << targets;
  EXPECT_EQ(all.substr(all.find("</mm:think>") + 11), targets + "\n");
  const std::string listed = all.substr(all.find("Repeat: ") + 8, all.find("[e~[") - all.find("Repeat: ") - 8);
  EXPECT_EQ(targets, "Agents: " + listed + "[e~[");

  const data::Document picture = behind_full_prompt(picture_document(1, 3, {}));
  const auto [answers, prompt] = targets_and_all(picture);
  EXPECT_TRUE(prompt.starts_with("]~!b[]~b]system\nYour model version is")) << prompt.substr(0, 80);
  EXPECT_NE(prompt.find("Current thinking mode: disabled."), std::string::npos);
  EXPECT_NE(prompt.find("]~b]developer\n"), std::string::npos);
  EXPECT_EQ(std::count(prompt.begin(), prompt.end(), '!'), 1);  // one conversation start
  const auto [short_answers, short_prompt] = targets_and_all(picture_document(1, 3, {}));
  EXPECT_EQ(answers, short_answers);
  EXPECT_TRUE(prompt.ends_with(short_prompt.substr(std::string_view("]~!b[").size())));
}

TEST(Facts, EveryAskedFactStandsOnceInTheTextAndThePlaceIsObeyed) {
  const auto text = pool(true);
  for (uint64_t i = 0; i < 60; ++i) {
    const double depth = static_cast<double>(i % 5) / 4;
    const FactOptions options{.num_tokens = 1024, .min_facts = 6, .max_facts = 14, .draw = Draw::kHeldOut, .depth = depth};
    const data::Document document = fact_document(2, i, options, *text);
    const auto [target, all] = targets_and_all(document);
    ASSERT_TRUE(target.starts_with("Agent ") && target.ends_with(".[e~["));
    const std::string pair = target.substr(6, target.size() - 6 - 5);  // "Name word"
    EXPECT_TRUE(held_out_fact(pair.substr(0, pair.find(' ')), pair.substr(pair.find(' ') + 1)));
    const size_t question = all.find("gent " + pair.substr(0, pair.find(' ')) + "?");
    ASSERT_NE(question, std::string::npos);
    const size_t first = all.find(pair);
    ASSERT_LT(first, question);
    EXPECT_GT(all.find(pair, first + 1), question);  // again only in the answer
    EXPECT_NEAR(static_cast<double>(first) / static_cast<double>(question), depth, .1) << i;
    const int64_t num_tokens = static_cast<int64_t>(tokenizer().encode(all).size());
    EXPECT_LE(num_tokens, 1024);
    EXPECT_GT(num_tokens, 900);
  }
}

TEST(Facts, TrainingPairsAreNeverTestPairs) {
  const auto text = pool(false);
  for (uint64_t i = 0; i < 400; ++i) {
    const data::Document document = fact_document(3, i, {.bare_share = .5}, *text);
    int num_questions = 0;
    for (const data::Segment& segment : document.segments) {
      if (segment.weight != kAnswerWeight) continue;
      const size_t blank = segment.text.find(' ', 6);
      const std::string name = segment.text.substr(6, blank - 6), word = segment.text.substr(blank + 1, segment.text.find('.') - blank - 1);
      ASSERT_FALSE(held_out_fact(name, word)) << segment.text;
      ++num_questions;
    }
    ASSERT_GE(num_questions, 1);
    ASSERT_LE(num_questions, 5);
  }
}

TEST(Facts, FewNamesAndWordsAreObeyed) {
  const auto text = pool(false);
  const FactWords few = {5, 8};
  const std::set<std::string_view> names(kFirstNames.begin(), kFirstNames.begin() + 5),
      words(kFactWords.begin(), kFactWords.begin() + 8);
  const auto check = [&](std::string_view name, std::string_view word, bool held) {
    EXPECT_TRUE(names.contains(name) && words.contains(word)) << name << " " << word;
    EXPECT_EQ(held_out_fact(name, word), held) << name << " " << word;
  };
  for (uint64_t i = 0; i < 50; ++i) {
    const Draw draw = i % 2 ? Draw::kTrain : Draw::kHeldOut;
    const auto [answer, all] =
        targets_and_all(fact_document(3, i, {.num_tokens = 0, .min_facts = 5, .max_facts = 5, .min_questions = 1,
                                             .max_questions = 1, .draw = draw, .words = few}, *text));
    std::istringstream in(answer);  // "Agent Ada bell."
    std::string agent, name, word;
    in >> agent >> name >> word;
    check(name, word.substr(0, word.find('.')), draw == Draw::kHeldOut);

    const std::string list = targets_and_all(repeat_document(3, i, {.min_facts = 2, .max_facts = 2, .words = few})).first;
    EXPECT_EQ(std::count(list.begin(), list.end(), ','), 1) << list;
    std::istringstream pairs(list);  // "Agents: Ada bell, Ben boat."
    pairs >> agent;
    while (pairs >> name >> word) check(name, word.substr(0, word.find_first_of(",.")), false);
  }
}

TEST(Facts, WithoutFillerAnyFactIsAskedFirst) {
  const auto text = pool(false);
  std::map<size_t, int> places;  // of the fact asked first, among the facts
  for (uint64_t i = 0; i < 200; ++i) {
    const FactOptions options{.num_tokens = 0, .min_facts = 4, .max_facts = 4, .min_questions = 2, .max_questions = 2};
    const data::Document document = fact_document(9, i, options, *text);
    std::vector<std::string> facts;
    std::string first;
    for (const data::Segment& segment : document.segments) {
      if (segment.weight == kAnswerWeight && first.empty()) first = segment.text.substr(6, segment.text.find('.') - 6);
      if (segment.weight == 0 && first.empty() && segment.text.find("gent ") != std::string::npos) facts.push_back(segment.text);
    }
    std::string all;
    for (const std::string& fact : facts) all += fact;
    const size_t at = all.find(first);
    ASSERT_NE(at, std::string::npos) << first << " in " << all;
    ++places[static_cast<size_t>(std::count(all.begin(), all.begin() + static_cast<int64_t>(at), '\n'))];
  }
  ASSERT_EQ(places.size(), 4u);
  for (const auto& [place, count] : places) EXPECT_NEAR(count, 50, 25) << place;  // four standard deviations
}

TEST(Facts, FillerIsATargetOfWeightOneAndComesFromItsSideOfTheSplit) {
  const auto train = pool(false), test = pool(true);
  EXPECT_NEAR(static_cast<double>(test->num_tokens()) / static_cast<double>(train->num_tokens() + test->num_tokens()), .05, .04);
  const data::Document document = fact_document(4, 1, {.num_tokens = 512}, *train);
  std::string filler;
  for (const data::Segment& segment : document.segments) filler += segment.weight == 1 ? segment.text : "";
  EXPECT_NE(filler.find("ordinary words"), std::string::npos);
  EXPECT_EQ(filler.find("gent"), std::string::npos);
  const std::string page = filler.substr(filler.find("Page ") + 5, filler.find(" has") - filler.find("Page ") - 5);
  EXPECT_FALSE(held_out_page("page-" + page));
}

TEST(Chats, SharesAndHeldOutEntities) {
  std::set<std::string> train, test;
  std::map<std::string, int> answers;
  int turns = 0;
  for (uint64_t i = 0; i < 4000; ++i) {
    for (const bool held : {false, true}) {
      const data::Document document = chat_document(5 + held, i, held ? Draw::kHeldOut : Draw::kTrain);
      for (size_t s = 1; s < document.segments.size(); s += 2) {
        const std::string& input = document.segments[s - 1].text;
        const size_t at = input.find("user\n") + 5;
        const std::string question = input.substr(at, input.find("[e~[", at) - at);
        const std::string& answer = document.segments[s].text;
        if (answer.starts_with("I am sorry")) (held ? test : train).insert(question);
        if (!held) ++answers[answer], ++turns;
      }
    }
  }
  std::vector<std::string> both;
  std::set_intersection(train.begin(), train.end(), test.begin(), test.end(), std::back_inserter(both));
  EXPECT_TRUE(both.empty());
  EXPECT_NEAR(static_cast<double>(test.size()) / static_cast<double>(test.size() + train.size()), .2, .09);
  EXPECT_NEAR(answers["I am sorry, I do not know that.[e~["], .28 * turns, .03 * turns);
  EXPECT_NEAR(answers["There is no picture.[e~["], .08 * turns, .02 * turns);
}

TEST(Text, RowsBeginWithTheConversationStart) {
  const TextRows rows(pool(false), 64, 1);
  std::set<std::vector<int32_t>> different;
  for (int64_t i = 0; i < 20; ++i) {
    const data::Sample sample = rows.sample(i);
    ASSERT_EQ(sample.num_tokens(), 64);
    EXPECT_EQ(tokenizer().decode({sample.ids.data(), 1}), "]~!b[");
    EXPECT_EQ(sample.weights[0], 0);
    EXPECT_EQ(sample.weights[1], 1);
    EXPECT_EQ(sample.ids, rows.sample(i).ids);
    different.insert(sample.ids);
  }
  EXPECT_GT(different.size(), 15u);
}

}  // namespace
}  // namespace m3::synthetic
