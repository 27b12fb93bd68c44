// Vocabulary of the synthetic families (nano.md §3).
#pragma once
#include <array>
#include <string>
#include <string_view>

namespace m3::synthetic {

enum Shape { kCircle, kSquare, kTriangle, kRing, kCross, kStar, kMoon, kBar, kNumShapes };
enum Colour { kRed, kGreen, kBlue, kYellow, kOrange, kPurple, kWhite, kBlack, kNumColours };
enum Event { kLeft, kRight, kUp, kDown, kGrows, kShrinks, kBlinks, kStill, kNumEvents };

inline constexpr std::array<std::string_view, kNumShapes> kShapeNames = {"circle", "square", "triangle", "ring",
                                                                       "cross",  "star",   "moon",     "bar"};
inline constexpr std::array<std::string_view, kNumColours> kColourNames = {"red",    "green",  "blue",  "yellow",
                                                                         "orange", "purple", "white", "black"};
inline constexpr std::array<std::string_view, kNumEvents> kEventNames = {
    "moves left", "moves right", "moves up", "moves down", "grows", "shrinks", "blinks", "does not move"};
inline constexpr std::array<std::string_view, 5> kCountNames = {"none", "one", "two", "three", "four"};

// sRGB of the colours before the object's own variation.
struct Rgb {
  float r, g, b;
};
inline constexpr std::array<Rgb, kNumColours> kColourValues = {{{.86f, .12f, .12f}, {.12f, .62f, .20f}, {.15f, .30f, .90f},
                                                                {.95f, .88f, .12f}, {.98f, .55f, .05f}, {.55f, .15f, .70f},
                                                                {.97f, .97f, .97f}, {.04f, .04f, .04f}}};

inline std::string article(std::string_view word) {
  return std::string(std::string_view("aeiou").find(word[0]) != std::string_view::npos ? "an" : "a");
}
inline std::string plural(std::string_view noun) {
  return std::string(noun) + (noun.ends_with("s") ? "es" : "s");
}
// "red circle", "a red circle", "two red circles".
inline std::string pair_text(Colour colour, Shape shape) {
  return std::string(kColourNames[colour]) + " " + std::string(kShapeNames[shape]);
}
inline std::string one_text(Colour colour, Shape shape) {
  return article(kColourNames[colour]) + " " + pair_text(colour, shape);
}
inline std::string group_text(int count, Colour colour, Shape shape) {
  if (count == 1) return one_text(colour, shape);
  return std::string(kCountNames[count]) + " " + std::string(kColourNames[colour]) + " " + plural(kShapeNames[shape]);
}

// 48 first names and 121 common words; each is one token of the nano tokenizer behind a blank.
inline constexpr std::array<std::string_view, 48> kFirstNames = {
    "Ada",  "Alan",  "Amir",  "Anna", "Bela",  "Ben",   "Carla", "Chen",  "Clara", "Dana", "David", "Elena",
    "Emil", "Eva",   "Felix", "Finn", "Grace", "Hana",  "Hugo",  "Ida",   "Ines",  "Ivan", "Jana",  "John",
    "Jonas", "Karl", "Kira",  "Lara", "Leo",   "Lena",  "Marco", "Maria", "Mila",  "Mira", "Nina",  "Noah",
    "Nora", "Olga",  "Omar",  "Oscar", "Paul", "Petra", "Rosa",  "Sam",   "Sara",  "Tom",  "Vera",  "Yuki"};

inline constexpr std::array<std::string_view, 121> kFactWords = {
    "apple",  "arrow",  "autumn", "basket", "beach",  "bell",   "bird",   "boat",   "book",   "bottle", "branch", "bread",
    "bridge", "brush",  "bucket", "butter", "button", "candle", "carpet", "castle", "chair",  "cheese", "cherry", "clock",
    "cloud",  "coffee", "copper", "corner", "cotton", "cup",    "desert", "desk",   "dinner", "door",   "dragon", "drum",
    "eagle",  "earth",  "engine", "feather", "field", "finger", "fire",   "fish",   "flag",   "flower", "forest", "fork",
    "fox",    "garden", "garlic", "gate",   "glass",  "gold",   "grass",  "guitar", "hammer", "harbour", "hat",   "hill",
    "honey",  "horse",  "house",  "ice",    "island", "jacket", "jewel",  "key",    "kitchen", "knife", "ladder", "lake",
    "lamp",   "lantern", "leaf",  "lemon",  "letter", "lion",   "marble", "market", "meadow", "milk",   "mirror", "monkey",
    "mountain", "mouse", "needle", "nest",  "ocean",  "olive",  "onion",  "orange", "paper",  "pencil", "pepper", "piano",
    "pillow", "pocket", "pumpkin", "rabbit", "rain",  "river",  "road",   "rocket", "salt",   "sand",   "shadow", "ship",
    "silver", "snow",   "spoon",  "stone",  "summer", "table",  "thunder", "tiger", "tower",  "tree",   "village", "window",
    "winter"};

}  // namespace m3::synthetic
