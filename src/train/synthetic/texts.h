// Text families: facts hidden in pages, repetition, short chats, windows of plain text (nano.md §3).
#pragma once
#include <memory>

#include "base/rng.h"
#include "text/tokenizer.h"
#include "train/data/stream.h"
#include "train/synthetic/held_out.h"
#include "train/synthetic/turns.h"

namespace m3::synthetic {

// Pages of real text, cut into lines of known token counts. Immutable; thread-safe.
class TextPool {
 public:
  struct Page {
    std::string id, text;
  };
  // Keeps the pages of one side of the split (held_out_page by id). The tokenizer must outlive it.
  TextPool(const std::vector<Page>& pages, bool held_out, const Tokenizer& tokenizer);

  bool empty() const { return lines_.empty(); }
  int64_t num_tokens() const { return num_tokens_; }
  // Successive lines from a random place, at most max_tokens in all (going on with the first page after the
  // last). Lines longer than that are passed over.
  std::vector<std::string> take(int64_t max_tokens, Philox& random) const;
  // `count` ids from a random place of the pages' tokens, one after another.
  std::vector<int32_t> window(int64_t count, Philox& random) const;
  const Tokenizer& tokenizer() const { return tokenizer_; }

 private:
  struct Line {
    uint32_t page;
    uint32_t begin, size;  // bytes; the line break is included
    int32_t num_tokens;
    int64_t first_token;
  };
  const Tokenizer& tokenizer_;
  std::vector<std::string> texts_;
  std::vector<Line> lines_;
  std::vector<int32_t> tokens_;
  int64_t num_tokens_ = 0;
};

// Names and words that facts are drawn from: the first ones of words.h. Fewer are learnt sooner.
struct FactWords {
  int num_names = static_cast<int>(kFirstNames.size());
  int num_words = static_cast<int>(kFactWords.size());
};

struct FactOptions {
  int64_t num_tokens = 256;   // of the whole document, about; 0: facts alone, in any order
  int min_facts = 4, max_facts = 7;
  int min_questions = 3, max_questions = 5;
  double asked_share = 0;     // if above 0: this share of the facts is asked instead
  Draw draw = Draw::kTrain;   // kHeldOut: the pair asked is held out, the others are not
  double depth = -1;          // 0 to 1: place of the fact asked about first; else anywhere
  double bare_share = 0;      // with this probability no filler, and 3-8 facts with up to 5 questions
  FactWords words;
};

struct RepeatOptions {
  int min_facts = 4, max_facts = 9;
  FactWords words;
};

// Pure functions of (seed, index, options) and the pool.
data::Document fact_document(uint64_t seed, uint64_t index, const FactOptions& options, const TextPool& pool);
data::Document repeat_document(uint64_t seed, uint64_t index, const RepeatOptions& options = {});
data::Document chat_document(uint64_t seed, uint64_t index, Draw draw);

// Rows of `count` ids of plain text, the first one replaced by the conversation start; every id a target of
// weight 1 but that one.
class TextRows : public data::SampleSource {
 public:
  TextRows(std::shared_ptr<const TextPool> pool, int64_t count, uint64_t seed);
  std::string name() const override { return "text"; }
  data::Sample sample(int64_t position) const override;

 private:
  std::shared_ptr<const TextPool> pool_;
  int64_t count_;
  uint64_t seed_;
  int32_t start_;
};

}  // namespace m3::synthetic
