#include "train/synthetic/clips.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"

namespace m3::synthetic {
namespace {

constexpr uint64_t kFamily = 2;  // of the random streams
constexpr int kNumMoves = 4;  // the first events

float uniform(Philox& random, float low, float high) { return low + (high - low) * static_cast<float>(random.uniform()); }
bool chance(Philox& random, double p) { return random.uniform() < p; }

// A walk over cells: from `first` by (dx, dy) cells.
struct Path {
  int side, first, dx = 0, dy = 0;
  std::vector<int> cells() const {
    std::vector<int> out;
    const int steps = std::max(std::abs(dx), std::abs(dy));
    for (int i = 0; i <= steps; ++i) {
      out.push_back(first + i * (dx > 0 ? 1 : dx < 0 ? -1 : 0) + side * i * (dy > 0 ? 1 : dy < 0 ? -1 : 0));
    }
    return out;
  }
};

Path random_path(Event event, int side, Philox& random) {
  for (;;) {
    Path path{side, static_cast<int>(random.below(side * side))};
    const int length = 1 + static_cast<int>(random.below(side - 1));
    if (event == kLeft || event == kRight) path.dx = event == kRight ? length : -length;
    if (event == kUp || event == kDown) path.dy = event == kDown ? length : -length;
    const int x = path.first % side + path.dx, y = path.first / side + path.dy;
    if (x >= 0 && x < side && y >= 0 && y < side) return path;
  }
}

bool disjoint(const Path& a, const Path& b) {
  for (int cell : a.cells()) {
    const std::vector<int> other = b.cells();
    if (std::find(other.begin(), other.end(), cell) != other.end()) return false;
  }
  return true;
}

Actor make_actor(Colour colour, Shape shape, Event event, const Path& path, Philox& random) {
  Actor actor{};
  actor.colour = colour;
  actor.shape = shape;
  actor.event = event;
  actor.rgb = vary_colour(colour, random);
  const float dx = uniform(random, -3, 3), dy = uniform(random, -3, 3);
  actor.x0 = (path.first % path.side + .5f) * kCell + dx;
  actor.y0 = (path.first / path.side + .5f) * kCell + dy;
  actor.x1 = actor.x0 + path.dx * kCell;
  actor.y1 = actor.y0 + path.dy * kCell;
  actor.radius0 = actor.radius1 = std::clamp(uniform(random, 8, 11.5f) * uniform(random, .9f, 1.1f), 8.0f, 11.5f);
  if (event == kGrows || event == kShrinks) {
    actor.radius0 = uniform(random, 4, 5.5f);
    actor.radius1 = actor.radius0 + uniform(random, 5.5f, 7);
    if (event == kShrinks) std::swap(actor.radius0, actor.radius1);
  }
  if (event == kBlinks) {
    actor.blink_period = chance(random, .5) ? 2 : 4;
    actor.blink_phase = static_cast<int>(random.below(actor.blink_period));
  }
  actor.rotation = uniform(random, -.5f, .5f);
  return actor;
}

struct Cast {
  Colour colour;
  Shape shape;
  Event event;
};

Cast random_cast(bool still, const ClipOptions& options, Philox& random) {
  const int num_events = options.events == ClipEvents::kMoves ? kNumMoves : kNumEvents;
  const auto colour = options.colour ? *options.colour : static_cast<Colour>(random.below(kNumColours));
  return {colour, static_cast<Shape>(random.below(kNumShapes)),
          still ? kStill : static_cast<Event>(random.below(num_events))};
}

bool may_draw(const std::vector<Cast>& cast, bool is_order, Draw draw) {
  const auto any = [&](auto test) { return std::any_of(cast.begin(), cast.end(), test); };
  const bool strong = any([](const Cast& c) { return strong_pair(c.colour, c.shape); });
  if (draw == Draw::kStrong || strong) return draw == Draw::kStrong && strong;
  const bool held = any([&](const Cast& c) {
    return is_order ? held_out_order(c.colour, c.shape) : held_out_event(c.event, c.colour, c.shape);
  });
  return held == (draw == Draw::kHeldOut);
}

std::vector<Cast> draw_cast(int count, bool is_order, const ClipOptions& options, Philox& random) {
  for (;;) {
    std::vector<Cast> cast;
    for (int i = 0; i < count; ++i) cast.push_back(random_cast(is_order, options, random));
    if (count == 2 && cast[0].colour == cast[1].colour && cast[0].shape == cast[1].shape) continue;
    if (may_draw(cast, is_order, options.draw)) return cast;
  }
}

std::string event_text(const Actor& actor) {
  return one_text(actor.colour, actor.shape) + " " + std::string(kEventNames[actor.event]);
}

}  // namespace

bool Actor::visible(int frame) const {
  if (frame < first_frame) return false;
  return blink_period == 0 || (frame + blink_phase) % blink_period < blink_period / 2;
}

Sprite Actor::sprite(int frame, int num_frames) const {
  const float t = static_cast<float>(frame) / static_cast<float>(num_frames - 1);
  Sprite out;
  out.shape = shape;
  out.colour = rgb;
  out.x = x0 + t * (x1 - x0);
  out.y = y0 + t * (y1 - y0);
  out.radius = radius0 + t * (radius1 - radius0);
  out.rotation = rotation;
  return out;
}

std::vector<Image> ClipScene::frames() const {
  std::vector<Image> out;
  const int num_pictures = (num_frames + hold - 1) / hold;
  for (int frame = 0; frame < num_frames; ++frame) {
    const int picture = frame / hold;
    std::vector<Sprite> sprites;
    for (const Actor& actor : actors) {
      if (actor.visible(picture)) sprites.push_back(actor.sprite(picture, num_pictures));
    }
    out.push_back(render(cells * kCell, background, sprites, frame));
  }
  return out;
}

ClipScene draw_clip(const ClipOptions& options, Philox& random) {
  const ClipKind kind = options.kind;
  const int num_pictures = options.num_frames / options.hold;
  M3_CHECK(num_pictures >= kClipFrames, "a clip of {} frames that show {} pictures; want at least {}", options.num_frames,
           num_pictures, kClipFrames);
  ClipScene scene;
  scene.num_frames = options.num_frames;
  scene.hold = options.hold;
  scene.cells = options.cells;
  scene.is_order = kind == ClipKind::kOrder || (kind == ClipKind::kAny && chance(random, .3));
  int count = 1;
  if (scene.is_order || kind == ClipKind::kTwoObjects) count = 2;
  if (kind == ClipKind::kAny && !scene.is_order) count = chance(random, .5) ? 1 : 2;
  std::vector<Cast> cast = draw_cast(count, scene.is_order, options, random);
  if (!scene.is_order) {
    std::sort(cast.begin(), cast.end(), [](const Cast& a, const Cast& b) {
      return a.shape != b.shape ? a.shape < b.shape : a.colour < b.colour;
    });
  }
  std::vector<Path> paths;
  do {
    paths.clear();
    for (const Cast& c : cast) paths.push_back(random_path(c.event, options.cells, random));
  } while (count == 2 && !disjoint(paths[0], paths[1]));
  scene.background = Background::random(random);
  scene.background.tint = options.tint;
  for (int i = 0; i < count; ++i) scene.actors.push_back(make_actor(cast[i].colour, cast[i].shape, cast[i].event, paths[i], random));
  if (scene.is_order) {
    const int first = static_cast<int>(random.below(4));
    const int second = first + 2 + static_cast<int>(random.below(num_pictures - first - 2));
    scene.actors[0].first_frame = first;
    scene.actors[1].first_frame = second;
  }
  if (options.timestamps && chance(random, .5)) scene.fps = static_cast<double>(1 << random.below(4));
  return scene;
}

std::string describe(const ClipScene& scene) {
  const std::vector<Actor>& actors = scene.actors;
  if (scene.is_order) {
    return one_text(actors[0].colour, actors[0].shape) + " appears, then " + one_text(actors[1].colour, actors[1].shape);
  }
  return actors.size() == 1 ? event_text(actors[0]) : event_text(actors[0]) + " and " + event_text(actors[1]);
}

std::vector<Question> ask_about(const ClipScene& scene, Philox& random) {
  static constexpr const char* kForms[] = {"What happens in the clip?", "Describe the clip.", "What does the clip show?"};
  std::vector<Question> questions = {{kForms[random.below(3)], describe(scene)}};
  const bool first = chance(random, .5);
  const Actor& actor = scene.actors[first || scene.actors.size() == 1 ? 0 : 1];
  const std::string pair = pair_text(actor.colour, actor.shape);
  if (scene.is_order) {
    questions.push_back({first ? "Which came first?" : "Which came last?", "the " + pair});
  } else {
    questions.push_back({fmt::format("What does the {} do?", pair), fmt::format("it {}", kEventNames[actor.event])});
  }
  if (chance(random, .5)) std::swap(questions[0], questions[1]);
  return questions;
}

data::Document clip_document(uint64_t seed, uint64_t index, const ClipOptions& options) {
  Philox random(seed, kFamily << 56 | index);
  ClipOptions drawn = options;
  if (drawn.kind == ClipKind::kAny && chance(random, options.easy_share)) drawn.kind = ClipKind::kEasy;
  const ClipScene scene = draw_clip(drawn, random);
  std::vector<Question> questions = ask_about(scene, random);
  if (options.ask != ClipAsk::kAny) {
    const bool wants_description = options.ask == ClipAsk::kDescribe;
    std::erase_if(questions, [&](const Question& q) { return (q.answer == describe(scene)) != wants_description; });
  }

  std::vector<data::Picture> frames;
  for (Image& image : scene.frames()) frames.push_back(data::Picture::of(std::move(image)));
  std::vector<int64_t> numbers(scene.num_frames);
  std::iota(numbers.begin(), numbers.end(), 0);
  TurnWriter turns;
  for (size_t i = 0; i < questions.size(); ++i) {
    turns.open_user();
    if (i == 0) turns.show(data::Segment::of_video(std::move(frames), scene.fps, numbers));
    turns.say(questions[i].text);
    turns.answer(questions[i].answer);
  }
  return turns.finish(fmt::format("clip-{}-{}", seed, index), "clip");
}

}  // namespace m3::synthetic
