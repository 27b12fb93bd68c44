#include "train/synthetic/turns.h"

#include "base/check.h"
#include "text/chat.h"

namespace m3::synthetic {

TurnWriter::TurnWriter() : pending_(chat_token::kConversationStart) {}

void TurnWriter::flush() {
  if (!pending_.empty()) segments_.push_back(data::Segment::of_text(std::move(pending_), 0, true));
  pending_.clear();
}

void TurnWriter::open_user() {
  pending_ += chat_token::kRoleStart;
  pending_ += "user\n";
}

void TurnWriter::show(data::Segment media) {
  flush();
  segments_.push_back(std::move(media));
}

void TurnWriter::read(std::string_view text, float weight) {
  flush();
  segments_.push_back(data::Segment::of_text(std::string(text), weight, false));
}

void TurnWriter::answer(std::string_view text) {
  pending_ += chat_token::kTurnEnd;
  pending_ += "\n";
  pending_ += chat_token::kRoleStart;
  pending_ += "ai\n";
  pending_ += chat_token::kThinkClose;
  flush();
  std::string target(text);
  target += chat_token::kTurnEnd;
  segments_.push_back(data::Segment::of_text(std::move(target), kAnswerWeight, true));
  pending_.assign(1, '\n');  // = "\n" draws a false alarm of g++ 12 about overlapping memory
}

void TurnWriter::ask(const Question& question) {
  open_user();
  say(question.text);
  answer(question.answer);
}

data::Document TurnWriter::finish(std::string id, std::string source) {
  flush();
  data::Document document;
  document.id = std::move(id);
  document.source = std::move(source);
  document.licence = "CC0-1.0";
  document.lang = "en";
  document.segments = std::move(segments_);
  segments_.clear();
  return document;
}

data::Document behind_full_prompt(data::Document document) {
  M3_CHECK(!document.segments.empty(), "{} is empty", document.id);
  std::string& first = document.segments.front().text;
  M3_CHECK(first.starts_with(chat_token::kConversationStart), "{} does not start a conversation",
           document.id);
  RenderOptions options;
  options.thinking_mode = "disabled";
  options.add_generation_prompt = false;
  first.replace(0, std::string_view(chat_token::kConversationStart).size(),
                render_chat({}, {}, options));
  return document;
}

}  // namespace m3::synthetic
