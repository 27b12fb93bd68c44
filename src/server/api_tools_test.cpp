// Tool calls and structured output over HTTP: every case of the chat goldens, calls cut at every
// byte, grammars in every thinking mode and family.
#include <gtest/gtest.h>

#include "base/file.h"
#include "server/answer_reader.h"
#include "server/chat_api.h"
#include "server/test_server.h"

namespace m3 {
namespace {

TestServer& shared() {
  static TestServer server;
  return server;
}

const JsonValue* member(const JsonValue* json, std::string_view key) {
  return json == nullptr ? nullptr : json->find(key);
}
std::string text_of(const JsonValue* json) {
  return json == nullptr || json->is_null() ? "" : json->text();
}

// What a client has at the end, from a whole answer or from the deltas of a stream.
struct Seen {
  std::string content, reasoning, finish_reason, parse_error;
  std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
  std::vector<std::string> ids;
  size_t num_argument_deltas = 0;
};

Seen read_whole(const JsonValue& json) {
  Seen seen;
  const JsonValue& choice = json.find("choices")->items()[0];
  const JsonValue* message = choice.find("message");
  seen.content = text_of(message->find("content"));
  seen.reasoning = text_of(message->find("reasoning_content"));
  seen.finish_reason = text_of(choice.find("finish_reason"));
  seen.parse_error = text_of(choice.find("parse_error"));
  if (const JsonValue* calls = message->find("tool_calls")) {
    for (const JsonValue& call : calls->items()) {
      seen.calls.emplace_back(text_of(call.find("function")->find("name")),
                              text_of(call.find("function")->find("arguments")));
      seen.ids.push_back(text_of(call.find("id")));
    }
  }
  return seen;
}

Seen read_stream(const HttpReply& reply) {
  Seen seen;
  for (const auto& [name, data] : reply.events()) {
    const JsonValue* choices = data.find("choices");
    if (choices == nullptr || choices->size() == 0) continue;
    const JsonValue& choice = choices->items()[0];
    const JsonValue* delta = choice.find("delta");
    seen.content += text_of(delta->find("content"));
    seen.reasoning += text_of(delta->find("reasoning_content"));
    if (const JsonValue* reason = choice.find("finish_reason"); !reason->is_null())
      seen.finish_reason = reason->text();
    seen.parse_error += text_of(data.find("parse_error"));
    const JsonValue* calls = delta->find("tool_calls");
    if (calls == nullptr) continue;
    const JsonValue& call = calls->items()[0];
    const auto index = static_cast<size_t>(call.find("index")->as_double());
    if (index == seen.calls.size()) {
      EXPECT_NE(call.find("id"), nullptr) << "the first delta of a call has its id";
      EXPECT_FALSE(text_of(member(call.find("function"), "name")).empty())
          << "the name comes first";
      seen.calls.emplace_back();
      seen.ids.push_back(text_of(call.find("id")));
    } else {
      EXPECT_EQ(call.find("id"), nullptr) << "one call is one entry";
    }
    EXPECT_LT(index, seen.calls.size());
    seen.calls[index].first += text_of(member(call.find("function"), "name"));
    seen.calls[index].second += text_of(member(call.find("function"), "arguments"));
    ++seen.num_argument_deltas;
  }
  return seen;
}

void expect_same(const Seen& a, const Seen& b, const std::string& what) {
  EXPECT_EQ(a.content, b.content) << what;
  EXPECT_EQ(a.reasoning, b.reasoning) << what;
  EXPECT_EQ(a.finish_reason, b.finish_reason) << what;
  EXPECT_EQ(a.parse_error, b.parse_error) << what;
  EXPECT_EQ(a.calls, b.calls) << what;
}

// A text as tokens of one byte each; markers stay tokens.
std::vector<int32_t> byte_tokens(const std::string& text) {
  const Tokenizer& tokenizer = TestServer::tokenizer();
  static const std::vector<int32_t> kIds = [&] {
    std::vector<int32_t> ids(256, -1);
    for (int32_t id = 0; id < tokenizer.size(); ++id) {
      if (!tokenizer.is_added(id) && tokenizer.bytes(id).size() == 1)
        ids[static_cast<uint8_t>(tokenizer.bytes(id)[0])] = id;
    }
    return ids;
  }();
  std::vector<int32_t> ids;
  for (const int32_t id : tokenizer.encode(text)) {
    if (tokenizer.is_added(id)) {
      ids.push_back(id);
    } else {
      for (const char c : tokenizer.bytes(id)) ids.push_back(kIds[static_cast<uint8_t>(c)]);
    }
  }
  return ids;
}

std::string body_of(const char* mode, const std::string& tools, size_t max_tokens, bool stream) {
  return fmt::format(
      R"({{"messages":[{{"role":"user","content":"hi"}}],"thinking_mode":"{}","tools":{},"max_tokens":{},"stream":{}}})",
      mode, tools, max_tokens, stream);
}

// The answer to a chat request whose tokens are `ids`: reader and format as the server uses them,
// without a server around them, so that thousands of answers take no time.
HttpReply answer_without_server(const std::string& body, const std::vector<int32_t>& ids,
                                const std::string& prompt_tail) {
  ModelInfo info;
  info.num_ids = TestServer::tokenizer().size();
  ApiRequest request = read_chat_request(JsonValue::parse(body, "body"), info);
  const auto format = chat_format(request, TestServer::tokenizer());
  AnswerReader reader(request, TestServer::tokenizer(), prompt_tail);
  Answer answer;
  answer.choices.resize(1);
  std::string stream = format->stream_begin(answer);
  const auto sink = [&](const OutputEvent& event) {
    stream += format->stream_event(answer, 0, event);
  };
  const bool ends = ids.back() == TestServer::tokenizer().require_added_id(chat_token::kTurnEnd);
  for (const int32_t id : ids) reader.push(id, std::nullopt, answer.choices[0], sink);
  reader.finish(ends ? FinishReason::kStop : FinishReason::kLength, answer.choices[0], sink);
  stream += format->stream_choice_end(answer, 0);
  stream += format->stream_end(answer);
  return {200, "", request.stream ? stream : format->body(answer).dump()};
}

// The conformance table of docs/chat-protocol.md, through the server (api-02, 06, 07, 09 to 17).
TEST(ApiTools, every_golden_answer_streamed_and_whole) {
  const JsonValue cases =
      JsonValue::parse(read_file(M3_SOURCE_DIR "/tests/golden/chat/parse.json"), "parse.json");
  ASSERT_GT(cases.size(), 200u);
  for (size_t number = 0; number < cases.size(); ++number) {
    const JsonValue& item = cases.items()[number];
    const std::string name = item.find("name")->text(), output = item.find("output")->text(),
                      tail = item.find("prompt_tail")->text();
    std::vector<TextRange> plain;
    for (const JsonValue& range : item.find("literal")->items()) {
      plain.push_back({static_cast<size_t>(range.items()[0].as_double()),
                       static_cast<size_t>(range.items()[1].as_double())});
    }
    const std::vector<int32_t> ids = TestServer::tokenizer().encode(output, {.plain = plain});
    if (ids.empty()) continue;
    const char* mode = tail.ends_with("<mm:think>")    ? "enabled"
                       : tail.ends_with("</mm:think>") ? "disabled"
                                                       : "adaptive";
    const std::string tools = item.find("tools")->is_null() ? "[]" : item.find("tools")->dump();
    const Seen whole = read_whole(
        answer_without_server(body_of(mode, tools, ids.size(), false), ids, tail).json());
    const Seen streamed =
        read_stream(answer_without_server(body_of(mode, tools, ids.size(), true), ids, tail));
    expect_same(whole, streamed, name);
    const JsonValue* expected = item.find("expected");
    EXPECT_EQ(whole.content, text_of(expected->find("content"))) << name;
    EXPECT_EQ(whole.reasoning, text_of(expected->find("reasoning"))) << name;
    const auto& calls = expected->find("tool_calls")->items();
    ASSERT_EQ(whole.calls.size(), calls.size()) << name;
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(whole.calls[i].first, calls[i].find("name")->text()) << name;
      const auto arguments = JsonValue::try_parse(whole.calls[i].second);
      ASSERT_TRUE(arguments) << name << " arguments are JSON: " << whole.calls[i].second;
      EXPECT_EQ(*arguments, *calls[i].find("arguments")) << name;
    }
    if (number % 16 != 0) continue;  // the whole way for some of them
    shared().say_ids(ids);
    expect_same(
        whole,
        read_whole(
            shared().post("/v1/chat/completions", body_of(mode, tools, ids.size(), false)).json()),
        name);
    expect_same(
        whole,
        read_stream(shared().post("/v1/chat/completions", body_of(mode, tools, ids.size(), true))),
        name);
  }
}

constexpr const char* kTools =
    R"([{"type":"function","function":{"name":"save_file","parameters":{"type":"object","properties":{"path":{"type":"string"},)"
    R"("text":{"type":"string"},"tags":{"type":"array","items":{"type":"string"}},"mode":{"type":"integer"}}}}}])";
constexpr const char* kCall =
    "Saving.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke "
    "name=\"save_file\">]<]minimax[>[<path>a/ü.txt]<]minimax[>[</path>"
    "]<]minimax[>[<text>line \"one\"\nline <two> \\ "
    "three]<]minimax[>[</text>]<]minimax[>[<tags>]<]minimax[>[<item>x]<]minimax[>[</item>"
    "]<]minimax[>[</tags>]<]minimax[>[<mode>420]<]minimax[>[</mode>]<]minimax[>[</"
    "invoke>\n]<]minimax[>[<invoke name=\"save_file\">"
    "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call> Done.[e~[";

TEST(ApiTools, a_call_in_pieces_of_one_byte_streams_valid_deltas_api_01_13_14_15) {
  const std::vector<int32_t> ids = byte_tokens(kCall);
  shared().say_ids(ids);
  const Seen whole = read_whole(
      shared().post("/v1/chat/completions", body_of("disabled", kTools, ids.size(), false)).json());
  const Seen streamed = read_stream(
      shared().post("/v1/chat/completions", body_of("disabled", kTools, ids.size(), true)));
  expect_same(whole, streamed, "one byte a token");
  ASSERT_EQ(streamed.calls.size(), 2u);
  EXPECT_EQ(
      streamed.calls[0].second,
      R"({"path":"a/ü.txt","text":"line \"one\"\nline <two> \\ three","tags":["x"],"mode":420})");
  EXPECT_EQ(streamed.calls[1].second, "{}") << "an empty call";
  EXPECT_EQ(streamed.content, "Saving.\n Done.");
  EXPECT_EQ(streamed.finish_reason, "tool_calls");
  EXPECT_GT(streamed.num_argument_deltas, 30u) << "arguments grow with the text";
  EXPECT_NE(streamed.ids[0], streamed.ids[1]);
  EXPECT_NE(streamed.ids[0], whole.ids[0]) << "ids are unique in a run of the server";
}

