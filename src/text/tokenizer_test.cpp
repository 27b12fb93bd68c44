#include "text/tokenizer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <thread>

#include "base/check.h"
#include "base/rng.h"
#include "text/json_value.h"

namespace m3 {
namespace {

// The character that stands for a byte in tokenizer.json, as UTF-8.
std::string entry_of_byte(int byte) {
  const auto itself = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  int character = byte, next = 256;
  for (int b = 0; b <= byte && !itself(byte); ++b) {
    if (!itself(b)) character = next++;
  }
  if (character < 0x80) return std::string(1, static_cast<char>(character));
  return {static_cast<char>(0xC0 | character >> 6), static_cast<char>(0x80 | (character & 0x3F))};
}

// A tokenizer whose ids 0..255 are the bytes, with merges of ASCII texts ("a b") and added tokens.
struct Recipe {
  std::vector<std::string> merges;
  std::string pre_tokenizer = R"({"type":"ByteLevel","add_prefix_space":false,"use_regex":false})";
  std::string added = "[]";
  std::string extra = "";

  std::string json() const {
    JsonValue vocab = JsonValue::object();
    int64_t id = 0;
    for (int byte = 0; byte < 256; ++byte) vocab.set(entry_of_byte(byte), JsonValue::integer(id++));
    JsonValue list = JsonValue::array();
    for (const std::string& merge : merges) {
      list.push_back(JsonValue::string(merge));
      const size_t space = merge.find(' ');
      const std::string result = merge.substr(0, space) + merge.substr(space + 1);
      if (vocab.find(result) == nullptr) vocab.set(result, JsonValue::integer(id++));
    }
    return R"({"version":"1.0","model":{"type":"BPE","vocab":)" + vocab.dump() + R"(,"merges":)" +
           list.dump() + R"(},"pre_tokenizer":)" + pre_tokenizer + R"(,"added_tokens":)" + added +
           extra + "}";
  }
};

std::string split_step(const std::string& pattern,
                       const std::string& rest = R"("behavior":"Isolated")") {
  return R"({"type":"Sequence","pretokenizers":[{"type":"Split","pattern":{"Regex":)" +
         JsonValue::string(pattern).dump() + "}," + rest +
         R"(},{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]})";
}

std::string refusal(const std::string& json) {
  try {
    Tokenizer::from_json(json, "file");
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// The definition: look through all pairs, merge one, begin anew.
std::vector<std::string> merge_slowly(const std::string& text,
                                      const std::vector<std::string>& merges) {
  std::map<std::string, size_t> rank;
  for (size_t i = 0; i < merges.size(); ++i) rank[merges[i]] = i;
  std::vector<std::string> parts;
  for (char c : text) parts.emplace_back(1, c);
  while (true) {
    size_t best = SIZE_MAX, at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i) {
      const auto found = rank.find(parts[i] + " " + parts[i + 1]);
      if (found != rank.end() && found->second < best) {
        best = found->second;
        at = i;
      }
    }
    if (best == SIZE_MAX) return parts;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + static_cast<long>(at) + 1);
  }
}

TEST(Tokenizer, merges_of_short_and_long_pieces_follow_the_definition) {
  const uint64_t seed = 20260;
  Philox random(seed);
  for (int round = 0; round < 60; ++round) {
    Recipe recipe;  // random merges over three letters, each built from earlier ones
    std::vector<std::string> entries = {"a", "b", "c"};
    for (int i = 0; i < 25; ++i) {
      const std::string left = entries[random.below(entries.size())],
                        right = entries[random.below(entries.size())];
      if (left.size() + right.size() > 12) continue;
      recipe.merges.push_back(left + " " + right);
      entries.push_back(left + right);
    }
    const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
    for (size_t length : {1, 2, 5, 16, 17, 47, 48, 49, 200}) {
      std::string text;
      while (text.size() < length) text += static_cast<char>('a' + random.below(3));
      std::vector<std::string> got;
      for (int32_t id : tokenizer.encode(text)) got.emplace_back(tokenizer.bytes(id));
      EXPECT_EQ(got, merge_slowly(text, recipe.merges))
          << "seed " << seed << " round " << round << ": " << text;
      EXPECT_EQ(tokenizer.encode(text), tokenizer.encode(text))
          << "the cache must not change a result";
    }
  }
}

TEST(Tokenizer, long_words_take_linear_time) {
  Recipe recipe;
  std::string entry = "a";
  for (int i = 0; i < 10; ++i) {
    recipe.merges.push_back(entry + " " + entry);
    entry += entry;
  }
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  const auto start = std::chrono::steady_clock::now();
  const auto ids = tokenizer.encode(std::string(1 << 20, 'a'));
  EXPECT_EQ(ids, std::vector<int32_t>(1 << 10, 256 + 9));
  // A quadratic encoder would need hours.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(Tokenizer, every_byte_goes_there_and_back) {
  const Tokenizer tokenizer = Tokenizer::from_json(Recipe().json());
  for (int byte = 0; byte < 256; ++byte) {
    ASSERT_EQ(tokenizer.bytes(byte), std::string(1, static_cast<char>(byte)));
  }
  const std::string text("z\0é中😀\xEF\xBB\xBF", 14);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  EXPECT_EQ(tokenizer.size(), 256);
  EXPECT_EQ(tokenizer.bytes(256), "");
  EXPECT_EQ(tokenizer.bytes(-1), "");
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{65, -5, 1 << 30, 66}), "AB");
}

