// Pages of HTML and conversations.
#include "base/check.h"
#include "base/file.h"
#include "text/chat.h"
#include "train/ingest/html.h"
#include "train/ingest/importer.h"

namespace m3::ingest {

namespace fs = std::filesystem;

namespace {

// The local file that `src` of a page names; empty for addresses and data in the page.
fs::path local_picture(const fs::path& page, std::string_view src) {
  if (src.find(':') != src.npos || src.starts_with("//")) return {};
  src = src.substr(0, src.find_first_of("?#"));
  return (page.parent_path() / decode_percent(src)).lexically_normal();
}

}  // namespace

void Importer::html(const Source& source) {
  const std::vector<fs::path> files = find_files(source.path, {".html", ".htm", ".xhtml"});
  std::vector<HtmlPage> pages;
  std::map<fs::path, int> uses;
  for (const fs::path& file : files) {
    pages.push_back(parse_html(to_utf8(read_file(file))));
    for (const HtmlPart& part : pages.back().parts) {
      if (!part.image.empty()) ++uses[local_picture(file, part.image)];
    }
  }
  for (size_t i = 0; i < files.size(); ++i) {
    data::Document document;
    document.id = fmt::format("{}:{}", source.name, fs::relative(files[i], source.path).string());
    document.source = source.name;
    document.licence = source.licence;
    document.lang = source.lang;
    document.item = document.id;
    bool has_picture = false;
    for (const HtmlPart& part : pages[i].parts) {
      if (const std::string text = clean_text(part.text); !text.empty()) {
        // An empty line stands between text and picture.
        document.segments.push_back(data::Segment::of_text((document.segments.empty() ? "" : "\n\n") + text, source.weight));
      }
      if (part.image.empty()) continue;
      const fs::path picture_path = local_picture(files[i], part.image);
      if (picture_path.empty() || !fs::is_regular_file(picture_path)) {
        drop("picture: not here");
      } else if (uses.at(picture_path) > options_.max_picture_uses) {
        drop("picture: decoration");
      } else if (std::optional<data::Picture> picture = load_picture(picture_path)) {
        document.segments.push_back(data::Segment::of_image(std::move(*picture)));
        has_picture = true;
      }
    }
    if (document.segments.empty()) {
      drop("empty");
    } else if (has_picture) {
      add(std::move(document));
    } else {
      std::string text;
      for (const data::Segment& segment : document.segments) text += segment.text;
      add_text(source, document.id, text);
    }
  }
}

std::vector<data::Segment> chat_segments(const JsonValue& conversation, float weight) {
  const JsonValue* list = conversation.find("messages");
  M3_CHECK(list != nullptr, "a conversation needs \"messages\"");
  const std::vector<Message> messages = read_messages(*list);
  const JsonValue* tool_list = conversation.find("tools");
  const std::vector<Tool> tools = tool_list != nullptr ? read_tools(*tool_list) : std::vector<Tool>();
  RenderOptions options;
  if (const JsonValue* mode = conversation.find("thinking_mode"); mode != nullptr && mode->is_string()) options.thinking_mode = mode->text();
  for (const Message& message : messages) {
    for (const ContentPart& part : message.content) {
      M3_CHECK(part.type == ContentPart::Type::kText, "conversations with media are not supported here");
    }
  }

  std::vector<data::Segment> segments;
  std::string done;  // what the segments hold so far
  const std::span<const Message> all(messages);
  for (size_t i = 0; i < messages.size(); ++i) {
    if (messages[i].role != "assistant") continue;
    options.add_generation_prompt = true;
    const std::string prompt = render_chat(all.first(i), tools, options);
    options.add_generation_prompt = false;
    const std::string full = render_chat(all.first(i + 1), tools, options);
    M3_CHECK(full.starts_with(prompt) && prompt.starts_with(done), "messages[{}]: the turn does not follow its prompt", i);
    const size_t end = full.rfind(chat_token::kTurnEnd) + chat_token::kTurnEnd.size();
    segments.push_back(data::Segment::of_text(prompt.substr(done.size()), 0, true));
    segments.push_back(data::Segment::of_text(full.substr(prompt.size(), end - prompt.size()), weight, true));
    done = full.substr(0, end);
  }
  M3_CHECK(!segments.empty(), "a conversation without an assistant's turn has no target");
  return segments;
}

void Importer::chats(const Source& source) {
  for (const fs::path& file : find_files(source.path, {".jsonl"})) {
    const std::string text = read_file(file);
    size_t number = 0;
    for (size_t at = 0; at < text.size(); ++number) {
      const size_t end = std::min(text.find('\n', at), text.size());
      const std::string_view line = std::string_view(text).substr(at, end - at);
      at = end + 1;
      if (line.find_first_not_of(" \t\r") == line.npos) continue;
      data::Document document;
      document.id = fmt::format("{}:{}#{}", source.name, file.filename().string(), number);
      document.source = source.name;
      document.licence = source.licence;
      document.lang = source.lang;
      try {
        document.segments = chat_segments(JsonValue::parse(line, document.id), source.weight);
      } catch (const Error& error) {
        M3_FAIL("{}: line {}: {}", file.string(), number + 1, error.what());  // a mistake in training data is not skipped
      }
      writer_.add(document);
    }
  }
}

}  // namespace m3::ingest
