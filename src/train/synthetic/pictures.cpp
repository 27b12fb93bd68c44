#include "train/synthetic/pictures.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace m3::synthetic {
namespace {

constexpr uint64_t kFamily = 1;  // of the random streams

float uniform(Philox& random, float low, float high) { return low + (high - low) * static_cast<float>(random.uniform()); }
bool chance(Philox& random, double p) { return random.uniform() < p; }
template <typename T>
const T& pick(const std::vector<T>& list, Philox& random) {
  return list[random.below(list.size())];
}
template <typename T>
void shuffle(std::vector<T>& list, Philox& random) {
  for (size_t i = list.size(); i > 1; --i) std::swap(list[i - 1], list[random.below(i)]);
}

Group random_group(int count, Philox& random) {
  return {count, static_cast<Colour>(random.below(kNumColours)), static_cast<Shape>(random.below(kNumShapes))};
}

bool same_pair(const Group& a, const Group& b) { return a.colour == b.colour && a.shape == b.shape; }

// Groups by the shares of the kind, before any rule about held-out items.
std::vector<Group> random_groups(PictureKind kind, Philox& random) {
  const auto two = [&](int first, int second) {
    std::vector<Group> groups = {random_group(first, random), random_group(second, random)};
    while (same_pair(groups[0], groups[1])) groups[1] = random_group(second, random);
    return groups;
  };
  const auto up_to = [&](int most) { return 1 + static_cast<int>(random.below(most)); };
  switch (kind) {
    case PictureKind::kCard:
      if (chance(random, .7)) return {random_group(1, random)};
      if (chance(random, .3)) return {random_group(2, random)};
      return two(1, 1);
    case PictureKind::kEasy: return {random_group(up_to(2), random)};
    case PictureKind::kPicture: break;
  }
  if (!chance(random, .7)) return {random_group(up_to(4), random)};
  int first = up_to(3), second = up_to(3);
  while (first + second > 4) first = up_to(3), second = up_to(3);
  return two(first, second);
}

bool has_strong(const std::vector<Group>& groups) {
  return std::any_of(groups.begin(), groups.end(), [](const Group& g) { return strong_pair(g.colour, g.shape); });
}

bool may_draw(const std::vector<Group>& groups, Draw draw) {
  if (draw == Draw::kStrong) return has_strong(groups);
  if (has_strong(groups)) return false;
  const bool held = groups.size() == 2 && held_out_groups(groups);
  return held == (draw == Draw::kHeldOut);
}

// Numbers of one digit are never held out; where one must be, two or more digits are drawn.
int random_number(PictureKind kind, Draw draw, Philox& random) {
  const int most = kind == PictureKind::kCard ? 2 : 3;
  for (;;) {
    const int digits = 1 + static_cast<int>(random.below(most));
    const int low = digits == 1 ? 0 : digits == 2 ? 10 : 100, high = digits == 1 ? 10 : digits == 2 ? 100 : 1000;
    const int number = low + static_cast<int>(random.below(high - low));
    if (held_out_number(number) == (draw != Draw::kTrain)) return number;
  }
}

void place_objects(PictureScene& scene, Philox& random) {
  const int side = scene.size / kCell;
  std::vector<int> cells(side * side);
  for (int i = 0; i < side * side; ++i) cells[i] = i;
  shuffle(cells, random);
  size_t next = 0;
  for (const Group& group : scene.groups) {
    const float group_radius = uniform(random, 8, 11.5f);
    for (int i = 0; i < group.count; ++i) {
      const int cell = cells[next++];
      Sprite sprite;
      sprite.shape = group.shape;
      sprite.colour = vary_colour(group.colour, random);
      sprite.x = (cell % side + .5f) * kCell + uniform(random, -3, 3);
      sprite.y = (cell / side + .5f) * kCell + uniform(random, -3, 3);
      sprite.radius = std::clamp(group_radius * uniform(random, .9f, 1.1f), 8.0f, 11.5f);
      sprite.rotation = uniform(random, -.5f, .5f);
      scene.sprites.push_back(sprite);
      scene.objects.push_back({group.colour, group.shape, sprite.x, sprite.y, sprite.radius});
    }
  }
}

// Digits in neighbouring cells of one row.
void place_number(PictureScene& scene, Philox& random) {
  const std::string digits = std::to_string(*scene.number);
  const int side = scene.size / kCell, count = static_cast<int>(digits.size());
  const int row = static_cast<int>(random.below(side)), column = static_cast<int>(random.below(side - count + 1));
  const float size = uniform(random, 9, 12), tilt = uniform(random, -.15f, .15f);
  const Rgb colour = vary_colour(scene.number_colour, random);
  const float dx = uniform(random, -3, 3), dy = uniform(random, -3, 3);
  for (int i = 0; i < count; ++i) {
    Sprite sprite;
    sprite.is_digit = true;
    sprite.digit = digits[i] - '0';
    sprite.colour = colour;
    sprite.x = (column + i + .5f) * kCell + dx;
    sprite.y = (row + .5f) * kCell + dy;
    sprite.radius = size;
    sprite.rotation = tilt;
    scene.sprites.push_back(sprite);
  }
}

int count_of(const PictureScene& scene, Shape shape) {
  int count = 0;
  for (const Group& group : scene.groups) count += group.shape == shape ? group.count : 0;
  return count;
}

// The only group with this group's shape (or colour)?
bool only_shape(const PictureScene& scene, const Group& group) {
  return std::count_if(scene.groups.begin(), scene.groups.end(), [&](const Group& g) { return g.shape == group.shape; }) == 1;
}
bool only_colour(const PictureScene& scene, const Group& group) {
  return std::count_if(scene.groups.begin(), scene.groups.end(), [&](const Group& g) { return g.colour == group.colour; }) == 1;
}

Question ask_describe(const PictureScene& scene, Philox& random) {
  static const std::vector<std::string> kForms = {"What is in the picture?", "What do you see?", "Describe the picture.",
                                                  "What does the picture show?"};
  return {pick(kForms, random), describe(scene)};
}

Question ask_count(const PictureScene& scene, Philox& random) {
  int total = 0;
  for (const Group& group : scene.groups) total += group.count;
  if (chance(random, .25)) return {"How many shapes are there?", std::string(kCountNames[total])};
  const Shape shape = chance(random, .25) ? static_cast<Shape>(random.below(kNumShapes)) : pick(scene.groups, random).shape;
  const std::string name = plural(kShapeNames[shape]);
  return {chance(random, .5) ? "How many " + name + " are there?" : "Count the " + name + ".",
          std::string(kCountNames[count_of(scene, shape)])};
}

std::optional<Question> ask_colour(const PictureScene& scene, Philox& random) {
  const Group& group = pick(scene.groups, random);
  if (!only_shape(scene, group)) return {};
  return Question{fmt::format("What colour is the {}?", kShapeNames[group.shape]), std::string(kColourNames[group.colour])};
}

std::optional<Question> ask_shape(const PictureScene& scene, Philox& random) {
  const Group& group = pick(scene.groups, random);
  if (!only_colour(scene, group)) return {};
  return Question{fmt::format("What shape is {}?", kColourNames[group.colour]), std::string(kShapeNames[group.shape])};
}

// Only for two single objects, along an axis on which they are more than 14 pixels apart.
std::optional<Question> ask_position(const PictureScene& scene, Philox& random) {
  if (scene.groups.size() != 2 || scene.objects.size() != 2) return {};
  const size_t first = random.below(2);
  const SceneObject &a = scene.objects[first], &b = scene.objects[1 - first];
  const bool across = chance(random, .5);
  const float gap = across ? b.x - a.x : b.y - a.y;  // positive: a is further left, or higher
  if (std::abs(gap) <= 14) return {};
  const std::string a_text = pair_text(a.colour, a.shape), b_text = pair_text(b.colour, b.shape);
  const bool forwards = chance(random, .5);
  const bool holds = (gap > 0) == forwards;
  if (chance(random, .5)) {
    const char* relation = across ? (forwards ? "left of" : "right of") : (forwards ? "above" : "below");
    return Question{fmt::format("Is the {} {} the {}?", a_text, relation, b_text), holds ? "yes" : "no"};
  }
  const char* relation = across ? (forwards ? "further left" : "further right") : (forwards ? "higher" : "lower");
  return Question{fmt::format("Which is {}, the {} or the {}?", relation, a_text, b_text), "the " + (holds ? a_text : b_text)};
}

Question ask_number(const PictureScene& scene) { return {"What number is in the picture?", std::to_string(*scene.number)}; }
Question ask_number_colour(const PictureScene& scene) {
  return {"What colour is the number?", std::string(kColourNames[scene.number_colour])};
}

std::optional<Question> try_ask(const PictureScene& scene, Ask ask, Philox& random) {
  if (scene.number) {
    if (ask == Ask::kColour) return ask_number_colour(scene);
    return ask == Ask::kNumber ? std::optional(ask_number(scene)) : std::nullopt;
  }
  switch (ask) {
    case Ask::kDescribe: return ask_describe(scene, random);
    case Ask::kCount: return ask_count(scene, random);
    case Ask::kColour: return ask_colour(scene, random);
    case Ask::kShape: return ask_shape(scene, random);
    case Ask::kPosition: return ask_position(scene, random);
    default: return {};
  }
}

std::vector<Question> ask_about_card(const PictureScene& scene, Philox& random) {
  if (scene.number) return {chance(random, .8) ? ask_number(scene) : ask_number_colour(scene)};
  if (scene.groups.size() == 2 || chance(random, .6)) return {ask_describe(scene, random)};
  return {*try_ask(scene, chance(random, .5) ? Ask::kColour : Ask::kShape, random)};
}

std::vector<Question> ask_about_picture(const PictureScene& scene, Philox& random) {
  std::vector<Question> questions;
  if (scene.number) {
    questions = {ask_number(scene), ask_number_colour(scene)};
  } else {
    if (chance(random, 5.0 / 6)) questions.push_back(ask_describe(scene, random));
    static const std::vector<Ask> kOthers = {Ask::kCount, Ask::kColour, Ask::kShape, Ask::kPosition};
    while (questions.size() < 3) {
      const std::optional<Question> question = try_ask(scene, pick(kOthers, random), random);
      const bool is_new = question && std::none_of(questions.begin(), questions.end(),
                                                   [&](const Question& q) { return q.text == question->text; });
      if (is_new) questions.push_back(*question);
    }
  }
  shuffle(questions, random);
  return questions;
}

// Could `ask` be asked, whatever is drawn for the question?
bool fits(const PictureScene& scene, Ask ask) {
  switch (ask) {
    case Ask::kAny: return true;
    case Ask::kNumber: return scene.number.has_value();
    case Ask::kPosition: return !scene.number && scene.groups.size() == 2 && scene.objects.size() == 2 &&
                                std::max(std::abs(scene.objects[0].x - scene.objects[1].x),
                                         std::abs(scene.objects[0].y - scene.objects[1].y)) > 14;
    case Ask::kColour: return !scene.number && std::any_of(scene.groups.begin(), scene.groups.end(),
                                                           [&](const Group& g) { return only_shape(scene, g); });
    case Ask::kShape: return !scene.number && std::any_of(scene.groups.begin(), scene.groups.end(),
                                                          [&](const Group& g) { return only_colour(scene, g); });
    default: return !scene.number;
  }
}

PictureScene random_scene(PictureKind kind, Draw draw, bool number, Philox& random) {
  PictureScene scene;
  scene.kind = kind;
  scene.size = kind == PictureKind::kCard ? 2 * kCell : 4 * kCell;
  if (number) {
    scene.number = random_number(kind, draw, random);
    scene.number_colour = static_cast<Colour>(random.below(kNumColours));
  } else {
    do {
      scene.groups = random_groups(kind, random);
    } while (!may_draw(scene.groups, draw));
    std::sort(scene.groups.begin(), scene.groups.end(), [](const Group& a, const Group& b) {
      return a.shape != b.shape ? a.shape < b.shape : a.colour < b.colour;
    });
  }
  scene.background = Background::random(random);
  if (number) {
    place_number(scene, random);
  } else {
    place_objects(scene, random);
  }
  return scene;
}

}  // namespace

