// The API families over HTTP: forms, errors, limits. Names carry the rows of the required
// behaviours (api-NN).
#include <gtest/gtest.h>

#include <thread>

#include "server/test_server.h"

namespace m3 {
namespace {

TestServer& shared() {
  static TestServer server;
  return server;
}

// The value at a path such as "choices.0.message.content"; null if there is none.
JsonValue at(const JsonValue& json, const std::string& path) {
  const JsonValue* value = &json;
  for (size_t from = 0; value != nullptr && from <= path.size();) {
    const size_t end = std::min(path.find('.', from), path.size());
    const std::string key = path.substr(from, end - from);
    from = end + 1;
    if (value->is_array()) {
      const size_t index = std::stoul(key);
      value = index < value->size() ? &value->items()[index] : nullptr;
    } else {
      value = value->find(key);
    }
  }
  return value == nullptr ? JsonValue() : *value;
}
std::string text_at(const JsonValue& json, const std::string& path) {
  return at(json, path).text();
}

constexpr const char* kWeather =
    R"("tools":[{"type":"function","function":{"name":"weather","parameters":{"type":"object","properties":{"city":{"type":"string"},)"
    R"("days":{"type":"integer"}},"required":["city"]}}}])";
std::string chat(const std::string& more) {
  return R"({"messages":[{"role":"user","content":"hi"}],)" + more + "}";
}

TEST(Api, models_publish_limits_modalities_and_modes_api_25) {
  const JsonValue models = shared().get("/v1/models").json();
  EXPECT_EQ(text_at(models, "data.0.id"), "tiny");
  EXPECT_EQ(text_at(models, "data.0.max_model_len"), "4096");
  EXPECT_EQ(text_at(models, "data.0.architecture.input_modalities.2"), "video");
  EXPECT_EQ(text_at(shared().get("/v1/models/other-name").json(), "id"), "tiny");
  EXPECT_EQ(shared().get("/v1/models/unknown").status, 404);
}

TEST(Api, usage_counts_prompt_cached_reasoning_and_answer_sched_08) {
  shared().say("<mm:think>a b c</mm:think>Yes.[e~[");
  const std::string body = R"({"messages":[{"role":"user","content":"usage counts, please"}]})";
  const JsonValue first = shared().post("/v1/chat/completions", body).json();
  const JsonValue second = shared().post("/v1/chat/completions", body).json();
  const auto tokens = TestServer::tokenizer().encode("<mm:think>a b c</mm:think>Yes.[e~[").size();
  const auto reasoning = TestServer::tokenizer().encode("a b c").size();
  EXPECT_EQ(text_at(first, "choices.0.message.content"), "Yes.");
  EXPECT_EQ(text_at(first, "choices.0.message.reasoning_content"), "a b c");
  EXPECT_EQ(text_at(first, "choices.0.message.reasoning"), "a b c");
  EXPECT_EQ(text_at(first, "choices.0.finish_reason"), "stop");
  EXPECT_EQ(text_at(first, "usage.completion_tokens"), std::to_string(tokens));
  EXPECT_EQ(text_at(first, "usage.completion_tokens_details.reasoning_tokens"),
            std::to_string(reasoning));
  const double prompt = at(second, "usage.prompt_tokens").as_double(),
               cached = at(second, "usage.prompt_tokens_details.cached_tokens").as_double();
  EXPECT_EQ(cached, prompt - 1) << "the same prompt again is cached but for its last token";
  EXPECT_EQ(at(second, "usage.total_tokens").as_double(), prompt + static_cast<double>(tokens));
}

TEST(Api, a_new_turn_encodes_only_its_own_text_sched_02) {
  shared().say("<mm:think></mm:think>Yes.[e~[");
  const auto encoded_bytes = [] {
    const std::string text = shared().get("/metrics").body,
                      name = "\nm3:tokenizer_encoded_bytes_total{model_name=\"tiny\"} ";
    return std::stod(text.substr(text.find(name) + name.size()));
  };
  const std::string first = R"({"role":"user","content":")" + std::string(500, 'z') + "\"}";
  shared().post("/v1/chat/completions", R"({"messages":[)" + first + "]}");
  const double before = encoded_bytes();
  EXPECT_GE(before, 500);
  const JsonValue second =
      shared()
          .post("/v1/chat/completions",
                R"({"messages":[)" + first +
                    R"(,{"role":"assistant","content":"Yes."},{"role":"user","content":"And?"}]})")
          .json();
  EXPECT_EQ(text_at(second, "choices.0.message.content"), "Yes.");
  EXPECT_LE(encoded_bytes() - before, 40);
}

TEST(Api, every_spelling_of_thinking_maps_to_one_setting_api_04_18_20) {
  struct Row {
    const char *path, *fields, *mode;
  };
  const Row rows[] = {
      {"/v1/chat/completions", R"("thinking_mode":"enabled")", "enabled"},
      {"/v1/chat/completions", R"("enable_thinking":false)", "disabled"},
      {"/v1/chat/completions", R"("chat_template_kwargs":{"enable_thinking":true})", "enabled"},
      {"/v1/chat/completions", R"("chat_template_kwargs":{"thinking_mode":"disabled"})",
       "disabled"},
      {"/v1/chat/completions", R"("thinking":{"type":"enabled","budget_tokens":5})", "enabled"},
      {"/v1/chat/completions", R"("reasoning_effort":"none")", "disabled"},
      {"/v1/chat/completions", R"("reasoning_effort":"xhigh")", "enabled"},
      {"/v1/chat/completions", R"("user":"x")", "adaptive"},
      {"/v1/messages", R"("thinking":{"type":"adaptive"})", "adaptive"},
      {"/v1/messages", R"("thinking":{"type":"disabled"})", "disabled"},
      {"/v1/messages", R"("output_config":{"effort":"low"})", "enabled"},
      {"/v1/messages", R"("stop_sequences":["x"])", "adaptive"},
      {"/v1/responses", R"("reasoning":{"effort":"minimal"})", "enabled"},
      {"/v1/responses", R"("reasoning":{"effort":"none"})", "disabled"},
  };
  shared().say("Yes.[e~[");
  for (const Row& row : rows) {
    const bool is_responses = std::string(row.path) == "/v1/responses";
    const HttpReply reply =
        shared().post(row.path, is_responses ? fmt::format(R"({{"input":"hi",{}}})", row.fields)
                                             : chat(row.fields));
    EXPECT_EQ(reply.status, 200) << row.fields << reply.body;
    EXPECT_EQ(text_at(reply.json(), "thinking_mode"), row.mode) << row.path << row.fields;
    EXPECT_EQ(reply.header("x-m3-thinking-mode"), row.mode);
  }
  const HttpReply both = shared().post("/v1/chat/completions",
                                       chat(R"("reasoning_effort":"none","enable_thinking":true)"));
  EXPECT_EQ(both.status, 400);
  EXPECT_NE(both.body.find("enable_thinking"), std::string::npos) << both.body;
  EXPECT_NE(both.body.find("reasoning_effort"), std::string::npos) << both.body;
}

TEST(Api, messages_give_thinking_text_and_calls_as_blocks_api_22) {
  shared().say(
      "<mm:think>Hm.</mm:think>So:]<]minimax[>[<tool_call>]<]minimax[>[<invoke "
      "name=\"weather\">]<]minimax[>[<city>Oslo]<]minimax[>[</city>"
      "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>[e~[");
  const std::string tools =
      R"("max_tokens":100,"tools":[{"name":"weather","input_schema":{"type":"object","properties":{"city":{"type":"string"}}}}])";
  const JsonValue json = shared().post("/v1/messages", chat(tools)).json();
  EXPECT_EQ(text_at(json, "content.0.type"), "thinking");
  EXPECT_EQ(text_at(json, "content.0.thinking"), "Hm.");
  EXPECT_FALSE(text_at(json, "content.0.signature").empty());
  EXPECT_EQ(text_at(json, "content.1.text"), "So:");
  EXPECT_EQ(text_at(json, "content.2.name"), "weather");
  EXPECT_EQ(text_at(json, "content.2.input.city"), "Oslo");
  EXPECT_EQ(text_at(json, "stop_reason"), "tool_use");

  std::string names, text, thinking, input;
  bool has_signature = false;
  for (const auto& [name, data] :
       shared().post("/v1/messages", chat(tools + R"(,"stream":true)")).events()) {
    EXPECT_EQ(text_at(data, "type"), name);
    if (name != "content_block_delta")
      names += name + (name.starts_with("content") ? text_at(data, "index") : "") + " ";
    text += text_at(data, "delta.text");
    thinking += text_at(data, "delta.thinking");
    input += text_at(data, "delta.partial_json");
    has_signature |= text_at(data, "delta.type") == "signature_delta";
  }
  EXPECT_EQ(names,
            "message_start content_block_start0 content_block_stop0 content_block_start1 "
            "content_block_stop1 content_block_start2 "
            "content_block_stop2 message_delta message_stop ");
  EXPECT_EQ(thinking, "Hm.");
  EXPECT_EQ(text, "So:");
  EXPECT_EQ(input, R"({"city":"Oslo"})");
  EXPECT_TRUE(has_signature);
}

TEST(Api, responses_number_their_events_and_repeat_the_whole_answer) {
  shared().say("<mm:think>Hm.</mm:think>So be it.[e~[");
  const auto events = shared().post("/v1/responses", R"({"input":"hi","stream":true})").events();
  std::string names;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(text_at(events[i].second, "sequence_number"), std::to_string(i)) << events[i].first;
    if (!events[i].first.ends_with(".delta")) names += events[i].first.substr(9) + " ";
  }
  EXPECT_EQ(names,
            "created in_progress output_item.added content_part.added reasoning_text.done "
            "content_part.done output_item.done "
            "output_item.added content_part.added output_text.done content_part.done "
            "output_item.done completed ");
  const JsonValue last = events.back().second,
                  whole = shared().post("/v1/responses", R"({"input":"hi"})").json();
  EXPECT_EQ(text_at(last, "response.output.0.content.0.text"), "Hm.");
  EXPECT_EQ(text_at(last, "response.output.1.content.0.text"), "So be it.");
  EXPECT_EQ(text_at(whole, "output.1.content.0.text"), "So be it.");
  EXPECT_EQ(text_at(whole, "status"), "completed");
}

