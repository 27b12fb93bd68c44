// HTML pages to text and pictures in their order. Tolerant: any bytes give a page.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace m3::ingest {

struct HtmlPart {
  std::string text;   // text before the picture; empty lines between blocks, "- " before list items
  std::string image;  // src of the picture behind it, as written; empty: none (the last part)
  std::string alt;
};

struct HtmlPage {
  std::string title;
  std::vector<HtmlPart> parts;
};

// Scripts, styles, forms and navigation (elements nav, header, footer; classes that documentation tools give to
// navigation) are left out; white space is collapsed except in pre; entities are decoded.
HtmlPage parse_html(std::string_view html);

std::string decode_entities(std::string_view text);
std::string decode_percent(std::string_view text);  // "%20" to " "

}  // namespace m3::ingest
