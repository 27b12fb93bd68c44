// Stop strings of a request (serving.md §3.2): the answer ends before the first of them, whatever pieces
// the text arrives in. What could be the beginning of one is held back, and only that.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

class StopStrings {
 public:
  StopStrings() = default;
  explicit StopStrings(std::vector<std::string> stops);  // none may be empty

  // Returns the text that is now certain to belong to the answer. After a match: found() is true and
  // everything from the stop string on is dropped.
  std::string push(std::string_view text);
  std::string finish();  // what was held back
  bool found() const { return found_; }
  const std::string& found_string() const { return found_string_; }  // empty: none

 private:
  std::vector<std::string> stops_;
  std::string held_, found_string_;
  bool found_ = false;
};

}  // namespace m3
