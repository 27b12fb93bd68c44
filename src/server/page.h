// The web page, built into the binary from src/server/page/index.html.
#pragma once
#include <string_view>

namespace m3 {

std::string_view page_html();

}  // namespace m3
