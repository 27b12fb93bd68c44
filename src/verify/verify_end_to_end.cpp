// End-to-end goldens (tests/golden/README.md, end_to_end): messages and picture files to prompt, ids, grids and the
// greedy answer, through the code that m3 run and the server use.
#include <nlohmann/json.hpp>

#include "engine/chat_prompt.h"
#include "engine/session.h"
#include "verify/suites.h"

namespace m3::verify {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

// bf16 compute is compared where the first token's lead is above this (README).
constexpr double kSureFirstMargin = 0.3;

std::vector<ChatMedia> load_media(const ordered_json& messages, const fs::path& folder) {
  std::vector<ChatMedia> media;
  for (const ordered_json& message : messages) {
    const ordered_json content = message.value("content", ordered_json());
    if (!content.is_array()) continue;
    for (const ordered_json& part : content) {
      if (part.value("type", "") == "image") media.push_back(chat_image(preprocess_image_file(folder / part.at("file").get<std::string>())));
      if (part.value("type", "") == "video") media.push_back(chat_video(preprocess_video_file(folder / part.at("file").get<std::string>())));
    }
  }
  return media;
}

void check_prompt(const ordered_json& entry, const ChatPrompt& prompt, std::span<const ChatMedia> media) {
  const auto want_text = entry.at("prompt").get<std::string>();
  M3_CHECK(prompt.text == want_text, "prompt '{}', want '{}'", prompt.text, want_text);
  const auto want_ids = entry.at("ids").get<std::vector<int32_t>>();
  M3_CHECK(prompt.ids == want_ids, "{} ids differ from the {} wanted", prompt.ids.size(), want_ids.size());
  const ordered_json& grids = entry.at("grids");
  M3_CHECK(grids.size() == media.size(), "{} media, want {}", media.size(), grids.size());
  for (size_t i = 0; i < media.size(); ++i) {
    const Grid& grid = media[i].grid;
    M3_CHECK(ordered_json({grid.t, grid.h, grid.w}) == grids[i], "grid {} is ({}, {}, {}), want {}", i, grid.t, grid.h, grid.w,
             grids[i].dump());
  }
}

std::vector<int32_t> greedy_answer(const Checkpoint& checkpoint, const Tokenizer& tokenizer, const ChatPrompt& prompt,
                                   std::span<const ChatMedia> media, int64_t count, DType dtype) {
  SessionOptions options;
  options.dtype = dtype;
  options.context_tokens = static_cast<int64_t>(prompt.ids.size()) + count;
  options.progress = Progress::Mode::kOff;
  GenerationRequest request;
  request.prompt = prompt.ids;
  request.sampling.temperature = 0;
  request.max_tokens = count;
  request.stop_ids = {tokenizer.require_added_id(chat_token::kTurnEnd)};
  for (const ChatMedia& item : media) {
    request.media.push_back(item.input);
    options.max_vision_patches = std::max(options.max_vision_patches,
                                          vision_pass_patches(*checkpoint.config().vision, request.media.back().grid));
  }
  Session session(checkpoint, tokenizer, options);
  std::vector<int32_t> answer;
  session.engine().submit(std::move(request), [&](const GenerationEvent& event) {
    if (event.kind == GenerationEvent::Kind::kToken) answer.push_back(event.token);
  });
  while (session.engine().step()) {
  }
  return answer;
}

std::string check_case(const ordered_json& entry, const fs::path& goldens, DType dtype) {
  const fs::path folder = goldens / "models" / entry.at("model").get<std::string>();
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const Tokenizer tokenizer = Tokenizer::load(folder);
  const auto json = [&](const char* key) { return JsonValue::parse(entry.at(key).dump(), key); };
  const std::vector<Message> messages = read_messages(json("messages"));
  const std::vector<Tool> tools = read_tools(json("tools"));
  RenderOptions render;
  if (!entry.at("thinking_mode").is_null()) render.thinking_mode = entry.at("thinking_mode");
  const std::vector<ChatMedia> media = load_media(entry.at("messages"), goldens / "media");
  const ChatPrompt prompt = build_chat_prompt(tokenizer, messages, tools, render, media);
  check_prompt(entry, prompt, media);

  const auto want = entry.at("answer_ids").get<std::vector<int32_t>>();
  const double first_margin = entry.at("first_margin");
  const bool exact = dtype == DType::kF32;
  if (!exact && first_margin <= kSureFirstMargin) return "prompt equal; first token too close to compare in bf16";
  const auto count = static_cast<int64_t>(exact ? want.size() : 1);
  const std::vector<int32_t> answer = greedy_answer(checkpoint, tokenizer, prompt, media, count, dtype);
  for (int64_t i = 0; i < count; ++i) {
    M3_CHECK(i < static_cast<int64_t>(answer.size()) && answer[i] == want[i], "answer token {} is {}, want {}", i,
             i < static_cast<int64_t>(answer.size()) ? answer[i] : -1, want[i]);
  }
  if (exact) {
    const auto want_text = entry.at("answer").get<std::string>();
    M3_CHECK(tokenizer.decode(answer) == want_text, "answer '{}', want '{}'", tokenizer.decode(answer), want_text);
  }
  return fmt::format("{} prompt tokens, {} media, {} answer tokens equal", prompt.ids.size(), media.size(), count);
}

}  // namespace

bool verify_end_to_end(const fs::path& file, const ordered_json& document, Report& report) {
  if (!document.is_array() || document.empty() || !document[0].contains("answer_ids")) return false;
  // The models and media lie in the folders beside the one of the file.
  const fs::path goldens = fs::absolute(file).parent_path().parent_path();
  for (const ordered_json& entry : document) {
    const std::string name = "end_to_end/" + entry.at("name").get<std::string>();
    if (!report.options().device.is_cpu()) {
      report.skip(name, "whole models run on the CPU so far");
      continue;
    }
    report.run(name, [&] { return check_case(entry, goldens, report.options().dtype); });
  }
  return true;
}

}  // namespace m3::verify