TEST(ApiTools, a_call_cut_at_every_byte_is_closed_to_valid_json_api_10_16) {
  const std::vector<int32_t> ids = byte_tokens(kCall);
  shared().say_ids(ids);
  for (size_t length = 1; length < ids.size(); ++length) {
    const std::vector<int32_t> cut(ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(length));
    const std::string body = body_of("disabled", kTools, length, false),
                      stream_body = body_of("disabled", kTools, length, true);
    const Seen whole = read_whole(answer_without_server(body, cut, "</mm:think>").json());
    expect_same(whole, read_stream(answer_without_server(stream_body, cut, "</mm:think>")),
                fmt::format("cut behind {} bytes", length));
    if (length % 64 == 0)
      expect_same(whole, read_stream(shared().post("/v1/chat/completions", stream_body)),
                  "the whole way");
    EXPECT_EQ(whole.finish_reason, "length") << length;
    for (const auto& [name, arguments] : whole.calls) {
      const auto json = JsonValue::try_parse(arguments);
      EXPECT_TRUE(json && json->is_object()) << length << ": " << arguments;
    }
    EXPECT_EQ(whole.content.find("minimax"), std::string::npos)
        << length << ": no marker in the text";
    EXPECT_TRUE(std::string("Saving.\n Done.").starts_with(whole.content)) << length;
  }
}

