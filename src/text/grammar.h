// Structured output: which tokens may come next (docs/structured-output.md). A Grammar is compiled
// once and shared; a GrammarState follows one answer and gives the mask of allowed tokens before
// each step.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text/output_grammars.h"
#include "text/token_trie.h"

namespace m3 {

// One bit per token id, bit id % 64 of word id / 64.
class TokenMask {
 public:
  explicit TokenMask(int32_t num_tokens = 0)
      : words_((static_cast<size_t>(num_tokens) + 63) / 64) {}
  void set(int32_t id) { words_[static_cast<size_t>(id) / 64] |= uint64_t{1} << (id % 64); }
  bool test(int32_t id) const {
    return (words_[static_cast<size_t>(id) / 64] >> (id % 64) & 1) != 0;
  }
  std::span<uint64_t> words() { return words_; }
  std::span<const uint64_t> words() const { return words_; }
  int64_t count() const;

 private:
  std::vector<uint64_t> words_;
};

// Immutable and thread-safe: what is computed once for a state is kept for all answers.
class Grammar {
 public:
  // `trie` is shared by all grammars of a tokenizer. Throw Error for what cannot be held, beginning
  // with the JSON pointer of the schema's part.
  static std::shared_ptr<const Grammar> json_schema(std::shared_ptr<const TokenTrie> trie,
                                                    const JsonValue& schema);
  static std::shared_ptr<const Grammar> json_object(std::shared_ptr<const TokenTrie> trie);
  static std::shared_ptr<const Grammar> regex(std::shared_ptr<const TokenTrie> trie,
                                              std::string_view pattern);
  static std::shared_ptr<const Grammar> choice(std::shared_ptr<const TokenTrie> trie,
                                               std::span<const std::string> texts);
  static std::shared_ptr<const Grammar> tool_calls(std::shared_ptr<const TokenTrie> trie,
                                                   std::span<const Tool> tools,
                                                   const ToolCallRules& rules);
  ~Grammar();

  Grammar(std::shared_ptr<const TokenTrie> trie, GrammarMachine machine);
  size_t num_states() const;

 private:
  friend class GrammarState;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Follows one answer; one thread at a time. Copies are independent (speculative decoding).
class GrammarState {
 public:
  explicit GrammarState(std::shared_ptr<const Grammar> grammar);
  ~GrammarState();
  GrammarState(const GrammarState& other);
  GrammarState& operator=(const GrammarState& other);
  GrammarState(GrammarState&&) noexcept;
  GrammarState& operator=(GrammarState&&) noexcept;

  // Moves over a token. false: it is not allowed here, and nothing has changed.
  bool accept(int32_t id);
  // Moves over text that did not come from a token of its own (a forced beginning).
  bool accept_text(std::string_view text);

  // Tokens that may come next. Valid until the next call of a function that is not const. The end
  // of the turn is not part of it: it is allowed when can_end().
  const TokenMask& mask();
  bool can_end() const;   // the text is complete as it is
  bool must_end() const;  // nothing can follow

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace m3
