// Throughput of the tokenizer on this repository's own specifications (tiny vocabulary). A larger
// vocabulary is measured with M3_BENCH_TOKENIZER=path/to/tokenizer.json.
#include <benchmark/benchmark.h>

#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "text/grammar.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"

namespace m3 {
namespace {

std::string repository(const std::string& path) {
  return (std::filesystem::path(__FILE__).parent_path() / "../.." / path).string();
}

const Tokenizer& tokenizer() {
  static const Tokenizer loaded = [] {
    const char* path = std::getenv("M3_BENCH_TOKENIZER");
    return Tokenizer::load(path != nullptr ? path : repository("tests/golden/tokenizer/tiny"));
  }();
  return loaded;
}

const std::string& text() {
  static const std::string joined = [] {
    std::string all;
    for (const auto& entry : std::filesystem::directory_iterator(repository("docs/spec")))
      all += read_file(entry.path());
    return all;
  }();
  return joined;
}

void set_bytes(benchmark::State& state, size_t bytes) {
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes));
}

void BM_encode(benchmark::State& state) {
  tokenizer();
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer().encode(text()));
  set_bytes(state, text().size());
}
BENCHMARK(BM_encode)->Unit(benchmark::kMillisecond);

void BM_encode_one_long_word(benchmark::State& state) {
  const std::string word(static_cast<size_t>(state.range(0)), 'a');
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer().encode(word));
  set_bytes(state, word.size());
}
BENCHMARK(BM_encode_one_long_word)->Arg(1 << 10)->Arg(1 << 20)->Unit(benchmark::kMillisecond);

void BM_decode(benchmark::State& state) {
  const auto ids = tokenizer().encode(text());
  for (auto _ : state) benchmark::DoNotOptimize(tokenizer().decode(ids));
  set_bytes(state, text().size());
}
BENCHMARK(BM_decode)->Unit(benchmark::kMillisecond);

// A file written by a tool call, as it comes: one token at a time.
void BM_parse_output(benchmark::State& state) {
  const auto tools = read_tools(JsonValue::parse(
      R"([{"function":{"name":"write","parameters":{"properties":{"text":{"type":"string"}}}}}])",
      "tools"));
  for (auto _ : state) {
    OutputParser parser(tools, "");
    std::vector<OutputEvent> events;
    parser.push_marker(OutputMarker::kNamespace, events);
    parser.push_text("<invoke name=\"write\">", events);
    parser.push_marker(OutputMarker::kNamespace, events);
    parser.push_text("<text>", events);
    for (size_t at = 0; at < text().size(); at += 4) {
      parser.push_text(std::string_view(text()).substr(at, 4), events);
      events.clear();
    }
    parser.finish(events);
    benchmark::DoNotOptimize(parser.result().tool_calls.size());
  }
  set_bytes(state, text().size());
}
BENCHMARK(BM_parse_output)->Unit(benchmark::kMillisecond);

std::shared_ptr<const TokenTrie> trie() {
  static const auto shared = std::make_shared<const TokenTrie>(tokenizer());
  return shared;
}

const JsonValue& person_schema() {
  static const JsonValue schema = JsonValue::parse(
      R"({"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer","minimum":0,"maximum":150},
          "tags":{"type":"array","items":{"type":"string"}},"kind":{"enum":["a","b","c"]},"note":{"type":"string","maxLength":200}},
          "required":["name","age","tags","kind"]})",
      "schema");
  return schema;
}

void BM_grammar_compile(benchmark::State& state) {
  trie();
  for (auto _ : state) benchmark::DoNotOptimize(Grammar::json_schema(trie(), person_schema()));
}
BENCHMARK(BM_grammar_compile)->Unit(benchmark::kMillisecond);

// Accepting an answer token by token with a mask before each step: the first answer of a grammar,
// and a later one, for which the masks of its states are known.
void follow(const std::shared_ptr<const Grammar>& grammar, const std::vector<int32_t>& ids,
            benchmark::State& state) {
  GrammarState position(grammar);
  for (int32_t id : ids) {
    benchmark::DoNotOptimize(&position.mask());
    if (!position.accept(id)) state.SkipWithError("the answer is not allowed");
  }
}

void BM_grammar_masks(benchmark::State& state) {
  const bool first = state.range(0) == 1;
  const auto ids = tokenizer().encode(
      R"({"name": "Ada Lovelace, Countess", "age": 36, "tags": ["mathematics", "computing machines"], "kind": "b", "note": "The Analytical Engine weaves algebraical patterns."})");
  const auto grammar = Grammar::json_schema(trie(), person_schema());
  if (!first) follow(grammar, ids, state);
  for (auto _ : state) {
    if (first) {
      follow(Grammar::json_schema(trie(), person_schema()), ids, state);
    } else {
      follow(grammar, ids, state);
    }
  }
  state.SetItemsProcessed(state.iterations() * static_cast<int64_t>(ids.size()));  // tokens
}
BENCHMARK(BM_grammar_masks)->ArgName("first")->Arg(1)->Arg(0)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace m3
