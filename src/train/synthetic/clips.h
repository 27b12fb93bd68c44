// Clips of moving shapes with their exact truth: 84 pixels, 8 frames, 4 x 9 tokens (nano.md §3).
#pragma once
#include <optional>

#include "train/synthetic/draw.h"
#include "train/synthetic/held_out.h"
#include "train/synthetic/turns.h"

namespace m3::synthetic {

inline constexpr int kClipCells = 3, kClipFrames = 8;  // a side; 84 pixels

struct Actor {
  Colour colour;
  Shape shape;
  Event event;
  Rgb rgb;
  float x0, y0, x1, y1;    // centre in the first and the last frame
  float radius0, radius1;
  float rotation;
  int first_frame = 0;     // unseen before
  int blink_period = 0, blink_phase = 0;

  bool visible(int frame) const;
  Sprite sprite(int frame, int num_frames) const;
};

struct ClipScene {
  bool is_order = false;      // two still objects that appear one after the other
  Background background;
  std::vector<Actor> actors;  // one or two; of an order: the first to come first; else sorted by shape, then colour
  double fps = 0;             // 0: no timestamps
  int num_frames = kClipFrames;
  int hold = 1;               // frames that show one picture
  int cells = kClipCells;     // a side

  std::vector<Image> frames() const;
};

enum class ClipKind { kAny, kEasy, kOneObject, kTwoObjects, kOrder };  // kEasy: one object, as kOneObject

std::string describe(const ClipScene& scene);  // "a red circle moves left and a blue ring blinks"
std::vector<Question> ask_about(const ClipScene& scene, Philox& random);  // two; the recipe's shares

enum class ClipAsk { kAny, kDescribe, kEvent };  // kEvent: "What does the red circle do?", not of kOrder

enum class ClipEvents { kAny, kMoves };  // kMoves: left, right, up, down; not of kOrder

struct ClipOptions {
  ClipKind kind = ClipKind::kAny;
  Draw draw = Draw::kTrain;
  ClipAsk ask = ClipAsk::kAny;  // else this one question alone
  int num_frames = kClipFrames;  // at least 8; the events take the whole clip
  double easy_share = 0;       // of kAny: drawn as kEasy with this probability
  ClipEvents events = ClipEvents::kAny;
  int hold = 1;                // frames that show one picture; 2: both of a patch, so that none shows motion alone
  int cells = kClipCells;      // a side: 2 or 3
  bool timestamps = true;      // half of the clips carry them
  float tint = 0;              // of the background: shows the tower, which knows no place, where a patch lies
  std::optional<Colour> colour;  // of all objects; white ones differ from every background the same way
};

ClipScene draw_clip(const ClipOptions& options, Philox& random);  // easy_share, ask: not read

// A pure function of (seed, index, options).
data::Document clip_document(uint64_t seed, uint64_t index, const ClipOptions& options);

}  // namespace m3::synthetic
