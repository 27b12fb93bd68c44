// Any model output: the events add up to the result, whole and byte by byte, and arguments are
// JSON. Input: one byte that chooses the prompt's tail, then text in which the bytes 1 to 4 are
// markers.
#include <cstdlib>

#include "base/check.h"
#include "text/output_parser.h"
#include "text/utf8.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

const std::vector<m3::Tool>& tools() {
  static const std::vector<m3::Tool> list = m3::read_tools(m3::JsonValue::parse(R"##([
    {"function":{"name":"f","parameters":{"properties":{"a":{"type":"string"},"b":{"type":["string","null"]},
      "c":{"type":"array","items":{"type":"integer"}},"d":{"type":"object","properties":{"a":{"type":"number"}}},
      "e":{"type":"boolean"},"g":{"$ref":"#/properties/d"},"h":{},"i":{"type":["array","string"]}}}}},
    {"function":{"name":"g"}}])##",
                                                                                "tools"));
  return list;
}

m3::ParsedOutput parse(std::string_view input, std::string_view tail, size_t piece_bytes) {
  m3::OutputParser parser(tools(), tail);
  std::vector<m3::OutputEvent> events;
  while (!input.empty()) {
    if (input[0] >= 1 && input[0] <= 4) {
      parser.push_marker(static_cast<m3::OutputMarker>(input[0] - 1), events);
      input.remove_prefix(1);
      continue;
    }
    size_t length = 0;
    while (length < std::min(piece_bytes, input.size()) &&
           !(input[length] >= 1 && input[length] <= 4))
      ++length;
    parser.push_text(input.substr(0, length), events);
    input.remove_prefix(length);
  }
  parser.finish(events);
  const m3::ParsedOutput& result = parser.result();

  std::string reasoning, content, arguments;
  size_t num_calls = 0;
  for (const m3::OutputEvent& event : events) {
    switch (event.kind) {
      case m3::OutputEvent::Kind::kReasoning:
        reasoning += event.text;
        break;
      case m3::OutputEvent::Kind::kContent:
        content += event.text;
        break;
      case m3::OutputEvent::Kind::kCallBegin:
        require(event.call == static_cast<int>(num_calls) &&
                event.text == result.tool_calls.at(num_calls).name);
        arguments.clear();
        break;
      case m3::OutputEvent::Kind::kCallArguments:
        arguments += event.text;
        break;
      case m3::OutputEvent::Kind::kCallEnd:
        require(m3::JsonValue::parse(arguments, "deltas") ==
                result.tool_calls.at(num_calls++).arguments);
        break;
    }
  }
  require(num_calls == result.tool_calls.size());
  require(reasoning == result.reasoning.value_or("") && content == result.content.value_or(""));
  return result;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view text(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (m3::utf8_find_invalid(text) != text.npos) return 0;  // the decoder gives valid text only
  const std::string_view tail = data[0] % 2 == 0 ? "<mm:think>" : "";
  const m3::ParsedOutput whole = parse(text, tail, SIZE_MAX), bytes = parse(text, tail, 1);
  require(whole.reasoning == bytes.reasoning && whole.content == bytes.content &&
          whole.complete == bytes.complete);
  require(whole.parse_error == bytes.parse_error &&
          whole.tool_calls.size() == bytes.tool_calls.size());
  for (size_t i = 0; i < whole.tool_calls.size(); ++i) {
    require(whole.tool_calls[i].arguments == bytes.tool_calls[i].arguments);
  }
  return 0;
}
