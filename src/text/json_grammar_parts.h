// Pieces of JSON texts and of M3's tool calls that all schemas share. What has no schema of its own
// is a rule: one state serves every place that calls it, and so does its mask.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "text/grammar_chars.h"
#include "text/grammar_machine.h"
#include "text/json_value.h"

namespace m3 {

class JsonGrammarParts {
 public:
  using Part = GrammarBuilder::Part;
  explicit JsonGrammarParts(GrammarBuilder& builder) : builder_(builder) {}

  Part space();  // between the parts of a JSON text: nothing, or a little
  Part colon() { return builder_.sequence({space(), builder_.literal(":"), space()}); }
  Part comma() { return builder_.sequence({space(), builder_.literal(","), space()}); }
  Part quoted(Part body) {
    return builder_.sequence({builder_.literal("\""), body, builder_.literal("\"")});
  }

  Part string();
  Part number();
  Part integer();
  Part boolean() { return builder_.either({builder_.literal("true"), builder_.literal("false")}); }
  Part any_value();
  Part any_array();
  Part any_object();
  Part constant(
      const JsonValue& value);  // as it is printed, with the white space that other values may have

  // [item, item, ...] with min to max items (max < 0: no end). item() is called once for each of
  // the first num_fixed items, in order, then for those that may repeat.
  Part list_of(const GrammarBuilder::MakePart& item, int64_t min, int64_t max,
               int64_t num_fixed = 1);

  // A text of any length without the characters of `forbidden`, and none of the names.
  Part none_of(const std::vector<std::string_view>& names, const CharSet& forbidden);

  Part text();  // any text, without quotes: a value in a tool call

 private:
  template <typename Make>
  Part shared(const char* name, Make make);

  GrammarBuilder& builder_;
  std::map<std::string, int> rules_;
};

}  // namespace m3
