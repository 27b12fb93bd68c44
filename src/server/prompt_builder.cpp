#include "server/prompt_builder.h"

#include <chrono>
#include <limits>
#include <random>

#include "base/check.h"
#include "base/threads.h"
#include "media/sniff.h"
#include "server/field_reader.h"
#include "server/guides.h"

namespace m3 {

namespace {

constexpr size_t kGrammarsKept = 64;
constexpr int64_t kEncodedBytes = 64 << 20;  // some 9 bytes a token with its text: several million tokens of chats

ChatMedia decode(const MediaSource& source) {
  const SerialScope serial;  // workers are parallel among themselves, and the model needs the cores
  const auto bytes = std::as_bytes(std::span(source.bytes));
  const MediaKind kind = sniff_media(bytes);
  try {
    if (source.is_video) {
      M3_CHECK(is_film(kind), "want a film, the file is {}", media_kind_name(kind));
      return chat_video(preprocess_video(bytes, {.target_fps = source.fps}));
    }
    M3_CHECK(is_picture(kind), "want a picture (JPEG, PNG, WebP or GIF), the file is {}",
             media_kind_name(kind));
    return chat_image(preprocess_image(bytes));
  } catch (const Error& error) {
    refuse_field(source.where, error.what());
  }
}

}  // namespace

PromptBuilder::PromptBuilder(const Tokenizer& tokenizer, std::vector<int32_t> stop_ids)
    : tokenizer_(tokenizer), stop_ids_(std::move(stop_ids)), encoded_(kEncodedBytes) {}

BuiltPrompt PromptBuilder::build_chat(const ApiRequest& request) {
  BuiltPrompt built;
  std::vector<ChatMedia> media;
  for (const MediaSource& source : request.media) {
    const auto start = std::chrono::steady_clock::now();
    media.push_back(decode(source));
    built.media_seconds.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    (source.is_video ? built.video_tokens : built.image_tokens) += media.back().grid.num_tokens();
    built.media.push_back(media.back().input);
  }
  RenderOptions options;
  options.thinking_mode = request.thinking_mode;
  options.model_identity = request.model_identity;
  try {
    ChatPrompt prompt =
        build_chat_prompt(tokenizer_, request.messages, request.tools, options, media, &encoded_);
    built.text = std::move(prompt.text);
    built.ids = std::move(prompt.ids);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "messages");
  }
  return built;
}

BuiltPrompt PromptBuilder::build_plain(const RawPrompt& prompt) const {
  BuiltPrompt built;
  built.ids = prompt.ids;
  built.text = prompt.text;
  if (!prompt.ids.empty()) {
    built.text = tokenizer_.decode(prompt.ids);
    return built;
  }
  try {
    built.ids = tokenizer_.encode(prompt.text);
  } catch (const Error& error) {
    throw ApiError(400, error.what(), "prompt");
  }
  return built;
}

GenerationRequest PromptBuilder::generation(const ApiRequest& request, const BuiltPrompt& prompt,
                                            int64_t rest) {
  GenerationRequest generation;
  generation.prompt = prompt.ids;
  generation.media = prompt.media;
  generation.sampling = request.sampling;
  if (!request.has_seed)
    generation.sampling.seed = uint64_t{std::random_device{}()} << 32 | std::random_device{}();
  generation.max_tokens = std::min(request.max_tokens.value_or(rest), rest);
  generation.min_tokens = std::min(request.min_tokens, generation.max_tokens);
  generation.stop_ids = request.stop_token_ids;
  generation.num_logprobs = request.logprobs ? request.top_logprobs : -1;
  generation.guide = guide(request, prompt);
  auto& bias = generation.sampling.logit_bias;
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  if (request.ignore_eos) {
    for (const int32_t id : stop_ids_) bias.emplace_back(id, kNever);
  } else {
    generation.stop_ids.insert(generation.stop_ids.end(), stop_ids_.begin(), stop_ids_.end());
  }
  if (request.tool_choice.kind == ToolChoice::Kind::kNone && !request.tools.empty()) {
    bias.emplace_back(tokenizer_.require_added_id(chat_token::kNamespace), kNever);
  }
  return generation;
}

