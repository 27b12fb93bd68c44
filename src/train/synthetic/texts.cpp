#include "train/synthetic/texts.h"

#include <algorithm>
#include <set>

#include "base/check.h"
#include "text/chat.h"

namespace m3::synthetic {
namespace {

constexpr uint64_t kFacts = 3, kRepeat = 4, kRows = 6;  // of the random streams

bool chance(Philox& random, double p) { return random.uniform() < p; }
int between(Philox& random, int low, int high) { return low + static_cast<int>(random.below(high - low + 1)); }

struct Fact {
  std::string name, word;
  std::string answer() const { return fmt::format("Agent {} {}.", name, word); }
};

bool has_held_out_word(std::string_view name, int num_words) {
  return std::any_of(kFactWords.begin(), kFactWords.begin() + num_words,
                     [&](std::string_view word) { return held_out_fact(name, word); });
}

// Distinct names; every pair is held out or not as `held` says for it.
std::vector<Fact> draw_facts(const std::vector<bool>& held, const FactWords& from, Philox& random) {
  M3_CHECK(static_cast<int>(held.size()) <= from.num_names, "{} facts need as many names; there are {}", held.size(),
           from.num_names);
  std::vector<size_t> names(from.num_names);
  for (size_t i = 0; i < names.size(); ++i) names[i] = i;
  for (size_t i = names.size(); i > 1; --i) std::swap(names[i - 1], names[random.below(i)]);
  std::vector<Fact> facts;
  for (size_t i = 0; i < held.size(); ++i) {
    if (held[i]) {  // of few words a name may have none that is held out
      const auto able = std::find_if(names.begin() + i, names.end(), [&](size_t name) {
        return has_held_out_word(kFirstNames[name], from.num_words);
      });
      M3_CHECK(able != names.end(), "no pair of {} names and {} words is held out", from.num_names, from.num_words);
      std::swap(names[i], *able);
    }
    const std::string_view name = kFirstNames[names[i]];
    std::string_view word;
    do {
      word = kFactWords[random.below(from.num_words)];
    } while (held_out_fact(name, word) != held[i]);
    facts.push_back({std::string(name), std::string(word)});
  }
  return facts;
}

std::string fact_line(const Fact& fact, Philox& random) {
  return chance(random, .5) ? fmt::format("Agent {} {} is here.\n", fact.name, fact.word)
                            : fmt::format("Remember agent {} {}.\n", fact.name, fact.word);
}

Question ask_fact(const Fact& fact, Philox& random) {
  const char* start = chance(random, .5) ? "Who is agent" : "What is the full name of agent";
  return {fmt::format("{} {}?", start, fact.name), fact.answer()};
}

int64_t count_tokens(const Tokenizer& tokenizer, std::string_view text) {
  return static_cast<int64_t>(tokenizer.encode(text, {.added_tokens = false}).size());
}

// Markers and line breaks of a turn, beside its question and answer.
constexpr int64_t kTurnTokens = 12;

}  // namespace

TextPool::TextPool(const std::vector<Page>& pages, bool held_out, const Tokenizer& tokenizer) : tokenizer_(tokenizer) {
  for (const Page& page : pages) {
    if (held_out_page(page.id) != held_out) continue;
    const uint32_t idx = static_cast<uint32_t>(texts_.size());
    texts_.push_back(page.text);
    const std::string& text = texts_.back();
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size() - 1) + 1;
      const std::vector<int32_t> ids =
          tokenizer.encode(std::string_view(text).substr(begin, end - begin), {.added_tokens = false});
      lines_.push_back({idx, static_cast<uint32_t>(begin), static_cast<uint32_t>(end - begin), static_cast<int32_t>(ids.size()),
                        static_cast<int64_t>(tokens_.size())});
      tokens_.insert(tokens_.end(), ids.begin(), ids.end());
      begin = end;
    }
  }
  num_tokens_ = static_cast<int64_t>(tokens_.size());
}

std::vector<std::string> TextPool::take(int64_t max_tokens, Philox& random) const {
  M3_CHECK(!lines_.empty(), "the text pool is empty: no page on this side of the split");
  std::vector<std::string> out;
  size_t at = random.below(lines_.size());
  int64_t left = max_tokens;
  for (size_t looked = 0; looked < lines_.size() && left > 0; ++looked, at = (at + 1) % lines_.size()) {
    const Line& line = lines_[at];
    if (line.num_tokens > max_tokens) continue;
    if (line.num_tokens > left) break;
    left -= line.num_tokens;
    out.push_back(texts_[line.page].substr(line.begin, line.size));
    if (out.back().back() != '\n') out.back() += '\n';
  }
  return out;
}