TEST(Api, streams_end_with_a_reason_usage_and_the_end_mark_api_23) {
  shared().say("<mm:think>one two</mm:think>three four[e~[");
  const auto events =
      shared()
          .post("/v1/chat/completions",
                chat(R"("stream":true,"min_p":0.1,"stream_options":{"include_usage":true})"))
          .events();
  ASSERT_GE(events.size(), 6u);
  EXPECT_EQ(text_at(events[0].second, "choices.0.delta.role"), "assistant");
  EXPECT_EQ(events.back().second.text(), "[DONE]");
  const JsonValue& usage = events[events.size() - 2].second;
  EXPECT_EQ(at(usage, "choices").size(), 0u);
  EXPECT_EQ(
      text_at(usage, "usage.completion_tokens"),
      std::to_string(
          TestServer::tokenizer().encode("<mm:think>one two</mm:think>three four[e~[").size()));
  EXPECT_EQ(text_at(events[events.size() - 3].second, "choices.0.finish_reason"), "stop");
  int reasoning_deltas = 0;
  for (const auto& [name, data] : events)
    reasoning_deltas += !text_at(data, "choices.0.delta.reasoning_content").empty();
  EXPECT_GE(reasoning_deltas, 2) << "reasoning is streamed as it comes";
}

TEST(Api, too_many_tokens_are_clamped_and_reported_api_21) {
  shared().say("Yes.[e~[");
  const HttpReply reply = shared().post("/v1/chat/completions", chat(R"("max_tokens":1000000)"));
  EXPECT_EQ(reply.status, 200);
  const double prompt = at(reply.json(), "usage.prompt_tokens").as_double();
  EXPECT_EQ(at(reply.json(), "max_tokens").as_double(), 4096 - prompt);
  EXPECT_EQ(reply.header("x-m3-max-tokens"), std::to_string(4096 - static_cast<int>(prompt)));
}