TEST(Tokenizer, added_tokens_can_be_switched_off) {
  Recipe recipe;
  recipe.added = R"([{"id":300,"content":"[e~[","special":true},{"id":301,"content":"<x>"}])";
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  EXPECT_EQ(tokenizer.encode("a[e~[<x>"), (std::vector<int32_t>{97, 300, 301}));
  EXPECT_EQ(tokenizer.encode("[e~[", {.added_tokens = false}),
            (std::vector<int32_t>{91, 101, 126, 91}));
  EXPECT_EQ(tokenizer.added_id("<x>"), 301);
  EXPECT_EQ(tokenizer.added_id("<y>"), std::nullopt);
  EXPECT_TRUE(tokenizer.is_special(300));
  EXPECT_FALSE(tokenizer.is_special(301));
  EXPECT_TRUE(tokenizer.is_added(301));
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{97, 300, 301}, true), "a<x>");
  EXPECT_THROW(tokenizer.require_added_id("<mm:think>"), Error);
}

TEST(Tokenizer, no_added_token_touches_a_plain_range) {
  Recipe recipe;
  recipe.added = R"([{"id":300,"content":"[e~[","special":true},{"id":301,"content":"[["}])";
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  const std::string text = "[e~[a[e~[[[b[e~[";  // a marker, a user's text from byte 5 to 12, a marker
  const TextRange user = {5, 12};
  EXPECT_EQ(tokenizer.encode(text, {.plain = std::span(&user, 1)}),
            (std::vector<int32_t>{300, 97, 91, 101, 126, 91, 91, 91, 98, 300}));
  const TextRange inside = {7, 8};  // one byte of it is enough
  EXPECT_EQ(tokenizer.encode(text, {.plain = std::span(&inside, 1)}),
            (std::vector<int32_t>{300, 97, 91, 101, 126, 301, 91, 98, 300}));
  const TextRange empty = {6, 6};
  EXPECT_EQ(tokenizer.encode(text, {.plain = std::span(&empty, 1)}), tokenizer.encode(text));
}

TEST(Tokenizer, invalid_text_is_refused_with_its_offset) {
  const Tokenizer tokenizer = Tokenizer::from_json(Recipe().json());
  for (const char* text :
       {"abc\xff", "abc\xE4\xB8", "abc\xED\xA0\x80", "abc\xC0\x80", "abc\xF4\x90\x80\x80"}) {
    try {
      tokenizer.encode(text);
      ADD_FAILURE() << "encoded invalid text";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("byte 3"), std::string::npos) << error.what();
    }
  }
}

TEST(Tokenizer, a_build_without_pcre2_names_the_package) {
  if (Tokenizer::can_encode()) GTEST_SKIP() << "built with PCRE2";
  Recipe recipe;
  recipe.pre_tokenizer = split_step("a");
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  EXPECT_EQ(tokenizer.decode(std::vector<int32_t>{97}), "a");
  try {
    tokenizer.encode("a");
    ADD_FAILURE() << "encoded";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("libpcre2-dev"), std::string::npos) << error.what();
  }
}

TEST(Tokenizer, may_be_used_by_several_threads) {
  if (!Tokenizer::can_encode()) GTEST_SKIP() << "built without PCRE2";
  Recipe recipe;
  recipe.merges = {"a b", "b c", "ab c"};
  recipe.pre_tokenizer = split_step("[a-c]+|.");
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  std::string text;
  for (int i = 0; i < 2000; ++i) text += i % 7 == 0 ? "abc " : "bcab.";
  const auto want = tokenizer.encode(text);
  std::vector<std::vector<int32_t>> got(4);
  std::vector<std::thread> threads;
  for (auto& ids : got) threads.emplace_back([&] { ids = tokenizer.encode(text); });
  for (auto& thread : threads) thread.join();
  for (const auto& ids : got) EXPECT_EQ(ids, want);
}

TEST(Tokenizer, white_space_is_not_the_mongolian_separator) {
  if (!Tokenizer::can_encode()) GTEST_SKIP() << "built without PCRE2";
  Recipe recipe;
  recipe.pre_tokenizer = split_step("\\s+|\\S+");
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  EXPECT_EQ(tokenizer.split("a\u180Eb\u3000c"),
            (std::vector<std::string>{"a\u180Eb", "\u3000", "c"}));
}

TEST(Tokenizer, patterns_that_match_nothing_cut_between_characters) {
  if (!Tokenizer::can_encode()) GTEST_SKIP() << "built without PCRE2";
  Recipe recipe;
  recipe.pre_tokenizer = split_step("x*");
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  EXPECT_EQ(tokenizer.split("axxb"), (std::vector<std::string>{"a", "xx", "b"}));
}

TEST(Tokenizer, a_hostile_pattern_ends_with_an_error) {
  if (!Tokenizer::can_encode()) GTEST_SKIP() << "built without PCRE2";
  Recipe recipe;
  recipe.pre_tokenizer = split_step("(?:a|aa)+[bc]");
  const Tokenizer tokenizer = Tokenizer::from_json(recipe.json());
  EXPECT_THROW(tokenizer.encode(std::string(64, 'a')), Error);
}

TEST(Tokenizer, patterns_that_mean_something_else_in_pcre2_are_refused) {
  for (const char* pattern : {"\\p{N}{1,3}+", "[a[b]]", "[a&&b]", "\\h+", "(?m)a.b", "(?s:.)"}) {
    Recipe recipe;
    recipe.pre_tokenizer = split_step(pattern);
    EXPECT_NE(refusal(recipe.json()).find(pattern), std::string::npos)
        << pattern << ": " << refusal(recipe.json());
  }
  for (const char* pattern :
       {"\\p{N}{1,3}", "\\p{L}+", "[]a]+", "[^]a]+", "(?i:'s|'t)", "(?!\\S)|(?<=a)b|(?:c)"}) {
    Recipe recipe;
    recipe.pre_tokenizer = split_step(pattern);
    EXPECT_EQ(refusal(recipe.json()), "") << pattern;
  }
}

TEST(Tokenizer, refusals_name_the_file_and_the_fault) {
  const auto expect = [](const Recipe& recipe, const std::string& word) {
    const std::string message = refusal(recipe.json());
    EXPECT_NE(message.find(word), std::string::npos) << message;
    EXPECT_EQ(message.substr(0, 5), "file:") << message;
  };
  Recipe recipe;
  recipe.extra = R"(,"normalizer":{"type":"Lowercase"})";
  expect(recipe, "Lowercase");
  recipe.extra = R"(,"decoder":{"type":"Fuse"})";
  expect(recipe, "Fuse");
  recipe.extra = "";
  recipe.added = R"([{"id":256,"content":"x","special":1}])";
  expect(recipe, "special");
  recipe.added = R"([{"id":7000000,"content":"<x>"}])";
  expect(recipe, "7000000");
  recipe.added = "[]";
  recipe.pre_tokenizer = R"({"type":"Sequence","pretokenizers":[]})";
  expect(recipe, "ByteLevel");
  recipe.pre_tokenizer =
      R"({"type":"Sequence","pretokenizers":[{"type":"ByteLevel"},{"type":"Digits"}]})";
  expect(recipe, "Digits");
  if (Tokenizer::can_encode()) {
    recipe.pre_tokenizer = split_step("(");
    expect(recipe, "does not compile");
  }
  recipe.pre_tokenizer = split_step("a", R"("behavior":"Isolated","invert":"no")");
  expect(recipe, "invert");
  EXPECT_THROW(Tokenizer::load("/nonexistent/tokenizer.json"), Error);
}

// --- streaming

TEST(StreamDecoder, any_cut_of_valid_text_gives_whole_characters) {
  const Tokenizer tokenizer = Tokenizer::from_json(Recipe().json());
  const std::string text = "aé中😀z";
  StreamDecoder decoder(tokenizer);
  std::string all;
  for (char c : text) {
    const std::string piece = decoder.push(static_cast<unsigned char>(c));
    EXPECT_TRUE(piece.empty() || (piece[0] & 0xC0) != 0x80) << "a piece begins inside a character";
    all += piece;
  }
  EXPECT_EQ(all, text);
  EXPECT_EQ(decoder.finish(), "");
}

TEST(StreamDecoder, bad_bytes_are_replaced_as_soon_as_they_are_known_to_be_bad) {
  const Tokenizer tokenizer = Tokenizer::from_json(Recipe().json());
  StreamDecoder decoder(tokenizer);
  const std::string kBad = "\uFFFD";
  EXPECT_EQ(decoder.push(0xE4), "");
  EXPECT_EQ(decoder.push('a'), kBad + "a");
  EXPECT_EQ(decoder.push(0x80), kBad);
  EXPECT_EQ(decoder.push(0xED), "");
  EXPECT_EQ(decoder.push(0xA0), kBad + kBad);  // a surrogate: ED cannot be followed by A0
  EXPECT_EQ(decoder.push(0xF0), "");
  EXPECT_EQ(decoder.push(0x9F), "");
  EXPECT_EQ(decoder.push(0x98), "");
  EXPECT_EQ(decoder.finish(), kBad);  // one maximal subpart
  EXPECT_EQ(decoder.push('b'), "b");
}

}  // namespace
}  // namespace m3