std::vector<int32_t> TextPool::window(int64_t count, Philox& random) const {
  M3_CHECK(num_tokens_ >= count, "the text pool has {} tokens, a window needs {}", num_tokens_, count);
  const int64_t begin = static_cast<int64_t>(random.below(num_tokens_ - count + 1));
  return {tokens_.begin() + begin, tokens_.begin() + begin + count};
}

data::Document fact_document(uint64_t seed, uint64_t index, const FactOptions& options, const TextPool& pool) {
  Philox random(seed, kFacts << 56 | index);
  const bool short_one = options.num_tokens > 0 && chance(random, options.bare_share);
  const bool bare = options.num_tokens == 0 || short_one;
  const int num_facts = short_one ? between(random, 3, 8) : between(random, options.min_facts, options.max_facts);
  int num_questions =
      short_one ? between(random, 1, 5) : between(random, options.min_questions, options.max_questions);
  if (options.asked_share > 0) num_questions = std::max(1, static_cast<int>(options.asked_share * num_facts + .5));
  num_questions = std::min(num_questions, num_facts);
  const bool test = options.draw != Draw::kTrain;
  if (test) num_questions = 1;
  std::vector<bool> held(num_facts, false);
  if (test) held[0] = true;
  const std::vector<Fact> facts = draw_facts(held, options.words, random);

  std::vector<Question> questions;
  std::vector<std::string> fact_lines;
  int64_t used = kTurnTokens;
  for (const Fact& fact : facts) {
    fact_lines.push_back(fact_line(fact, random));
    used += count_tokens(pool.tokenizer(), fact_lines.back());
  }
  for (int i = 0; i < num_questions; ++i) {  // the names are in random order already
    questions.push_back(ask_fact(facts[i], random));
    used += kTurnTokens + count_tokens(pool.tokenizer(), questions[i].text) + count_tokens(pool.tokenizer(), questions[i].answer);
  }

  // Places of the facts between the filler's lines.
  std::vector<std::string> filler;
  if (!bare) filler = pool.take(std::max<int64_t>(options.num_tokens - used, 1), random);
  std::vector<std::pair<size_t, size_t>> places;  // filler lines before it, fact
  for (size_t i = 0; i < facts.size(); ++i) {
    const size_t anywhere = random.below(filler.size() + 1);
    const bool fixed = i == 0 && options.depth >= 0;
    places.push_back({fixed ? static_cast<size_t>(options.depth * static_cast<double>(filler.size()) + .5) : anywhere, i});
  }
  if (bare) {  // else the questions would follow the order of the facts
    for (size_t i = places.size(); i > 1; --i) std::swap(places[i - 1], places[random.below(i)]);
  }
  std::stable_sort(places.begin(), places.end(), [](const auto& a, const auto& b) { return a.first < b.first; });

  TurnWriter turns;
  turns.open_user();
  size_t next = 0;
  std::string plain;
  const auto flush = [&] {
    if (!plain.empty()) turns.read(plain, 1);
    plain.clear();
  };
  for (size_t line = 0; line <= filler.size(); ++line) {
    for (; next < places.size() && places[next].first == line; ++next) {
      flush();
      turns.read(fact_lines[places[next].second], 0);
    }
    if (line < filler.size()) plain += filler[line];
  }
  flush();
  for (size_t i = 0; i < questions.size(); ++i) {
    if (i > 0) turns.open_user();
    turns.say(questions[i].text);
    turns.answer(questions[i].answer);
  }
  return turns.finish(fmt::format("facts-{}-{}", seed, index), "facts");
}

data::Document repeat_document(uint64_t seed, uint64_t index, const RepeatOptions& options) {
  Philox random(seed, kRepeat << 56 | index);
  const std::vector<Fact> facts =
      draw_facts(std::vector<bool>(between(random, options.min_facts, options.max_facts), false), options.words, random);
  std::string list;
  for (const Fact& fact : facts) list += fmt::format("{}{} {}", list.empty() ? "" : ", ", fact.name, fact.word);
  TurnWriter turns;
  turns.ask({"Repeat: " + list + ".", "Agents: " + list + "."});
  return turns.finish(fmt::format("repeat-{}-{}", seed, index), "repeat");
}

TextRows::TextRows(std::shared_ptr<const TextPool> pool, int64_t count, uint64_t seed)
    : pool_(std::move(pool)), count_(count), seed_(seed), start_(pool_->tokenizer().require_added_id(chat_token::kConversationStart)) {}

data::Sample TextRows::sample(int64_t position) const {
  Philox random(seed_, kRows << 56 | static_cast<uint64_t>(position));
  data::Sample out;
  out.id = fmt::format("text-{}-{}", seed_, position);
  out.source = "text";
  out.ids = pool_->window(count_, random);
  out.ids[0] = start_;
  out.weights.assign(out.ids.size(), 1.0f);
  out.weights[0] = 0;
  return out;
}

}  // namespace m3::synthetic
