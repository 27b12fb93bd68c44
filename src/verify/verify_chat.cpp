// tests/golden/chat: messages to prompts byte for byte, and model output to reasoning, content and
// tool calls, whole and in pieces; tests/golden/media/prompt_expansion.json: placeholders of media.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "text/chat.h"
#include "text/output_parser.h"
#include "text/placeholders.h"
#include "verify/suites.h"

namespace m3::verify {

namespace fs = std::filesystem;

namespace {

// The cases are read with the product's own JSON reader: it keeps 5 and 5.0 apart and all digits.
const JsonValue& member(const JsonValue& object, std::string_view key) {
  const JsonValue* value = object.find(key);
  M3_CHECK(value != nullptr, "the golden has no '{}'", key);
  return *value;
}

std::optional<std::string> optional_text(const JsonValue& value) {
  return value.is_null() ? std::nullopt : std::optional(value.text());
}

void check_same(const std::string& what, const std::string& got, const std::string& want) {
  if (got == want) return;
  const size_t at = static_cast<size_t>(
      std::mismatch(got.begin(), got.end(), want.begin(), want.end()).first - got.begin());
  const size_t from = at < 30 ? 0 : at - 30;
  M3_FAIL("{} differs at byte {}: '{}', want '{}'", what, at, got.substr(from, 80),
          want.substr(from, 80));
}

// --- rendering

std::string render_case(const JsonValue& entry) {
  RenderOptions options;
  options.thinking_mode = optional_text(member(entry, "thinking_mode"));
  options.add_generation_prompt = member(entry, "add_generation_prompt").as_bool();
  options.model_identity = optional_text(member(entry, "model_identity"));
  return render_chat(read_messages(member(entry, "messages")), read_tools(member(entry, "tools")),
                     options);
}

std::string check_render(const JsonValue& entry) {
  std::string got, refusal;
  try {
    got = render_case(entry);
  } catch (const Error& error) {
    refusal = error.what();
  }
  if (entry.find("error") != nullptr) {
    M3_CHECK(!refusal.empty(), "rendered, but must fail: {}", member(entry, "error").text());
    return "refused: " + refusal;
  }
  M3_CHECK(refusal.empty(), "{}", refusal);
  check_same("the prompt", got, member(entry, "expected").text());
  return fmt::format("{} bytes equal", got.size());
}

// --- parsing

struct OutputPart {
  bool is_marker;
  OutputMarker marker;
  std::string text;
};

// Cuts an output where a marker is spelled, except inside the literal ranges.
std::vector<OutputPart> cut_output(const std::string& output, const JsonValue& literal) {
  constexpr std::string_view kMarkers[] = {chat_token::kNamespace, chat_token::kThinkOpen,
                                           chat_token::kThinkClose, chat_token::kTurnEnd};
  std::vector<OutputPart> parts;
  std::string text;
  const auto flush = [&] {
    if (!text.empty()) parts.push_back({false, {}, text});
    text.clear();
  };
  for (size_t at = 0; at < output.size();) {
    size_t found = 4;
    for (size_t i = 0; i < 4; ++i) {
      if (std::string_view(output).substr(at).starts_with(kMarkers[i])) found = i;
    }
    for (const JsonValue& range : literal.items()) {
      const bool overlaps =
          found < 4 &&
          range.items()[0].as_double() < static_cast<double>(at + kMarkers[found].size()) &&
          static_cast<double>(at) < range.items()[1].as_double();
      if (overlaps) found = 4;
    }
    if (found == 4) {
      text += output[at++];
      continue;
    }
    flush();
    parts.push_back({true, static_cast<OutputMarker>(found), {}});
    at += kMarkers[found].size();
  }
  flush();
  return parts;
}

std::string describe(const ParsedOutput& output) {
  JsonValue out = JsonValue::object();
  out.set("reasoning", output.reasoning ? JsonValue::string(*output.reasoning) : JsonValue());
  out.set("content", output.content ? JsonValue::string(*output.content) : JsonValue());
  JsonValue calls = JsonValue::array();
  for (const ToolCall& call : output.tool_calls) {
    JsonValue entry = JsonValue::object();
    entry.set("name", JsonValue::string(call.name));
    entry.set("arguments", call.arguments);
    calls.push_back(std::move(entry));
  }
  out.set("tool_calls", std::move(calls));
  out.set("complete", JsonValue::boolean(output.complete));
  return out.dump();
}

// What a client builds from the events alone.
ParsedOutput collect(const std::vector<OutputEvent>& events, bool complete) {
  ParsedOutput out;
  std::string reasoning, content;
  std::vector<std::string> arguments;
  for (const OutputEvent& event : events) {
    switch (event.kind) {
      case OutputEvent::Kind::kReasoning:
        reasoning += event.text;
        break;
      case OutputEvent::Kind::kContent:
        content += event.text;
        break;
      case OutputEvent::Kind::kCallBegin:
        M3_CHECK(event.call == static_cast<int>(out.tool_calls.size()),
                 "call {} begins in the place of {}", event.call, out.tool_calls.size());
        out.tool_calls.push_back({event.text, {}});
        arguments.emplace_back();
        break;
      case OutputEvent::Kind::kCallArguments:
        arguments.at(static_cast<size_t>(event.call)) += event.text;
        break;
      case OutputEvent::Kind::kCallEnd: {
        const size_t call = static_cast<size_t>(event.call);
        out.tool_calls.at(call).arguments =
            JsonValue::parse(arguments[call], "the argument deltas of a call");
        break;
      }
    }
  }
  if (!reasoning.empty()) out.reasoning = reasoning;
  if (!content.empty() || (complete && out.tool_calls.empty())) out.content = content;
  out.complete = complete;
  return out;
}

std::string check_parse(const JsonValue& entry) {
  const std::string want = member(entry, "expected").dump();
  const auto parts = cut_output(member(entry, "output").text(), member(entry, "literal"));
  const std::vector<Tool> tools = read_tools(member(entry, "tools"));
  constexpr size_t kPieces[] = {SIZE_MAX, 1, 2, 3, 7};
  for (size_t piece_bytes : kPieces) {
    OutputParser parser(tools, member(entry, "prompt_tail").text());
    std::vector<OutputEvent> events;
    for (const OutputPart& part : parts) {
      if (part.is_marker) parser.push_marker(part.marker, events);
      for (size_t at = 0; at < part.text.size();
           at += std::min(piece_bytes, part.text.size() - at)) {
        parser.push_text(std::string_view(part.text).substr(at, piece_bytes), events);
      }
    }
    parser.finish(events);
    const std::string how =
        piece_bytes == SIZE_MAX ? "" : fmt::format(" (in pieces of {} bytes)", piece_bytes);
    check_same("the result" + how, describe(parser.result()), want);
    check_same("what the events add up to" + how,
               describe(collect(events, parser.result().complete)), want);
  }
  return "equal whole and in pieces of 1, 2, 3 and 7 bytes";
}

// --- placeholders

std::string check_expansion(const JsonValue& entry) {
  std::vector<ImageSpan> images;
  std::vector<VideoSpan> videos;
  const auto number = [](const JsonValue& value) {
    return static_cast<int64_t>(value.as_double());
  };
  for (const JsonValue& grid : member(entry, "images").items()) {
    images.push_back(
        {number(grid.items()[0]) * number(grid.items()[1]) * number(grid.items()[2]) / 4});
  }
  for (const JsonValue& video : member(entry, "videos").items()) {
    const auto& grid = member(video, "grid").items();
    VideoSpan span{number(grid[0]), number(grid[1]) * number(grid[2]) / 4, {}};
    const JsonValue &fps = member(video, "fps"), &indices = member(video, "indices");
    for (int64_t step = 0; step < span.num_steps && fps.is_number() && indices.is_array(); ++step) {
      const size_t frame = std::min(static_cast<size_t>(2 * step), indices.size() - 1);
      span.seconds.push_back(indices.items()[frame].as_double() / fps.as_double());
    }
    videos.push_back(std::move(span));
  }
  std::string got, refusal;
  try {
    got = expand_placeholders(member(entry, "prompt").text(), images, videos);
  } catch (const Error& error) {
    refusal = error.what();
  }
  if (const JsonValue* error = entry.find("error")) {
    const std::string kind =
        error->text().substr(0, error->text().find('_'));  // image_count, video_count
    M3_CHECK(refusal.find(kind + " count") != refusal.npos,
             "want a refusal of the {} count, got '{}'", kind, refusal);
    return "refused: " + refusal;
  }
  M3_CHECK(refusal.empty(), "{}", refusal);
  check_same("the expanded prompt", got, member(entry, "expected").text());
  return fmt::format("{} bytes equal", got.size());
}

using Check = std::string (*)(const JsonValue&);

void verify_cases(const JsonValue& cases, const std::string& prefix, Check check, Report& report) {
  for (size_t i = 0; i < cases.size(); ++i) {
    const JsonValue& entry = cases.items()[i];
    const JsonValue* name = entry.find("name");
    report.run(prefix + (name != nullptr ? name->text() : std::to_string(i)),
               [&] { return check(entry); });
  }
}

}  // namespace

bool verify_chat(const fs::path& file, const nlohmann::ordered_json& document, Report& report) {
  const auto read = [&] { return JsonValue::parse(read_file(file), file.string()); };
  const bool is_list = document.is_array() && !document.empty() && document[0].is_object();
  if (is_list && document[0].contains("messages") &&
      document[0].contains("add_generation_prompt")) {
    verify_cases(read(), "chat/render/", check_render, report);
    return true;
  }
  if (is_list && document[0].contains("prompt_tail") && document[0].contains("output")) {
    verify_cases(read(), "chat/parse/", check_parse, report);
    return true;
  }
  if (document.is_object() && document.contains("cases") && document["cases"].is_array() &&
      !document["cases"].empty() && document["cases"][0].contains("prompt") &&
      document["cases"][0].contains("videos")) {
    verify_cases(member(read(), "cases"), "chat/placeholders/", check_expansion, report);
    return true;
  }
  return false;
}

}  // namespace m3::verify
