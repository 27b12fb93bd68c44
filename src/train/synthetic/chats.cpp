// Short chats (nano.md §3): greetings, who are you, what can you do, things it cannot know, thanks, pictures
// and clips that are not there.
#include <algorithm>

#include "base/check.h"
#include "train/synthetic/texts.h"

namespace m3::synthetic {
namespace {

constexpr uint64_t kFamily = 5;  // of the random streams

constexpr const char* kUnknown = "I am sorry, I do not know that.";

const Question kGreetings[] = {{"Hello!", "Hello! How can I help you?"},
                               {"Hi.", "Hello! How can I help you?"},
                               {"Good morning.", "Good morning! How can I help you?"},
                               {"Good evening.", "Good evening! How can I help you?"},
                               {"Hey there!", "Hello! How can I help you?"}};
const char* const kWho[] = {"Who are you?", "What are you?", "What is your name?", "Please introduce yourself."};
constexpr const char* kWhoAnswer = "I am m3-nano, a very small model that reads text, pictures and clips.";
const char* const kCan[] = {"What can you do?", "How can you help me?", "What do you know?"};
constexpr const char* kCanAnswer =
    "I can describe simple pictures and clips, and find the full name of an agent in a text.";
const Question kFarewells[] = {{"Thanks!", "You are welcome!"},     {"Thank you.", "You are welcome!"},
                               {"Thank you very much!", "You are welcome!"}, {"Goodbye.", "Goodbye!"},
                               {"Bye!", "Goodbye!"},                {"See you later.", "Goodbye!"}};
constexpr const char* kNoPicture = "There is no picture.";
constexpr const char* kNoClip = "There is no clip.";

struct Asked {
  const char* form;  // with {} for the entity
  std::vector<const char*> entities;
};

const std::vector<Asked>& asked() {
  static const std::vector<Asked> list = {
      {"What is the capital of {}?",
       {"France", "Peru", "Kenya", "Norway", "Japan", "Brazil", "Canada", "Egypt", "India", "Chile", "Poland", "Spain", "Ghana", "Nepal",
        "Cuba", "Finland", "Greece", "Iran", "Laos", "Mali"}},
      {"Who wrote {}?",
       {"Hamlet", "Faust", "Emma", "Ulysses", "Dracula", "Walden", "Candide", "Persuasion", "Middlemarch", "Kim", "Dubliners", "Utopia"}},
      {"When was {} born?",
       {"Newton", "Mozart", "Einstein", "Darwin", "Cleopatra", "Beethoven", "Galileo", "Rembrandt", "Euler", "Gauss", "Chopin", "Kepler"}},
      {"How far away is {}?", {"the moon", "the sun", "Mars", "Venus", "Saturn", "Jupiter", "Sirius", "Neptune"}},
      {"What is the weather in {}?",
       {"Berlin", "Oslo", "Lima", "Cairo", "Paris", "Rome", "Delhi", "Tokyo", "Boston", "Sydney", "Vienna", "Dublin"}},
      {"How old is {}?", {"the earth", "Rome", "the pope", "the king", "the oldest tree", "the internet"}},
      {"How do you make {}?", {"cheese", "bread", "paper", "glass", "soap", "ice cream", "beer", "bricks", "candles", "butter"}},
      {"Who invented the {}?",
       {"telephone", "telescope", "wheel", "radio", "bicycle", "compass", "piano", "zip", "light bulb", "printing press"}}};
  return list;
}

template <typename T, size_t n>
const T& pick(const T (&list)[n], Philox& random) {
  return list[random.below(n)];
}

Question ask_unknown(Draw draw, Philox& random) {
  for (;;) {
    const Asked& kind = asked()[random.below(asked().size())];
    const char* entity = kind.entities[random.below(kind.entities.size())];
    const bool held = held_out_entity(fmt::format("{}{}", kind.form, entity));
    if (held == (draw == Draw::kHeldOut)) return {fmt::format(fmt::runtime(kind.form), entity), kUnknown};
  }
}

Question random_turn(Draw draw, Philox& random) {
  const double u = random.uniform();
  if (u < .20) return pick(kGreetings, random);
  if (u < .32) return {pick(kWho, random), kWhoAnswer};
  if (u < .44) return {pick(kCan, random), kCanAnswer};
  if (u < .72) return ask_unknown(draw, random);
  if (u < .84) return pick(kFarewells, random);
  if (u < .92) return {"What is in the picture?", kNoPicture};
  return {"What happens in the clip?", kNoClip};
}

}  // namespace

data::Document chat_document(uint64_t seed, uint64_t index, Draw draw) {
  Philox random(seed, kFamily << 56 | index);
  TurnWriter turns;
  for (uint64_t left = 1 + random.below(3); left > 0; --left) turns.ask(random_turn(draw, random));
  return turns.finish(fmt::format("chat-{}-{}", seed, index), "chat");
}

}  // namespace m3::synthetic
