// Parts of the engine that need no model. Whole requests run in tests/golden end to end and in generation_test.cpp.
#include <gtest/gtest.h>

#include "engine/page_pool.h"
#include "engine/stop_strings.h"

namespace m3 {
namespace {

TEST(PagePool, hands_out_every_page_once_lowest_first_and_then_refuses) {
  PagePool pool(3);
  EXPECT_EQ(pool.take(), 0);
  EXPECT_EQ(pool.take(), 1);
  EXPECT_EQ(pool.take(), 2);
  EXPECT_THROW(pool.take(), Error);
  pool.give_back(1);
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.take(), 1);
}

// The answer of a stream cut into pieces of `size` bytes.
std::string answer(const std::vector<std::string>& stops, std::string_view text, size_t size, bool* found) {
  StopStrings stop(stops);
  std::string out;
  for (size_t i = 0; i < text.size() && !stop.found(); i += size) out += stop.push(text.substr(i, size));
  *found = stop.found();
  return out + stop.finish();
}

TEST(StopStrings, end_the_answer_at_the_first_of_them_however_the_text_is_cut) {
  const std::vector<std::string> stops = {"END", "##", "ENDING"};
  for (size_t size : {1, 2, 3, 5, 100}) {
    bool found = false;
    EXPECT_EQ(answer(stops, "one E two EN three ENDING four", size, &found), "one E two EN three ") << size;
    EXPECT_TRUE(found);
    EXPECT_EQ(answer(stops, "a#b##c END", size, &found), "a#b") << size;
    EXPECT_TRUE(found);
    EXPECT_EQ(answer(stops, "nothing here E#", size, &found), "nothing here E#") << size;
    EXPECT_FALSE(found);
  }
}

TEST(StopStrings, hold_back_only_what_could_begin_one) {
  StopStrings stop({"abcab!"});
  EXPECT_EQ(stop.push("xabcab"), "x");
  EXPECT_EQ(stop.push("cab"), "abc");
  EXPECT_EQ(stop.push("y"), "abcaby");
  EXPECT_THROW(StopStrings({""}), Error);
}

TEST(StopStrings, without_any_pass_everything_at_once) {
  StopStrings stop;
  EXPECT_EQ(stop.push("text"), "text");
  EXPECT_EQ(stop.finish(), "");
}

}  // namespace
}  // namespace m3
