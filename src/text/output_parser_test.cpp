// Streaming of the output parser. The whole table of shapes is tests/golden/chat/parse.json.
#include "text/output_parser.h"

#include <gtest/gtest.h>

#include "base/file.h"
#include "text/chat.h"

namespace m3 {
namespace {

using Kind = OutputEvent::Kind;

// In these tests "@" stands for the namespace marker and "$" for the end of the turn.
struct Parsed {
  std::vector<OutputEvent> events;
  ParsedOutput result;

  std::string arguments(int call) const {
    std::string text;
    for (const OutputEvent& event : events) {
      if (event.kind == Kind::kCallArguments && event.call == call) text += event.text;
    }
    return text;
  }
};

std::vector<Tool> tools_of(const std::string& properties) {
  const std::string json =
      R"([{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":)" +
      properties + "}}}]";
  return read_tools(JsonValue::parse(json, "tools"));
}

void push(OutputParser& parser, std::string_view text, std::vector<OutputEvent>& events) {
  while (!text.empty()) {
    const size_t next = std::min(text.find_first_of("@$"), text.size());
    parser.push_text(text.substr(0, next), events);
    if (next < text.size()) {
      parser.push_marker(text[next] == '@' ? OutputMarker::kNamespace : OutputMarker::kTurnEnd,
                         events);
    }
    text.remove_prefix(std::min(next + 1, text.size()));
  }
}

Parsed run(const std::vector<Tool>& tools, std::string_view output,
           std::string_view prompt_tail = "</mm:think>") {
  Parsed out;
  OutputParser parser(tools, prompt_tail);
  push(parser, output, out.events);
  parser.finish(out.events);
  out.result = parser.result();
  return out;
}

TEST(OutputParser, api_01_the_name_comes_first_and_arguments_grow_with_the_value) {
  OutputParser parser(tools_of(R"({"path":{"type":"string"},"text":{"type":"string"}})"),
                      "</mm:think>");
  std::vector<OutputEvent> events;
  const auto next = [&](std::string_view text) {
    events.clear();
    push(parser, text, events);
    return events;
  };
  EXPECT_TRUE(next("@<tool_call>\n@<invoke name=\"f").empty());
  EXPECT_EQ(next("\">"), (std::vector<OutputEvent>{{Kind::kCallBegin, 0, "f"}}));
  EXPECT_TRUE(next("@<path>").empty());
  EXPECT_EQ(next("a"), (std::vector<OutputEvent>{{Kind::kCallArguments, 0, R"({"path":"a)"}}));
  EXPECT_EQ(next(".txt"), (std::vector<OutputEvent>{{Kind::kCallArguments, 0, ".txt"}}));
  EXPECT_EQ(next("@</path>@<text>\"1\"\n"),
            (std::vector<OutputEvent>{{Kind::kCallArguments, 0, R"(","text":"\"1\"\n)"}}));
  EXPECT_EQ(
      next("2@</text>@</invoke>"),
      (std::vector<OutputEvent>{{Kind::kCallArguments, 0, R"(2"})"}, {Kind::kCallEnd, 0, ""}}));
}

TEST(OutputParser, api_02_a_missing_opening_tag_does_not_disable_later_calls) {
  const Parsed out = run(tools_of(R"({"path":{"type":"string"}})"),
                         "@<tool_call>\n@<invoke name=\"f\">@a.txt@</path>@</invoke>\n@<invoke "
                         "name=\"f\">@<path>b@</path>@</invoke>\n@</tool_call>$");
  EXPECT_EQ(out.arguments(0), R"({"path":"a.txt"})");
  EXPECT_EQ(out.arguments(1), R"({"path":"b"})");
}

TEST(OutputParser, api_06_damage_is_reported_and_never_shows_markers) {
  const Parsed out = run({}, "Hello@ world @<b>@<x>$");
  EXPECT_EQ(out.result.content, "Hello world <b><x>");
  EXPECT_FALSE(out.result.parse_error.empty());
  EXPECT_TRUE(run({}, "Hello$").result.parse_error.empty());
  const Parsed outside = run({}, "@<tool_call>@<path>x@</path>@</tool_call>ok$");
  EXPECT_EQ(outside.result.content, "ok");
  EXPECT_NE(outside.result.parse_error.find("path"), std::string::npos);
}

TEST(OutputParser, api_10_a_cut_call_closes_its_json) {
  const auto tools = tools_of(R"({"path":{"type":"string"},"n":{"type":"integer"}})");
  const Parsed in_string = run(tools, "@<invoke name=\"f\">@<path>a\\");
  EXPECT_EQ(in_string.arguments(0), R"({"path":"a\\"})");
  EXPECT_EQ(in_string.events.back().kind, Kind::kCallEnd);
  EXPECT_FALSE(in_string.result.complete);
  EXPECT_EQ(run(tools, "@<invoke name=\"f\">@<n>12").arguments(0), "{}");
}

TEST(OutputParser, api_13_one_call_is_one_entry_with_a_stable_index) {
  const Parsed out =
      run(tools_of(R"({"a":{"type":"string"}})"),
          "x@<invoke name=\"f\">@<a>1@</a>@</invoke>@<invoke name=\"g\">@</invoke>$");
  std::vector<std::pair<Kind, int>> marks;
  for (const OutputEvent& event : out.events) marks.emplace_back(event.kind, event.call);
  EXPECT_EQ(marks, (std::vector<std::pair<Kind, int>>{{Kind::kContent, -1},
                                                      {Kind::kCallBegin, 0},
                                                      {Kind::kCallArguments, 0},
                                                      {Kind::kCallEnd, 0},
                                                      {Kind::kCallBegin, 1},
                                                      {Kind::kCallArguments, 1},
                                                      {Kind::kCallEnd, 1}}));
}

TEST(OutputParser, api_14_an_empty_call_streams_an_empty_object) {
  EXPECT_EQ(run({}, "@<invoke name=\"f\">@</invoke>$").arguments(0), "{}");
}

TEST(OutputParser, api_15_text_behind_the_block_is_content_at_once) {
  OutputParser parser({}, "</mm:think>");
  std::vector<OutputEvent> events;
  push(parser, "@<tool_call>@<invoke name=\"f\">@</invoke>@</tool_call>", events);
  events.clear();
  push(parser, "Done", events);
  EXPECT_EQ(events, (std::vector<OutputEvent>{{Kind::kContent, -1, "Done"}}));
}

TEST(OutputParser, nullable_strings_wait_until_they_cannot_be_null) {
  OutputParser parser(tools_of(R"({"a":{"type":["string","null"]}})"), "</mm:think>");
  std::vector<OutputEvent> events;
  push(parser, "@<invoke name=\"f\">@<a>nul", events);
  EXPECT_EQ(events.size(), 1u);
  push(parser, "l and void", events);
  EXPECT_EQ(events.back().text, R"({"a":"null and void)");
  EXPECT_EQ(run(tools_of(R"({"a":{"type":["string","null"]}})"),
                "@<invoke name=\"f\">@<a> null\n@</a>@</invoke>$")
                .arguments(0),
            R"({"a":null})");
}

TEST(OutputParser, a_late_repetition_is_written_as_a_second_key_with_the_whole_value) {
  const Parsed out =
      run(tools_of(R"({"tags":{"type":"array","items":{"type":"string"}},"n":{"type":"integer"}})"),
          "@<invoke name=\"f\">@<tags>a@</tags>@<n>1@</n>@<tags>b@</tags>@</invoke>$");
  EXPECT_EQ(out.arguments(0), R"({"tags":["a"],"n":1,"tags":["a","b"]})");
  EXPECT_EQ(out.result.tool_calls[0].arguments.dump(), R"({"tags":["a","b"],"n":1})");
}

TEST(OutputParser, hostile_nesting_is_bounded) {
  std::string deep = "@<invoke name=\"f\">";
  for (int i = 0; i < 20000; ++i) deep += "@<a>";
  const Parsed out = run({}, deep + "x");
  EXPECT_EQ(out.result.tool_calls.size(), 1u);
  std::string wide =
      "@<invoke name=\"" + std::string(100000, 'n');  // a name that never ends is text
  EXPECT_EQ(run({}, wide + "$").result.content->size(), wide.size() - 1);
}

TEST(OutputParser, circular_schemas_end) {
  const auto tools = read_tools(JsonValue::parse(
      R"##([{"function":{"name":"f","parameters":{"properties":{"a":{"$ref":"#/x"},"b":{"anyOf":[{"$ref":"#/properties/b"},{"$ref":"#/properties/b"}]}},
        "x":{"$ref":"#/x"}}}}])##",
      "tools"));
  EXPECT_EQ(run(tools, "@<invoke name=\"f\">@<a>1@</a>@<b>2@</b>@</invoke>$").arguments(0),
            R"({"a":1,"b":2})");
}

// The golden cases again, through token ids: markers by id, literal spellings as ordinary tokens.
TEST(TokenOutputParser, goldens_give_the_same_through_token_ids) {
  if (!Tokenizer::can_encode()) GTEST_SKIP() << "built without PCRE2";
  const std::string folder = std::string(M3_SOURCE_DIR) + "/tests/golden/";
  const Tokenizer tokenizer = Tokenizer::load(folder + "tokenizer/tiny");
  const JsonValue cases = JsonValue::parse(read_file(folder + "chat/parse.json"), "parse.json");
  for (const JsonValue& entry : cases.items()) {
    const std::string& output = entry.find("output")->text();
    std::vector<int32_t> ids;
    const auto append = [&](std::string_view text, bool added) {
      const auto more = tokenizer.encode(text, {.added_tokens = added});
      ids.insert(ids.end(), more.begin(), more.end());
    };
    size_t done = 0;
    for (const JsonValue& range : entry.find("literal")->items()) {
      const auto begin = static_cast<size_t>(range.items()[0].as_double());
      const auto end = static_cast<size_t>(range.items()[1].as_double());
      append(std::string_view(output).substr(done, begin - done), true);
      append(std::string_view(output).substr(begin, end - begin), false);
      done = end;
    }
    append(std::string_view(output).substr(done), true);
    TokenOutputParser parser(tokenizer, read_tools(*entry.find("tools")),
                             entry.find("prompt_tail")->text());
    std::vector<OutputEvent> events;
    for (int32_t id : ids) parser.push(id, events);
    parser.finish(events);
    const JsonValue& want = *entry.find("expected");
    const std::string& name = entry.find("name")->text();
    const auto text_of = [](const JsonValue& value) {
      return value.is_null() ? std::optional<std::string>() : value.text();
    };
    EXPECT_EQ(parser.result().reasoning, text_of(*want.find("reasoning"))) << name;
    EXPECT_EQ(parser.result().content, text_of(*want.find("content"))) << name;
    EXPECT_EQ(parser.result().complete, want.find("complete")->as_bool()) << name;
    const auto& calls = want.find("tool_calls")->items();
    ASSERT_EQ(parser.result().tool_calls.size(), calls.size()) << name;
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(parser.result().tool_calls[i].name, calls[i].find("name")->text()) << name;
      EXPECT_EQ(parser.result().tool_calls[i].arguments.dump(), calls[i].find("arguments")->dump())
          << name;
    }
  }
}

}  // namespace
}  // namespace m3