TEST(Api, stop_strings_end_the_content_and_are_not_part_of_it) {
  shared().say("<mm:think>STOP is fine here</mm:think>one two STOP three[e~[");
  for (const char* stream : {"false", "true"}) {
    const HttpReply reply = shared().post(
        "/v1/chat/completions", chat(fmt::format(R"("stop":["zzz","STOP"],"stream":{})", stream)));
    std::string text = *stream == 'f' ? text_at(reply.json(), "choices.0.message.content") : "";
    if (*stream == 't') {
      for (const auto& [name, data] : reply.events())
        text += text_at(data, "choices.0.delta.content");
    }
    EXPECT_EQ(text, "one two ");
  }
  const JsonValue json = shared().post("/v1/messages", chat(R"("stop_sequences":["STOP"])")).json();
  EXPECT_EQ(text_at(json, "stop_reason"), "stop_sequence");
  EXPECT_EQ(text_at(json, "stop_sequence"), "STOP");
  EXPECT_TRUE(shared().wait_until_idle());
}

TEST(Api, completions_answer_texts_and_ids_n_times_each) {
  shared().say_what_the_model_says();
  const auto ids = TestServer::tokenizer().encode("the same");
  const std::string rest =
      R"("n":2,"seed":7,"max_tokens":6,"ignore_eos":true,"logprobs":2,"return_token_ids":true)";
  const JsonValue texts =
      shared().post("/v1/completions", R"({"prompt":["the same","other"],)" + rest + "}").json();
  ASSERT_EQ(at(texts, "choices").size(), 4u);
  EXPECT_NE(text_at(texts, "choices.0.text"), text_at(texts, "choices.1.text"))
      << "choices draw differently";
  EXPECT_EQ(at(texts, "choices.0.token_ids").size(), 6u);
  const JsonValue from_ids =
      shared()
          .post("/v1/completions", fmt::format(R"({{"prompt":{},{}}})", id_list(ids).dump(), rest))
          .json();
  EXPECT_EQ(at(from_ids, "choices.0.token_ids"), at(texts, "choices.0.token_ids"))
      << "text and its ids are the same prompt";
  EXPECT_EQ(at(from_ids, "choices.1.token_ids"), at(texts, "choices.1.token_ids"))
      << "draws depend on seed, choice and position";
  EXPECT_EQ(at(from_ids, "choices.0.logprobs.top_logprobs.0").size(), 2u);
  EXPECT_LE(at(from_ids, "choices.0.logprobs.token_logprobs.0").as_double(), 0);
  const JsonValue echo =
      shared().post("/v1/completions", R"({"prompt":"say ","echo":true,"max_tokens":2})").json();
  EXPECT_TRUE(text_at(echo, "choices.0.text").starts_with("say ")) << echo.dump();
}