TEST(ApiTools, what_cannot_be_read_becomes_text_with_a_parse_error_api_06_07) {
  shared().say("Now ]<]minimax[>[<path>x]<]minimax[>[</path> and more[e~[");
  const HttpReply reply =
      shared().post("/v1/chat/completions", body_of("disabled", kTools, 200, false));
  EXPECT_EQ(reply.status, 200);
  const Seen seen = read_whole(reply.json());
  EXPECT_EQ(seen.finish_reason, "stop");
  EXPECT_FALSE(seen.parse_error.empty());
  EXPECT_EQ(seen.content.find("minimax"), std::string::npos);
}

TEST(ApiTools, one_call_is_enough_where_parallel_calls_are_off) {
  shared().say(kCall);
  std::string body = body_of("disabled", kTools, 500, false);
  body.insert(1, R"("parallel_tool_calls":false,)");
  const Seen seen = read_whole(shared().post("/v1/chat/completions", body).json());
  EXPECT_EQ(seen.calls.size(), 1u);
  EXPECT_EQ(seen.finish_reason, "tool_calls");
}

// From here on the model speaks for itself: random weights, held by grammars. The bias makes it end
// its thinking.
std::string close_bias() {
  const Tokenizer& tokenizer = TestServer::tokenizer();
  return fmt::format(R"("seed":5,"max_tokens":400,"logit_bias":{{"{}":9}})",
                     tokenizer.require_added_id(chat_token::kThinkClose));
}

