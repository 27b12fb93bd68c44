#include "train/synthetic/held_out.h"

#include <fmt/core.h>

#include <algorithm>

#include "train/data/split.h"

namespace m3::synthetic {

bool held_out(std::string_view kind, std::string_view item, double share) {
  constexpr uint64_t kSeed = 1;  // of the split, not of a run
  return data::item_fraction(fmt::format("{}:{}", kind, item), kSeed) < share;
}

bool held_out_groups(std::vector<Group> groups) {
  std::vector<std::string> parts;
  for (const Group& group : groups) parts.push_back(group_text(group.count, group.colour, group.shape));
  std::sort(parts.begin(), parts.end());
  std::string item;
  for (const std::string& part : parts) item += part + "|";
  return held_out("groups", item, 0.1);
}

bool held_out_number(int number) { return number >= 10 && held_out("number", std::to_string(number), 0.1); }

bool held_out_event(Event event, Colour colour, Shape shape) {
  return held_out("event", fmt::format("{}:{}", kEventNames[event], pair_text(colour, shape)), 0.1);
}

bool held_out_order(Colour colour, Shape shape) { return held_out("order", pair_text(colour, shape), 0.1); }

bool held_out_fact(std::string_view name, std::string_view word) {
  return held_out("fact", fmt::format("{} {}", name, word), 0.1);
}

bool held_out_entity(std::string_view entity) { return held_out("entity", entity, 0.2); }

bool held_out_page(std::string_view page) { return held_out("page", page, 0.05); }

bool strong_pair(Colour colour, Shape shape) {
  static constexpr struct {
    Colour colour;
    Shape shape;
  } kPairs[] = {{kRed, kStar}, {kGreen, kRing}, {kBlue, kMoon}, {kYellow, kSquare}, {kOrange, kCross}, {kPurple, kTriangle}};
  return std::any_of(std::begin(kPairs), std::end(kPairs), [&](const auto& p) { return p.colour == colour && p.shape == shape; });
}

}  // namespace m3::synthetic