TEST(Api, chat_logprobs_give_bytes_and_alternatives) {
  shared().say_what_the_model_says();
  const JsonValue json =
      shared()
          .post(
              "/v1/chat/completions",
              chat(
                  R"("max_tokens":5,"temperature":0,"logprobs":true,"top_logprobs":3,"thinking_mode":"disabled")"))
          .json();
  const JsonValue content = at(json, "choices.0.logprobs.content");
  ASSERT_GE(content.size(), 1u);
  for (size_t i = 0; i < content.size(); ++i) {
    const JsonValue top = at(content, fmt::format("{}.top_logprobs", i));
    ASSERT_EQ(top.size(), 3u);
    EXPECT_GE(at(top, "0.logprob").as_double(), at(top, "1.logprob").as_double());
    EXPECT_GE(at(top, "0.logprob").as_double(),
              at(content, fmt::format("{}.logprob", i)).as_double());
    EXPECT_FALSE(text_at(content, fmt::format("{}.token", i)).empty());
  }
}

TEST(Api, bad_requests_get_400_that_name_the_field) {
  struct Row {
    const char *path, *body, *param, *says;
  };
  const Row rows[] = {
      {"/v1/chat/completions", "{", "", "JSON"},
      {"/v1/chat/completions", "[]", "", "object"},
      {"/v1/chat/completions", "{}", "messages", "missing"},
      {"/v1/chat/completions", R"({"messages":[]})", "messages", "at least one"},
      {"/v1/chat/completions", R"({"messages":[{"role":"robot","content":"x"}]})",
       "messages[0].role", "robot"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user"}]})", "messages[0].content",
       "missing"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":[{"type":"audio"}]}]})",
       "messages[0].content[0].type", "audio"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y"}]})",
       "messages[1]", "continuing"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"},{"role":"system","content":"y"}]})",
       "messages[1]", "system"},
      {"/v1/chat/completions", R"({"messages":[{"role":"tool","content":"x","tool_call_id":"a"}]})",
       "messages[0].tool_call_id", "no call"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"},{"role":"tool","content":"x"}]})",
       "messages[1]", "follow"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"assistant","tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{x"}}]},{"role":"tool","tool_call_id":"a","content":"1"}]})",
       "messages[0].tool_calls[0].function.arguments", "JSON"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"temperature":-1})",
       "temperature", "-1"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"top_p":"0.5"})",
       "top_p", "number"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"max_tokens":0})",
       "max_tokens", "0"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"n":9})", "n", "9"},
      {"/v1/chat/completions", R"({"messages":[{"role":"user","content":"x"}],"seed":1.5})", "seed",
       "integer"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"logit_bias":{"5000":1}})", "logit_bias.5000",
       "token id"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"continue_final_message":true})",
       "continue_final_message", "not supported"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"audio":{"voice":"x"}})", "audio",
       "not supported"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"reasoning_effort":"extreme"})",
       "reasoning_effort", "extreme"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"tool_choice":"required"})", "tool_choice",
       "no tools"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"x":1}})",
       "chat_template_kwargs.x", "not known"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"not":{}}}}})",
       "response_format.json_schema.schema", "#/not"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"https://x/y.png"}}]}]})",
       "messages[0].content[0].image_url.url", "network"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA=A"}}]}]})",
       "messages[0].content[0].image_url.url", "base64"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"}}]}]})",
       "messages[0].content[0].image_url.url", "picture"},
      {"/v1/chat/completions",
       R"({"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///etc/passwd"}}]}]})",
       "messages[0].content[0].image_url.url", "--media-path"},
      {"/v1/completions", R"({"prompt":""})", "prompt", "empty"},
      {"/v1/completions", R"({"prompt":[1,-1]})", "prompt[1]", "token id"},
      {"/v1/completions", R"({"prompt":"x","suffix":"y"})", "suffix", "not supported"},
      {"/v1/responses", R"({"input":"x","store":true})", "store", "not supported"},
      {"/v1/responses", R"({"input":"x","previous_response_id":"r"})", "previous_response_id",
       "not supported"},
      {"/v1/responses", R"({"input":"x","background":true})", "background", "not supported"},
      {"/v1/responses", R"({"input":[{"type":"item_reference","id":"x"}]})", "input[0].type",
       "item_reference"},
      {"/v1/messages", R"({"messages":[{"role":"user","content":[{"type":"document"}]}]})",
       "messages[0].content[0].type", "document"},
      {"/v1/messages",
       R"({"messages":[{"role":"user","content":"x"}],"tools":[{"type":"web_search_20250305","name":"w"}]})",
       "tools[0].type", "hosted"},
  };
  for (const Row& row : rows) {
    const HttpReply reply = shared().post(row.path, row.body);
    EXPECT_EQ(reply.status, 400) << row.body << "\n" << reply.body;
    const JsonValue error = at(reply.json(), "error");
    EXPECT_EQ(text_at(error, "type"), "invalid_request_error");
    EXPECT_EQ(text_at(error, "param"), row.param) << row.body;
    EXPECT_NE(text_at(error, "message").find(row.says), std::string::npos) << row.body << "\n"
                                                                           << reply.body;
  }
  EXPECT_EQ(text_at(shared().post("/v1/messages", "{}").json(), "type"), "error")
      << "the messages family has its own shape";
  const std::string deep = std::string(100, '[') + std::string(100, ']');
  EXPECT_EQ(shared().post("/v1/chat/completions", R"({"messages":)" + deep + "}").status, 400);
  std::string longest = "a";
  for (int i = 0; i < 13; ++i) longest += longest;
  const JsonValue too_long =
      shared().post("/v1/completions", R"({"prompt":")" + longest + R"("})").json();
  EXPECT_EQ(text_at(too_long, "error.code"), "context_length_exceeded");
}