constexpr const char* kForcedTools =
    R"([{"type":"function","function":{"name":"weather","strict":true,"parameters":{"type":"object","properties":{"city":{"enum":["Oslo","Rome"]},)"
    R"("days":{"type":"integer","minimum":1,"maximum":9}},"required":["city","days"],"additionalProperties":false}}},)"
    R"({"type":"function","function":{"name":"stop","strict":true,"parameters":{"type":"object","properties":{},"additionalProperties":false}}}])";

TEST(ApiTools, required_and_named_calls_come_in_every_thinking_mode_api_04) {
  shared().say_what_the_model_says();
  for (const char* mode : {"enabled", "disabled", "adaptive"}) {
    for (const char* choice :
         {R"("required")", R"({"type":"function","function":{"name":"weather"}})"}) {
      const std::string body = fmt::format(
          R"({{"messages":[{{"role":"user","content":"hi"}}],"thinking_mode":"{}","tools":{},"tool_choice":{},)"
          R"("parallel_tool_calls":false,{}}})",
          mode, kForcedTools, choice, close_bias());
      const HttpReply reply = shared().post("/v1/chat/completions", body);
      ASSERT_EQ(reply.status, 200) << reply.body;
      const Seen seen = read_whole(reply.json());
      ASSERT_EQ(seen.calls.size(), 1u) << mode << choice << reply.body;
      EXPECT_EQ(seen.finish_reason, "tool_calls");
      EXPECT_EQ(seen.content, "");
      EXPECT_TRUE(choice[0] != '{' || seen.calls[0].first == "weather") << seen.calls[0].first;
      if (seen.calls[0].first != "weather") continue;
      const JsonValue arguments = JsonValue::parse(seen.calls[0].second, "arguments");
      const std::string city = text_of(arguments.find("city"));
      EXPECT_TRUE(city == "Oslo" || city == "Rome") << seen.calls[0].second;
      const double days = arguments.find("days")->as_double();
      EXPECT_TRUE(days >= 1 && days <= 9) << seen.calls[0].second;
    }
  }
}

TEST(ApiTools, tool_choice_none_keeps_the_prompt_and_forbids_calls) {
  shared().say_what_the_model_says();
  std::string body = body_of("disabled", kTools, 30, false);
  const std::string prompt_tokens = text_of(
      shared().post("/v1/chat/completions", body).json().find("usage")->find("prompt_tokens"));
  body.insert(1, fmt::format(R"("tool_choice":"none","logit_bias":{{"{}":100}},)",
                             TestServer::tokenizer().require_added_id(chat_token::kNamespace)));
  const JsonValue json = shared().post("/v1/chat/completions", body).json();
  EXPECT_EQ(text_of(json.find("usage")->find("prompt_tokens")), prompt_tokens);
  EXPECT_TRUE(read_whole(json).calls.empty());
}

