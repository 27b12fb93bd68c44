#include "text/pretokenizer.h"

#include <algorithm>
#include <optional>

#include "base/check.h"
#include "text/utf8.h"

#ifdef M3_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif

namespace m3 {

namespace {

// The pattern of GPT-2, which a ByteLevel step with use_regex stands for.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

}  // namespace

#ifdef M3_HAVE_PCRE2

// A compiled pattern; matching is thread-safe.
class Regex {
 public:
  Regex(const std::string& pattern, const std::string& name) : pattern_(pattern) {
    // Files are written for Oniguruma's Ruby syntax: ^ and $ match at every line.
    constexpr uint32_t kOptions = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C;
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                              kOptions, &error, &offset, nullptr));
    M3_CHECK(code_ != nullptr, "{}: the pattern '{}' does not compile: {} (at byte {})", name,
             pattern, message(error), offset);
    has_jit_ = pcre2_jit_compile(code_.get(), PCRE2_JIT_COMPLETE) == 0;
    context_.reset(pcre2_match_context_create(nullptr));
    M3_CHECK(context_ != nullptr, "out of memory");
    pcre2_set_match_limit(context_.get(), kMatchLimit);
    pcre2_set_heap_limit(context_.get(), kHeapLimitKib);
  }

  struct Range {
    size_t begin, end;
  };

  // Matches one text from left to right; the text must be valid UTF-8.
  class Matcher {
   public:
    Matcher(const Regex& regex, std::string_view text)
        : regex_(regex), text_(text), data_(pcre2_match_data_create(1, nullptr)) {
      M3_CHECK(data_ != nullptr, "out of memory");
      replace_mongolian_separator();
    }

    // Next match that does not begin before the last one's end and is not empty there.
    std::optional<Range> next() {
      while (from_ <= text_.size()) {
        const std::optional<Range> range = match();
        if (!range) return std::nullopt;
        if (range->begin == range->end && range->end == last_end_) {
          from_ = next_character(range->end);
          continue;
        }
        from_ = range->end;
        last_end_ = range->end;
        return range;
      }
      return std::nullopt;
    }

   private:
    // PCRE2's \s takes U+180E, which has not been White_Space since Unicode 6.3. Another format
    // character of the same length (U+2060) takes its place in the subject; the pieces are cut from
    // the original.
    void replace_mongolian_separator() {
      constexpr std::string_view kSeparator = "\xE1\xA0\x8E", kWordJoiner = "\xE2\x81\xA0";
      size_t at = text_.find(kSeparator);
      if (at == text_.npos) return;
      copy_ = text_;
      for (; at != copy_.npos; at = copy_.find(kSeparator, at))
        copy_.replace(at, kSeparator.size(), kWordJoiner);
      text_ = copy_;
    }

    size_t next_character(size_t at) const {
      ++at;
      while (at < text_.size() && (static_cast<unsigned char>(text_[at]) & 0xC0) == 0x80) ++at;
      return at;
    }

    std::optional<Range> match() {
      const auto subject = reinterpret_cast<PCRE2_SPTR>(text_.data());
      const pcre2_code* code = regex_.code_.get();
      int result = PCRE2_ERROR_JIT_STACKLIMIT;
      // The text was validated once; checking it again in every call would take quadratic time.
      if (regex_.has_jit_) {
        result = pcre2_jit_match(code, subject, text_.size(), from_, PCRE2_NO_UTF_CHECK,
                                 data_.get(), regex_.context_.get());
      }
      if (result == PCRE2_ERROR_JIT_STACKLIMIT) {
        result = pcre2_match(code, subject, text_.size(), from_, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                             data_.get(), regex_.context_.get());
      }
      if (result == PCRE2_ERROR_NOMATCH) return std::nullopt;
      M3_CHECK(result >= 0, "the split pattern '{}' gave up at byte {} of a text of {} bytes: {}",
               regex_.pattern_, from_, text_.size(), message(result));
      const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
      return Range{std::max(ends[0], from_),
                   std::max(ends[1], from_)};  // \K may move them backwards
    }

    const Regex& regex_;
    std::string_view text_;
    std::string copy_;
    size_t from_ = 0, last_end_ = std::string_view::npos;
    std::unique_ptr<pcre2_match_data,
                    decltype([](pcre2_match_data* p) { pcre2_match_data_free(p); })>
        data_;
  };

 private:
  // Far above what any sane pattern needs at one place, low enough that a hostile one ends in a
  // moment.
  static constexpr uint32_t kMatchLimit = 10'000'000, kHeapLimitKib = 256 * 1024;

  static std::string message(int error) {
    unsigned char text[256] = {};
    pcre2_get_error_message(error, text, sizeof text);
    return reinterpret_cast<const char*>(text);
  }

  std::string pattern_;
  std::unique_ptr<pcre2_code, decltype([](pcre2_code* p) { pcre2_code_free(p); })> code_;
  std::unique_ptr<pcre2_match_context,
                  decltype([](pcre2_match_context* p) { pcre2_match_context_free(p); })>
      context_;
  bool has_jit_ = false;
};

bool has_regex_library() {
  return true;
}

#else

