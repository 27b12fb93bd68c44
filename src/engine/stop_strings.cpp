#include "engine/stop_strings.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace m3 {

namespace {

// Length of the longest suffix of `text` that begins `stop`.
size_t open_suffix(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  }
  return 0;
}

}  // namespace

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {
  for (const std::string& stop : stops_) M3_CHECK(!stop.empty(), "a stop string is empty");
}

std::string StopStrings::push(std::string_view text) {
  if (found_) return {};
  held_ += text;
  size_t first = std::string::npos, open = 0;
  for (const std::string& stop : stops_) {
    if (const size_t at = held_.find(stop); at < first) {
      first = at;
      found_string_ = stop;
    }
    open = std::max(open, open_suffix(held_, stop));
  }
  if (first != std::string::npos) {
    found_ = true;
    held_.resize(first);
    return std::exchange(held_, {});
  }
  std::string sure = held_.substr(0, held_.size() - open);
  held_.erase(0, sure.size());
  return sure;
}

std::string StopStrings::finish() { return std::exchange(held_, {}); }

}  // namespace m3