constexpr const char* kSchema =
    R"({"type":"object","properties":{"kind":{"enum":["a","bb"]},"count":{"type":"integer","minimum":0,"maximum":99}},"required":["kind","count"],"additionalProperties":false})";

void expect_schema(const std::string& text, const std::string& what) {
  const auto json = JsonValue::try_parse(text);
  ASSERT_TRUE(json && json->is_object() && json->size() == 2) << what << ": " << text;
  const std::string kind = text_of(json->find("kind"));
  EXPECT_TRUE(kind == "a" || kind == "bb") << what << ": " << text;
  EXPECT_TRUE(json->find("count")->is_integer() && json->find("count")->as_double() <= 99)
      << what << ": " << text;
}

TEST(ApiTools, json_schema_holds_in_every_thinking_mode_family_and_stream_api_03_04) {
  shared().say_what_the_model_says();
  for (const char* mode : {"enabled", "disabled", "adaptive"}) {
    for (const char* stream : {"false", "true"}) {
      const std::string what = fmt::format("thinking {}, stream {}", mode, stream),
                        common = fmt::format(R"("thinking_mode":"{}","stream":{},{})", mode, stream,
                                             close_bias());
      const HttpReply chat = shared().post(
          "/v1/chat/completions",
          fmt::format(
              R"({{"messages":[{{"role":"user","content":"hi"}}],"response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{}}}}},{}}})",
              kSchema, common));
      ASSERT_EQ(chat.status, 200) << chat.body;
      const Seen seen = *stream == 't' ? read_stream(chat) : read_whole(chat.json());
      EXPECT_EQ(seen.finish_reason, "stop") << what;
      expect_schema(seen.content, "chat, " + what);

      const HttpReply messages = shared().post(
          "/v1/messages",
          fmt::format(
              R"({{"messages":[{{"role":"user","content":"hi"}}],"output_format":{{"type":"json_schema","schema":{}}},{}}})",
              kSchema, common));
      ASSERT_EQ(messages.status, 200) << messages.body;
      std::string text;
      if (*stream == 't') {
        for (const auto& [name, data] : messages.events())
          text += text_of(member(data.find("delta"), "text"));
      } else {
        text = text_of(messages.json().find("content")->items().back().find("text"));
      }
      expect_schema(text, "messages, " + what);

      std::string responses_common = common;
      responses_common.replace(responses_common.find("max_tokens"), 10, "max_output_tokens");
      const HttpReply responses = shared().post(
          "/v1/responses",
          fmt::format(
              R"({{"input":"hi","text":{{"format":{{"type":"json_schema","name":"x","schema":{}}}}},{}}})",
              kSchema, responses_common));
      ASSERT_EQ(responses.status, 200) << responses.body;
      const JsonValue whole =
          *stream == 't' ? *responses.events().back().second.find("response") : responses.json();
      expect_schema(
          text_of(whole.find("output")->items().back().find("content")->items()[0].find("text")),
          "responses, " + what);
    }
  }
}

TEST(ApiTools, a_schema_with_tools_gives_either_of_them) {
  shared().say_what_the_model_says();
  const int32_t mark = TestServer::tokenizer().require_added_id(chat_token::kNamespace);
  for (const int bias : {-100, 100}) {
    const HttpReply reply = shared().post(
        "/v1/chat/completions",
        fmt::format(
            R"({{"messages":[{{"role":"user","content":"hi"}}],"thinking_mode":"disabled","parallel_tool_calls":false,"max_tokens":400,"seed":3,"tools":{},"logit_bias":{{"{}":{}}},)"
            R"("response_format":{{"type":"json_schema","json_schema":{{"name":"x","schema":{}}}}}}})",
            kForcedTools, mark, bias, kSchema));
    ASSERT_EQ(reply.status, 200) << reply.body;
    const Seen seen = read_whole(reply.json());
    if (bias > 0) {
      EXPECT_EQ(seen.calls.size(), 1u) << reply.body;
    } else {
      expect_schema(seen.content, "answer");
    }
  }
}

}  // namespace
}  // namespace m3