TEST(Api, unknown_fields_are_listed_and_never_silent) {
  shared().say("Yes.[e~[");
  const HttpReply reply =
      shared().post("/v1/chat/completions", chat(R"("speed":"fast","tempreature":1)"));
  EXPECT_EQ(reply.status, 200);
  EXPECT_EQ(reply.header("x-m3-ignored-fields"), "speed, tempreature");
  EXPECT_NE(shared()
                .get("/metrics")
                .body.find("m3:ignored_fields_total{model_name=\"tiny\",field=\"speed\"}"),
            std::string::npos);
}

TEST(Api, paths_methods_types_and_request_ids) {
  TestServer& server = shared();
  EXPECT_EQ(server.get("/v2/chat").status, 404);
  EXPECT_EQ(server.get("/v1/chat/completions").status, 405);
  EXPECT_EQ(
      http_call(server.port(), "POST", "/v1/chat/completions", "{}", "Content-Type: text/plain\r\n")
          .status,
      415);
  EXPECT_EQ(http_call(server.port(), "OPTIONS", "/v1/chat/completions").status, 204);
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/ready").status, 200);
  EXPECT_NE(server.get("/").body.find("<!doctype html>"), std::string::npos);
  const HttpReply named =
      http_call(server.port(), "POST", "/v1/completions", R"({"prompt":"x","max_tokens":1})",
                "Content-Type: application/json\r\nX-Request-Id: mine-1\r\n");
  EXPECT_EQ(named.header("x-request-id"), "mine-1");
  EXPECT_EQ(text_at(named.json(), "id"), "cmpl-mine-1");
}

