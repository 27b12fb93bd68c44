// Cuts text into the pieces that BPE merges one by one: the `pre_tokenizer` of tokenizer.json
// (Split, Digits, ByteLevel, and Sequences of them). Regular expressions run in PCRE2, which only
// pretokenizer.cpp knows; a build without it parses the steps and refuses to cut.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_value.h"

namespace m3 {

class Regex;

class Pretokenizer {
 public:
  using Sink = std::function<void(std::string_view piece)>;

  // `spec`: the value of "pre_tokenizer". Throws Error that starts with `name` and names the step.
  Pretokenizer(const JsonValue& spec, const std::string& name);
  ~Pretokenizer();

  // Calls `sink` for each piece in order. `text` must be valid UTF-8; a piece is a view into it, or
  // into a buffer that lives until `sink` returns (add_prefix_space). Thread-safe.
  void cut(std::string_view text, const Sink& sink) const;

 private:
  enum class Behavior { kIsolated, kRemoved, kContiguous, kMergedWithPrevious, kMergedWithNext };
  struct Step {
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    bool add_prefix_space = false;
    std::shared_ptr<const Regex> regex;  // null pointer: nothing to match
    std::string literal;                 // a String pattern
  };
  struct Span {
    size_t begin, end;
    bool is_match;
  };

  void add_steps(const JsonValue& spec, const std::string& name);
  void add_split(const JsonValue& spec, const std::string& name);
  void add_pattern(const std::string& pattern, Behavior behavior, const std::string& name);
  void run(size_t idx_step, std::string_view text, const Sink& sink) const;
  template <typename OnSpan>
  void split(const Step& step, std::string_view text, OnSpan on_span) const;

  std::vector<Step> steps_;
  bool has_byte_level_ = false;
};

// Whether this build has PCRE2.
bool has_regex_library();

// Word characters as Unicode regular expressions have them (\w). Throw Error without PCRE2.
bool starts_with_word_character(std::string_view text);
bool ends_with_word_character(std::string_view text);

}  // namespace m3
