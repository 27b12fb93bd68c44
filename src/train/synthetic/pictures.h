// Pictures of coloured shapes and numbers with their exact truth, and questions about them (nano.md §3).
#pragma once
#include <optional>

#include "train/synthetic/draw.h"
#include "train/synthetic/held_out.h"
#include "train/synthetic/turns.h"

namespace m3::synthetic {

enum class PictureKind {
  kCard,     // 56 px, 4 tokens, one question
  kPicture,  // 112 px, 16 tokens, three questions
  kEasy,     // 112 px, one group of one or two, three questions
};

struct SceneObject {
  Colour colour;
  Shape shape;
  float x, y, radius;  // pixels
};

struct PictureScene {
  PictureKind kind = PictureKind::kPicture;
  int size = 0;
  Background background;
  std::vector<Sprite> sprites;
  std::vector<Group> groups;         // one or two, sorted by shape, then colour; none where there is a number
  std::vector<SceneObject> objects;  // one a sprite
  std::optional<int> number;
  Colour number_colour = kRed;

  Image image() const { return render(size, background, sprites); }
};

enum class Ask { kAny, kDescribe, kCount, kColour, kShape, kPosition, kNumber };

// A scene whose item may be drawn (Draw), in which `ask` can be asked.
PictureScene draw_picture(PictureKind kind, Draw draw, Philox& random, Ask ask = Ask::kAny);

std::string describe(const PictureScene& scene);  // "two red triangles and a blue ring", "42"

// The questions of a training document, in the recipe's shares; for another `ask` than kAny one of that kind.
std::vector<Question> ask_about(const PictureScene& scene, Philox& random, Ask ask = Ask::kAny);

struct PictureOptions {
  PictureKind kind = PictureKind::kPicture;
  Draw draw = Draw::kTrain;
  Ask ask = Ask::kAny;
  double easy_share = 0;  // of kPicture: drawn as kEasy with this probability
};

// A pure function of (seed, index, options).
data::Document picture_document(uint64_t seed, uint64_t index, const PictureOptions& options);

}  // namespace m3::synthetic