bool has_regex_library() {
  return false;
}

namespace {

[[noreturn]] void fail_without_pcre2() {
  M3_FAIL("encoding text needs PCRE2: install libpcre2-dev and configure with M3_PCRE2=ON");
}

}  // namespace

class Regex {
 public:
  Regex(const std::string&, const std::string&) {}
  struct Range {
    size_t begin, end;
  };
  struct Matcher {
    Matcher(const Regex&, std::string_view) { fail_without_pcre2(); }
    std::optional<Range> next() { return std::nullopt; }
  };
};

#endif

// What Unicode regular expressions (UTS 18) call \w; PCRE2's own \w is narrower.
bool starts_with_word_character(std::string_view text) {
  static const Regex word(R"(\A[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])",
                          "word characters");
  return Regex::Matcher(word, text.empty() ? text : text.substr(0, utf8_step(text).length))
      .next()
      .has_value();
}

bool ends_with_word_character(std::string_view text) {
  size_t last = text.empty() ? 0 : text.size() - 1;
  while (last > 0 && (static_cast<unsigned char>(text[last]) & 0xC0) == 0x80) --last;
  return starts_with_word_character(text.substr(last));
}

// --- reading the steps

namespace {

// Patterns are written for Oniguruma's Ruby syntax. Refuses what means something else in PCRE2.
void check_same_meaning(const std::string& pattern, const std::string& name) {
  const auto refuse = [&](const char* what) {
    M3_FAIL("{}: the pattern '{}' uses {}, which PCRE2 reads in another way", name, pattern, what);
  };
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const std::string_view rest = std::string_view(pattern).substr(i);
    if (rest[0] == '\\') {
      if (rest.size() > 1 && std::string_view("hHQEKRXGC").find(rest[1]) != rest.npos)
        refuse("\\h, \\R or the like");
      const bool has_braces =
          rest.size() > 2 && std::string_view("pPx").find(rest[1]) != rest.npos && rest[2] == '{';
      i += has_braces ? std::min(rest.find('}'), rest.size()) : 1;
    } else if (in_class) {
      if (rest.starts_with("&&")) refuse("an intersection of classes");
      if (rest.starts_with("[")) refuse("a class inside a class");
      if (rest[0] == ']') in_class = false;
    } else if (rest[0] == '[') {
      in_class = true;
      if (rest.starts_with("[^")) ++i;
      if (pattern.substr(i + 1, 1) == "]") ++i;  // a bracket in the first place is a character
    } else if (rest.starts_with("}+")) {
      refuse("{n,m}+");
    } else if (rest.starts_with("(?")) {
      const size_t end = rest.find_first_not_of("abcdefghijklmnopqrstuvwxyz-", 2);
      if (rest.substr(2, end - 2).find_first_not_of("i-") != rest.npos)
        refuse("an option other than (?i)");
    }
  }
}

const JsonValue* find_typed(const JsonValue& spec, std::string_view key, JsonValue::Kind kind,
                            const std::string& name) {
  const JsonValue* value = spec.find(key);
  if (value == nullptr || value->is_null()) return nullptr;
  M3_CHECK(value->kind() == kind, "{}: {} is of type {}", name, key, value->kind_name());
  return value;
}

bool find_bool(const JsonValue& spec, std::string_view key, bool absent, const std::string& name) {
  const JsonValue* value = find_typed(spec, key, JsonValue::Kind::kBool, name);
  return value != nullptr ? value->as_bool() : absent;
}

}  // namespace

Pretokenizer::Pretokenizer(const JsonValue& spec, const std::string& name) {
  add_steps(spec, name);
  M3_CHECK(has_byte_level_, "{}: no ByteLevel step, so text would reach the model unmapped", name);
}

Pretokenizer::~Pretokenizer() = default;

void Pretokenizer::add_steps(const JsonValue& spec, const std::string& name) {
  M3_CHECK(spec.is_object(),
           "{} is of type {}, want a ByteLevel step or a Sequence that ends with one", name,
           spec.kind_name());
  const JsonValue* type = find_typed(spec, "type", JsonValue::Kind::kString, name);
  M3_CHECK(type != nullptr, "{} has no type", name);
  const std::string step_name = fmt::format("{} step {} ({})", name, steps_.size(), type->text());
  M3_CHECK(!has_byte_level_, "{}: a step behind ByteLevel would see mapped bytes", step_name);
  constexpr size_t kMaxSteps = 64;
  M3_CHECK(steps_.size() < kMaxSteps, "{}: more than {} steps", name, kMaxSteps);
  if (type->text() == "Sequence") {
    const JsonValue* list = find_typed(spec, "pretokenizers", JsonValue::Kind::kArray, step_name);
    M3_CHECK(list != nullptr, "{}: no list 'pretokenizers'", step_name);
    for (const JsonValue& step : list->items()) add_steps(step, name);
  } else if (type->text() == "Split") {
    add_split(spec, step_name);
  } else if (type->text() == "Digits") {
    const bool individual = find_bool(spec, "individual_digits", false, step_name);
    add_pattern("\\p{N}", individual ? Behavior::kIsolated : Behavior::kContiguous, step_name);
  } else if (type->text() == "ByteLevel") {
    if (find_bool(spec, "add_prefix_space", true, step_name)) {
      steps_.emplace_back();
      steps_.back().add_prefix_space = true;
    }
    if (find_bool(spec, "use_regex", true, step_name))
      add_pattern(kGpt2Pattern, Behavior::kIsolated, step_name);
    has_byte_level_ = true;
  } else {
    M3_FAIL("{}: this kind of step is not supported (Split, Digits, ByteLevel and Sequence are)",
            step_name);
  }
}