PictureScene draw_picture(PictureKind kind, Draw draw, Philox& random, Ask ask) {
  const double number_share = kind == PictureKind::kEasy ? .08 : .15;
  for (;;) {
    const bool number = ask == Ask::kAny ? chance(random, number_share) && draw != Draw::kStrong : ask == Ask::kNumber;
    PictureScene scene = random_scene(kind, draw, number, random);
    if (fits(scene, ask)) return scene;
  }
}

std::string describe(const PictureScene& scene) {
  if (scene.number) return std::to_string(*scene.number);
  std::string text;
  for (const Group& group : scene.groups) {
    if (!text.empty()) text += " and ";
    text += group_text(group.count, group.colour, group.shape);
  }
  return text;
}

std::vector<Question> ask_about(const PictureScene& scene, Philox& random, Ask ask) {
  if (ask == Ask::kAny) {
    return scene.kind == PictureKind::kCard ? ask_about_card(scene, random) : ask_about_picture(scene, random);
  }
  for (;;) {
    if (const std::optional<Question> question = try_ask(scene, ask, random)) return {*question};
  }
}

data::Document picture_document(uint64_t seed, uint64_t index, const PictureOptions& options) {
  Philox random(seed, kFamily << 56 | index);
  PictureKind kind = options.kind;
  if (kind == PictureKind::kPicture && chance(random, options.easy_share)) kind = PictureKind::kEasy;
  const PictureScene scene = draw_picture(kind, options.draw, random, options.ask);
  const std::vector<Question> questions = ask_about(scene, random, options.ask);
  const bool media_last = chance(random, .1);
  TurnWriter turns;
  for (size_t i = 0; i < questions.size(); ++i) {
    turns.open_user();
    if (i == 0 && !media_last) turns.show(data::Segment::of_image(data::Picture::of(scene.image())));
    turns.say(questions[i].text);
    if (i == 0 && media_last) turns.show(data::Segment::of_image(data::Picture::of(scene.image())));
    turns.answer(questions[i].answer);
  }
  return turns.finish(fmt::format("picture-{}-{}", seed, index), kind == PictureKind::kCard ? "card" : "picture");
}

}  // namespace m3::synthetic
