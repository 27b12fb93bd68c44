#include "text/chat.h"

#include <gtest/gtest.h>

#include "base/check.h"
#include "text/placeholders.h"

namespace m3 {
namespace {

std::vector<Message> messages_of(const std::string& json) {
  return read_messages(JsonValue::parse(json, "messages"));
}

std::string render(const std::string& json, RenderOptions options = {.thinking_mode = "enabled"}) {
  return render_chat(messages_of(json), {}, options);
}

std::string refusal(const std::string& json) {
  try {
    render(json);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Chat, a_request_built_in_code_equals_the_one_read_from_json) {
  std::vector<Message> messages(3);
  messages[0] = {.role = "system", .content = {ContentPart::of_text("Be brief.")}};
  messages[1] = {.role = "user",
                 .content = {ContentPart::image(), ContentPart::of_text("What is this?")}};
  messages[2] = {.role = "assistant",
                 .content = {},
                 .reasoning = "hm",
                 .tool_calls = {{"look", JsonValue::object()}}};
  messages[2].tool_calls[0].arguments.set("n", JsonValue::integer(3));
  const std::string json = R"([{"role":"system","content":"Be brief."},
    {"role":"user","content":[{"type":"image"},{"type":"text","text":"What is this?"}]},
    {"role":"assistant","content":null,"reasoning_content":"hm",
     "tool_calls":[{"type":"function","function":{"name":"look","arguments":{"n":3}}}]}])";
  EXPECT_EQ(render_chat(messages, {}, {.thinking_mode = "enabled"}), render(json));
}

TEST(Chat, api_05_the_prompt_tail_tells_the_thinking_mode) {
  const std::string json = R"([{"role":"user","content":"x"}])";
  EXPECT_TRUE(render(json, {.thinking_mode = "enabled"}).ends_with("]~b]ai\n<mm:think>"));
  EXPECT_TRUE(render(json, {.thinking_mode = "disabled"}).ends_with("]~b]ai\n</mm:think>"));
  EXPECT_TRUE(render(json, {.thinking_mode = "adaptive"}).ends_with("]~b]ai\n"));
  EXPECT_TRUE(render(json, {}).ends_with("]~b]ai\n"));
}

TEST(Chat, refusals_name_the_place) {
  const auto expect = [](const std::string& json, const std::string& place) {
    EXPECT_NE(refusal(json).find(place), std::string::npos) << json << " gave: " << refusal(json);
  };
  expect(R"({})", "messages");
  expect(R"([3])", "messages[0]");
  expect(R"([{"role":"user","content":{"a":1}}])", "messages[0].content");
  expect(R"([{"role":"user","content":[{"type":"text","text":[1]}]}])",
         "messages[0].content[0].text");
  expect(R"([{"role":"tool","content":"x"}])", "messages[0]");
  expect(R"([{"role":"assistant","tool_calls":[{"name":"f","arguments":"{}"}]}])",
         "messages[0].tool_calls[0]");
  expect(R"([{"role":"assistant","tool_calls":[{"arguments":{}}]}])", "messages[0].tool_calls[0]");
  expect(R"([{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls");
  expect(
      R"([{"role":"assistant","tool_calls":[{"name":"f","arguments":{}}]},{"role":"tool","content":[{"a":1}]}])",
      "messages[1].content[0]");
  EXPECT_THROW(read_tools(JsonValue::parse(R"([{"name":"f"}])", "tools")), Error);
  EXPECT_THROW(read_tools(JsonValue::parse(R"({})", "tools")), Error);
  EXPECT_TRUE(read_tools(JsonValue()).empty());
}

TEST(Chat, messages_of_unknown_roles_are_skipped_whatever_they_hold) {
  const std::string other =
      R"([{"role":"user","content":"x"},{"role":"critic","content":{"a":1},"tool_calls":7}])";
  EXPECT_EQ(render(other), render(R"([{"role":"user","content":"x"}])"));
}

TEST(Placeholders, many_marks_take_linear_time) {
  std::string prompt, want;
  std::vector<ImageSpan> images(20000, {1});
  for (size_t i = 0; i < images.size(); ++i) {
    prompt += "]<]image[>[";
    want += "]<]start of image[>[]<]image[>[]<]end of image[>[";
  }
  EXPECT_EQ(expand_placeholders(prompt, images, {}), want);
}

TEST(Placeholders, timestamps_round_the_double_correctly) {
  EXPECT_EQ(timestamp_text(0.25), "]<]0.2 seconds[>[");
  EXPECT_EQ(timestamp_text(0.35), "]<]0.3 seconds[>[");
  EXPECT_EQ(timestamp_text(0.75), "]<]0.8 seconds[>[");
  EXPECT_EQ(timestamp_text(3599.96), "]<]3600.0 seconds[>[");
}

TEST(Placeholders, a_wrong_number_of_timestamps_is_refused) {
  EXPECT_THROW(expand_placeholders("]<]video[>[", {}, std::vector<VideoSpan>{{2, 1, {0.0}}}),
               Error);
}

}  // namespace
}  // namespace m3