void Pretokenizer::add_pattern(const std::string& pattern, Behavior behavior,
                               const std::string& name) {
  steps_.emplace_back();
  steps_.back().behavior = behavior;
  steps_.back().regex = std::make_shared<const Regex>(pattern, name);
}

void Pretokenizer::add_split(const JsonValue& spec, const std::string& name) {
  const JsonValue* behavior = find_typed(spec, "behavior", JsonValue::Kind::kString, name);
  M3_CHECK(behavior != nullptr, "{}: no behavior", name);
  constexpr const char* kNames[] = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious",
                                    "MergedWithNext"};
  const auto at = std::find(std::begin(kNames), std::end(kNames), behavior->text());
  M3_CHECK(at != std::end(kNames),
           "{}: behavior '{}' is not known (Isolated, Removed, Contiguous, MergedWithPrevious, "
           "MergedWithNext)",
           name, behavior->text());

  const JsonValue* pattern = find_typed(spec, "pattern", JsonValue::Kind::kObject, name);
  M3_CHECK(pattern != nullptr, "{}: no pattern", name);
  const JsonValue* regex = find_typed(*pattern, "Regex", JsonValue::Kind::kString, name);
  const JsonValue* literal = find_typed(*pattern, "String", JsonValue::Kind::kString, name);
  M3_CHECK((regex != nullptr) != (literal != nullptr),
           "{}: the pattern must hold either Regex or String", name);
  if (regex != nullptr) {
    check_same_meaning(regex->text(), name);
    add_pattern(regex->text(), Behavior::kIsolated, name);
  } else {
    steps_.emplace_back();
    steps_.back().literal = literal->text();
  }
  steps_.back().behavior = static_cast<Behavior>(at - std::begin(kNames));
  steps_.back().invert = find_bool(spec, "invert", false, name);
}

// --- cutting

// Matches and what lies between them, in order, so that they cover the text.
template <typename OnSpan>
void Pretokenizer::split(const Step& step, std::string_view text, OnSpan on_span) const {
  size_t done = 0;
  const auto on_match = [&](size_t begin, size_t end) {
    if (done < begin) on_span({done, begin, step.invert});
    on_span({begin, end, !step.invert});
    done = end;
  };
  if (step.regex != nullptr) {
    Regex::Matcher matcher(*step.regex, text);
    while (const auto range = matcher.next()) on_match(range->begin, range->end);
  } else if (!step.literal.empty()) {
    for (size_t at; (at = text.find(step.literal, done)) != text.npos;)
      on_match(at, at + step.literal.size());
  }
  if (done < text.size()) on_span({done, text.size(), step.invert});
}

void Pretokenizer::cut(std::string_view text, const Sink& sink) const {
  run(0, text, sink);
}

void Pretokenizer::run(size_t idx_step, std::string_view text, const Sink& sink) const {
  if (text.empty()) return;
  if (idx_step == steps_.size()) return sink(text);
  const Step& step = steps_[idx_step];
  if (step.add_prefix_space) {
    std::string prefixed;
    if (!text.starts_with(' ')) {
      prefixed.reserve(text.size() + 1);
      prefixed += ' ';
      prefixed += text;
      text = prefixed;
    }
    return run(idx_step + 1, text, sink);
  }
  const auto pass_on = [&](size_t begin, size_t end) {
    run(idx_step + 1, text.substr(begin, end - begin), sink);
  };
  if (step.behavior == Behavior::kIsolated || step.behavior == Behavior::kRemoved) {
    split(step, text, [&](Span span) {
      if (step.behavior == Behavior::kIsolated || !span.is_match) pass_on(span.begin, span.end);
    });
    return;
  }
  // The other behaviours join a span to its neighbour: the one before it, or for MergedWithNext the
  // one behind it, which is the same rule read from right to left.
  std::vector<Span> spans, joined;
  split(step, text, [&](Span span) { spans.push_back(span); });
  const bool from_right = step.behavior == Behavior::kMergedWithNext;
  if (from_right) std::reverse(spans.begin(), spans.end());
  bool previous_match = false;
  for (const Span& span : spans) {
    const bool join = step.behavior == Behavior::kContiguous ? span.is_match == previous_match
                                                             : span.is_match && !previous_match;
    if (!join || joined.empty()) {
      joined.push_back(span);
    } else if (from_right) {
      joined.back().begin = span.begin;
    } else {
      joined.back().end = span.end;
    }
    previous_match = span.is_match;
  }
  if (from_right) std::reverse(joined.begin(), joined.end());
  for (const Span& span : joined) pass_on(span.begin, span.end);
}

}  // namespace m3
