// Any text as {"messages": ..., "tools": ...}: refused with an Error, or rendered to a prompt whose
// media marks can be expanded.
#include <cstdlib>

#include "base/check.h"
#include "text/chat.h"
#include "text/placeholders.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto request =
        m3::JsonValue::parse(std::string_view(reinterpret_cast<const char*>(data), size), "fuzz");
    const m3::JsonValue *messages = request.find("messages"), *tools = request.find("tools"),
                        *mode = request.find("mode");
    if (messages == nullptr) return 0;
    m3::RenderOptions options;
    if (mode != nullptr && mode->is_string()) options.thinking_mode = mode->text();
    const std::string prompt =
        m3::render_chat(m3::read_messages(*messages),
                        m3::read_tools(tools == nullptr ? m3::JsonValue() : *tools), options);
    if (!prompt.starts_with("]~!b[]~b]system\n")) std::abort();
    const std::vector<m3::ImageSpan> images(1, {2});
    const std::vector<m3::VideoSpan> videos(1, {2, 1, {0.0, 0.5}});
    m3::expand_placeholders(prompt, images, videos);
  } catch (const m3::Error&) {
  }
  return 0;
}