TEST(Api, tokenize_and_back_and_counts_agree_with_usage) {
  TestServer& server = shared();
  const JsonValue pieces =
      server.post("/tokenize", R"({"prompt":"Hello there","with_pieces":true})").json();
  EXPECT_EQ(
      text_at(
          server.post("/detokenize", R"({"tokens":)" + at(pieces, "tokens").dump() + "}").json(),
          "prompt"),
      "Hello there");
  EXPECT_EQ(at(pieces, "token_strs").size(), at(pieces, "tokens").size());
  server.say("Yes.[e~[");
  const std::string used =
      text_at(server.post("/v1/chat/completions", chat(kWeather)).json(), "usage.prompt_tokens");
  EXPECT_EQ(text_at(server.post("/tokenize", chat(kWeather)).json(), "count"), used);
  EXPECT_EQ(text_at(server.post("/apply-template", chat(kWeather)).json(), "count"), used);
  const JsonValue counted =
      server.post("/v1/messages/count_tokens", chat(R"("system":"Be brief.")")).json();
  const JsonValue message =
      server.post("/v1/messages", chat(R"("system":"Be brief.","max_tokens":5)")).json();
  EXPECT_EQ(at(counted, "input_tokens").as_double(),
            at(message, "usage.input_tokens").as_double() +
                at(message, "usage.cache_read_input_tokens").as_double());
  EXPECT_EQ(
      text_at(server.post("/v1/responses/input_tokens", R"({"input":"hi"})").json(), "object"),
      "response.input_tokens");
}

TEST(Api, history_of_calls_is_rendered_in_m3_syntax_api_09) {
  const std::string turns =
      R"({"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":null,"tool_calls":[{"id":"c1","type":"function","function":)"
      R"({"name":"weather","arguments":"{\"city\": \"Oslo\"}"}}]},{"role":"tool","tool_call_id":"c1","content":"rain"}]})";
  const std::string prompt = text_at(shared().post("/apply-template", turns).json(), "prompt");
  EXPECT_NE(prompt.find("]<]minimax[>[<invoke name=\"weather\">"), std::string::npos) << prompt;
  EXPECT_NE(prompt.find("Oslo"), std::string::npos);
  EXPECT_EQ(prompt.find("<parameter"), std::string::npos) << "M2's syntax";
  const std::string messages =
      R"({"messages":[{"role":"user","content":"hi"},{"role":"assistant","content":[{"type":"tool_use","id":"c1","name":"weather","input":{"city":"Oslo"}}]},)"
      R"({"role":"user","content":[{"type":"tool_result","tool_use_id":"c1","content":"rain"}]}]})";
  const std::string responses =
      R"({"input":[{"role":"user","content":"hi"},{"type":"function_call","call_id":"c1","name":"weather","arguments":"{\"city\": \"Oslo\"}"},)"
      R"({"type":"function_call_output","call_id":"c1","output":"rain"}]})";
  const std::string count = text_at(shared().post("/tokenize", turns).json(), "count");
  EXPECT_EQ(text_at(shared().post("/v1/messages/count_tokens", messages).json(), "input_tokens"),
            count)
      << "one prompt, whatever the family";
  EXPECT_EQ(text_at(shared().post("/v1/responses/input_tokens", responses).json(), "input_tokens"),
            count);
}

