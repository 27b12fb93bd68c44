// Items that training never draws (nano.md §3), decided by a hash of the item's text: the same in every run.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "train/synthetic/words.h"

namespace m3::synthetic {

// Which items a document may be about.
enum class Draw {
  kTrain,    // never a held-out item, never a strong pair
  kHeldOut,  // the item asked about is held out
  kStrong,   // a colour-shape pair that no training picture or clip holds
};

struct Group {
  int count;
  Colour colour;
  Shape shape;
  bool operator==(const Group&) const = default;
};

bool held_out(std::string_view kind, std::string_view item, double share);

bool held_out_groups(std::vector<Group> groups);          // 10 % of the sets of a two-group picture
bool held_out_number(int number);                         // 10 % of the 2- and 3-digit numbers
bool held_out_event(Event event, Colour colour, Shape shape);  // 10 % of the triples
bool held_out_order(Colour colour, Shape shape);          // 10 % of the pairs, for order of appearance
bool held_out_fact(std::string_view name, std::string_view word);  // 10 %
bool held_out_entity(std::string_view entity);            // 20 % of the things asked about in chat
bool held_out_page(std::string_view page);                // 5 % of the text pages
bool strong_pair(Colour colour, Shape shape);             // red star, green ring, blue moon, ...

}  // namespace m3::synthetic
