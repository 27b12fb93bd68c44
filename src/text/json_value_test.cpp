#include "text/json_value.h"

#include <gtest/gtest.h>

#include "base/check.h"

namespace m3 {
namespace {

std::string round_trip(std::string_view json) {
  return JsonValue::parse(json, "test").dump_python();
}

TEST(JsonValue, numbers_print_as_python_prints_them) {
  // Right-hand sides: json.dumps(json.loads(text)) of CPython 3.11.
  const std::pair<const char*, const char*> cases[] = {
      {"1e5", "100000.0"},
      {"1E15", "1000000000000000.0"},
      {"1e16", "1e+16"},
      {"123456789012345678.0", "1.2345678901234568e+17"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"0.000012345", "1.2345e-05"},
      {"1.5e300", "1.5e+300"},
      {"5e-324", "5e-324"},
      {"-0.0", "-0.0"},
      {"-0", "0"},
      {"100.0", "100.0"},
      {"9999999999999998.0", "9999999999999998.0"},
      {"0.30000000000000004", "0.30000000000000004"},
      {"18446744073709551616", "18446744073709551616"},
      {"-123456789012345678901234567890", "-123456789012345678901234567890"},
  };
  for (const auto& [json, want] : cases) EXPECT_EQ(round_trip(json), want) << json;
}

TEST(JsonValue, keeps_key_order_and_the_last_of_equal_keys_in_the_first_place) {
  EXPECT_EQ(round_trip(R"({"b":1,"a":2,"b":3})"), R"({"b": 3, "a": 2})");
}

TEST(JsonValue, escapes_as_python_without_ascii) {
  EXPECT_EQ(round_trip(R"("\u00e9\/\"\\\n\u0001\u007f\ud83d\ude00")"),
            "\"é/\\\"\\\\\\n\\u0001\x7f😀\"");
}

TEST(JsonValue, integer_and_float_differ) {
  EXPECT_FALSE(JsonValue::parse("5", "a") == JsonValue::parse("5.0", "b"));
  EXPECT_TRUE(JsonValue::parse("5e0", "a") == JsonValue::parse("5.0", "b"));
}

TEST(JsonValue, refuses_what_is_no_json) {
  for (const char* text : {"", "{", "[1,]", "{\"a\":1}x", "NaN", "1e999", "\"\xff\"", "\"\t\"",
                           "'a'", "01", "+1", "\xEF\xBB\xBF{}"}) {
    EXPECT_FALSE(JsonValue::try_parse(text).has_value()) << text;
    EXPECT_THROW(JsonValue::parse(text, "test"), Error) << text;
  }
  const std::string deep(100000, '[');
  EXPECT_FALSE(JsonValue::try_parse(deep).has_value());
  EXPECT_TRUE(JsonValue::try_parse(std::string(512, '[') + std::string(512, ']')).has_value());
  EXPECT_FALSE(JsonValue::try_parse(std::string(513, '[') + std::string(513, ']')).has_value());
}

}  // namespace
}  // namespace m3