TEST(Api, keys_guard_everything_but_health_and_the_page) {
  TestServerOptions options;
  options.api.api_keys = {"secret-one", "secret-two"};
  TestServer server(options);
  server.say("Yes.[e~[");
  EXPECT_EQ(server.get("/health").status, 200);
  EXPECT_EQ(server.get("/").status, 200);
  for (const char* path : {"/v1/models", "/metrics", "/props", "/v1/requests", "/nothing"})
    EXPECT_EQ(server.get(path).status, 401) << path;
  const std::string json = "Content-Type: application/json\r\n";
  const auto ask = [&](const std::string& header) {
    return http_call(server.port(), "POST", "/v1/messages", chat(R"("max_tokens":5)"),
                     json + header);
  };
  EXPECT_EQ(ask("").status, 401);
  EXPECT_EQ(text_at(ask("x-api-key: secret-on\r\n").json(), "error.type"), "authentication_error");
  EXPECT_EQ(ask("x-api-key: secret-one\r\n").status, 200);
  EXPECT_EQ(ask("Authorization: Bearer secret-two\r\n").status, 200);
}

TEST(Api, foreign_host_names_do_not_reach_a_server_without_a_key) {
  Client client(shared().port());
  client.send("GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n");
  EXPECT_NE(client.read_all().find(" 403 "), std::string::npos);
}

TEST(Api, a_full_queue_answers_429_at_once) {
  TestServerOptions options;
  options.max_requests = 1;
  options.engine.max_waiting = 1;
  TestServer server(options);
  const std::string endless = R"({"prompt":"x","max_tokens":3000,"ignore_eos":true,"stream":true})";
  std::vector<std::unique_ptr<Client>> busy;
  for (int i = 0; i < 2; ++i) {  // one runs, one waits
    busy.push_back(std::make_unique<Client>(server.port()));
    busy.back()->send(
        fmt::format("POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
                    "application/json\r\nContent-Length: {}\r\n\r\n{}",
                    endless.size(), endless));
    busy.back()->read_until("\r\n\r\n");
    for (int wait = 0; wait < 500 && server.engine().metrics().running == 0; ++wait)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  const HttpReply reply = server.post("/v1/completions", R"({"prompt":"x","max_tokens":1})");
  EXPECT_EQ(reply.status, 429) << reply.body;
  EXPECT_EQ(reply.header("Retry-After"), "2");
  EXPECT_EQ(text_at(reply.json(), "error.type"), "rate_limit_error");
  busy.clear();
  EXPECT_TRUE(server.wait_until_idle()) << "clients that leave end their requests";
  EXPECT_NE(server.get("/metrics").body.find("m3:client_aborts_total{model_name=\"tiny\"} 2"),
            std::string::npos);
}

TEST(Api, a_time_limit_ends_the_request_with_an_error) {
  TestServerOptions options;
  options.api.request_timeout_seconds = 0.2;
  TestServer server(options);
  const std::string endless = R"({"prompt":"x","max_tokens":3000,"ignore_eos":true,"stream":)";
  EXPECT_EQ(server.post("/v1/completions", endless + "false}").status, 504);
  const auto events = server.post("/v1/completions", endless + "true}").events();
  EXPECT_EQ(text_at(events.back().second, "error.type"), "timeout_error");
}

TEST(Api, stopping_lets_answers_end_and_then_cuts_them) {
  TestServerOptions options;
  options.context = 65536;  // 60,000 tokens take seconds on any machine
  options.cache_tokens = 65536;
  TestServer server(options);
  const std::string endless = R"({"prompt":"x","max_tokens":60000,"ignore_eos":true,"stream":true})";
  HttpReply cut;
  std::thread asking([&] { cut = server.post("/v1/completions", endless); });
  while (server.engine().metrics().answer_tokens < 100) {  // an answer that has begun is not refused
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  bool all_ended = true;
  std::thread stopping([&] { all_ended = server.server().shut_down(0.3); });
  HttpReply health;
  do {
    health = server.get("/health");
  } while (health.status == 200);
  EXPECT_EQ(health.status, 503);
  EXPECT_EQ(server.post("/v1/completions", endless).status, 503);
  stopping.join();
  asking.join();
  EXPECT_FALSE(all_ended);
  EXPECT_EQ(text_at(cut.events().back().second, "error.type"), "service_unavailable_error");
}

}  // namespace
}  // namespace m3