std::shared_ptr<TokenGuide> PromptBuilder::guide(const ApiRequest& request,
                                                 const BuiltPrompt& prompt) {
  using Kind = ToolChoice::Kind;
  const Kind choice = request.tool_choice.kind;
  const bool forced = choice == Kind::kRequired || choice == Kind::kNamed;
  const bool is_plain = !request.prompts.empty();
  const auto answer = [&](std::shared_ptr<const Grammar> grammar, bool at_once) {
    return AnswerGuide(std::move(grammar), tokenizer_, prompt.text,
                       at_once ? GrammarStart::kAtOnce : GrammarStart::kBehindReasoning);
  };
  if (forced) {
    // Who asks for thinking gets it before the call; in adaptive mode the call comes at once.
    return std::make_shared<GrammarGuide>(
        answer(tool_grammar(request), request.thinking_mode != "enabled"));
  }
  const bool may_call = choice == Kind::kAuto && !request.tools.empty();
  if (request.form.kind != AnswerForm::Kind::kText) {
    auto form = form_grammar(request.form);
    if (!may_call) return std::make_shared<GrammarGuide>(answer(std::move(form), is_plain));
    std::vector<AnswerGuide> guides = {answer(std::move(form), false),
                                       answer(tool_grammar(request), false)};
    return std::make_shared<EitherGuide>(std::move(guides));
  }
  bool strict = false;
  for (const Tool& tool : request.tools) {
    const JsonValue* flag = tool.function.find("strict");
    strict = strict || (flag != nullptr && flag->is_bool() && flag->as_bool());
  }
  if (!may_call || !strict) return nullptr;
  return std::make_shared<ToolBlockGuide>(tool_grammar(request),
                                          tokenizer_.require_added_id(chat_token::kNamespace));
}

std::shared_ptr<const Grammar> PromptBuilder::form_grammar(const AnswerForm& form) {
  try {
    switch (form.kind) {
      case AnswerForm::Kind::kJsonObject:
        return cached("object", [&] { return Grammar::json_object(trie()); });
      case AnswerForm::Kind::kRegex:
        return cached("regex " + form.regex, [&] { return Grammar::regex(trie(), form.regex); });
      case AnswerForm::Kind::kChoice:
        return Grammar::choice(trie(), form.choices);
      default:
        return cached("schema " + form.schema.dump(),
                      [&] { return Grammar::json_schema(trie(), form.schema); });
    }
  } catch (const Error& error) {
    refuse_field(form.where, error.what());
  }
}

std::shared_ptr<const Grammar> PromptBuilder::tool_grammar(const ApiRequest& request) {
  const bool named = request.tool_choice.kind == ToolChoice::Kind::kNamed;
  std::vector<Tool> tools;
  std::string key = request.parallel_tool_calls ? "calls" : "call";
  for (const Tool& tool : request.tools) {
    if (named && tool.name() != request.tool_choice.name) continue;
    tools.push_back(tool);
    key += " " + tool.function.dump();
  }
  const ToolCallRules rules{request.parallel_tool_calls,
                            tokenizer_.require_added_id(chat_token::kNamespace)};
  try {
    return cached(key, [&] { return Grammar::tool_calls(trie(), tools, rules); });
  } catch (const Error& error) {
    refuse_field("tools", error.what());
  }
}

std::shared_ptr<const TokenTrie> PromptBuilder::trie() {
  const std::lock_guard lock(mutex_);
  if (!trie_) trie_ = std::make_shared<const TokenTrie>(tokenizer_);
  return trie_;
}

// Two requests may compile the same grammar at the same time; no lock is held over that.
std::shared_ptr<const Grammar> PromptBuilder::cached(
    const std::string& key, const std::function<std::shared_ptr<const Grammar>()>& make) {
  {
    const std::lock_guard lock(mutex_);
    for (auto it = grammars_.begin(); it != grammars_.end(); ++it) {
      if (it->first != key) continue;
      grammars_.splice(grammars_.begin(), grammars_, it);
      return it->second;
    }
  }
  auto grammar = make();
  const std::lock_guard lock(mutex_);
  grammars_.emplace_front(key, grammar);
  if (grammars_.size() > kGrammarsKept) grammars_.pop_back();
  return grammar;
}

}  // namespace m3
