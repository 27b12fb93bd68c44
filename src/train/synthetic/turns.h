// Writes chat documents of the synthetic families: user turns are input, answers are targets.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "train/data/document.h"

namespace m3::synthetic {

inline constexpr float kAnswerWeight = 3;  // nano.md §4; plain text has weight 1

struct Question {
  std::string text, answer;
};

class TurnWriter {
 public:
  TurnWriter();  // a conversation without system and developer blocks

  void open_user();
  void say(std::string_view text) { pending_ += text; }        // protocol text or words: input
  void show(data::Segment media);                              // a picture or clip, here
  void read(std::string_view text, float weight);              // plain text in the user's turn, e.g. a page
  void answer(std::string_view text);                          // closes the user's turn, answers, closes the turn
  void ask(const Question& question);                          // open_user, say, answer

  data::Document finish(std::string id, std::string source);

 private:
  void flush();
  std::string pending_;  // input text not yet a segment
  std::vector<data::Segment> segments_;
};

// The same conversation behind M3's system and developer blocks, thinking disabled: as chat programs send it.
data::Document behind_full_prompt(data::Document document);

}  // namespace m3::synthetic
