// Any schema: refused with an Error, or a grammar whose masks always leave a way, whose answers are
// JSON, and which allows exactly the tokens of its masks. Input: SCHEMA NUL CHOICES.
#include <cstdlib>
#include <filesystem>

#include "base/check.h"
#include "text/grammar.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

std::shared_ptr<const m3::TokenTrie> trie() {
  static const auto shared = std::make_shared<const m3::TokenTrie>(m3::Tokenizer::load(
      std::filesystem::path(__FILE__).parent_path() / "../../tests/golden/tokenizer/tiny"));
  return shared;
}

std::shared_ptr<const m3::Grammar> compile(std::string_view text) {
  try {
    const auto schema = m3::JsonValue::parse(text, "schema");
    return m3::Grammar::json_schema(trie(), schema);
  } catch (const m3::Error&) {
    return nullptr;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = std::min(input.find('\0'), input.size());
  const auto grammar = compile(input.substr(0, end));
  if (grammar == nullptr) return 0;
  m3::GrammarState state(grammar);
  std::string answer;
  for (size_t i = end + 1; i < size && !state.must_end(); ++i) {
    const m3::TokenMask& mask = state.mask();
    int64_t skip = data[i];
    int32_t choice = -1;
    for (int32_t id = 0; id < trie()->num_tokens(); ++id) {
      if (!mask.test(id)) continue;
      choice = id;
      if (skip-- == 0) break;
    }
    require(choice >= 0 || state.can_end());
    const int32_t other = data[i] * 4 % trie()->num_tokens();
    const bool allowed = mask.test(other);
    require(m3::GrammarState(state).accept(other) == allowed);
    if (choice < 0) break;
    require(state.accept(choice));
    answer += trie()->bytes(choice);
  }
  if (state.can_end()) require(m3::JsonValue::try_parse(answer).has_value());
  return 0;
}
