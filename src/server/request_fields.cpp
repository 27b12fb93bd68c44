#include "server/request_fields.h"

#include <fmt/core.h>

#include <array>

#include "base/check.h"
#include "media/sniff.h"
#include "server/file_store.h"

namespace m3 {

void ThinkingFields::set(const std::string& path, const std::string& mode) {
  if (!mode_.empty() && mode_ != mode) {
    refuse_field(path,
                 fmt::format("asks for thinking '{}', but {} asks for '{}'", mode, path_, mode_));
  }
  mode_ = mode;
  path_ = path;
}

// The model knows no depth: every effort but none means that it thinks (api-20).
void ThinkingFields::set_effort(const std::string& path, const std::string& effort) {
  constexpr std::string_view kEfforts[] = {"minimal", "low", "medium", "high", "xhigh", "max"};
  if (effort == "none") return set(path, "disabled");
  for (const std::string_view known : kEfforts) {
    if (effort == known) return set(path, "enabled");
  }
  refuse_field(path, fmt::format("is '{}', want none, minimal, low, medium, high, xhigh or max",
                                 effort.substr(0, 64)));
}

void ThinkingFields::read_modes(FieldReader& fields) {
  if (const auto mode = fields.word("thinking_mode", {"enabled", "disabled", "adaptive"})) {
    set(fields.path("thinking_mode"), *mode);
  }
  if (const auto on = fields.boolean("enable_thinking")) {
    set(fields.path("enable_thinking"), *on ? "enabled" : "disabled");
  }
}

void ThinkingFields::read_thinking_object(FieldReader& fields) {
  const JsonValue* thinking = fields.object("thinking");
  if (thinking == nullptr) return;
  FieldReader inner(*thinking, fields.path("thinking"));
  const auto type = inner.word("type", {"enabled", "disabled", "adaptive"});
  if (!type)
    refuse_field(inner.path("type"), "is missing, want 'enabled', 'disabled' or 'adaptive'");
  set(inner.path("type"), *type);
}

void read_max_tokens(FieldReader& fields, std::initializer_list<std::string_view> keys,
                     ApiRequest& request) {
  std::string first;
  for (const std::string_view key : keys) {
    const auto value = fields.integer(key, 1, int64_t{1} << 31);
    if (!value) continue;
    if (request.max_tokens && *request.max_tokens != *value) {
      refuse_field(fields.path(key),
                   fmt::format("is {}, but {} is {}", *value, first, *request.max_tokens));
    }
    request.max_tokens = value;
    first = fields.path(key);
  }
}

void read_stop(FieldReader& fields, std::string_view key, ApiRequest& request) {
  const JsonValue* stop = fields.take(key);
  if (stop == nullptr) return;
  const std::string path = fields.path(key);
  const auto add = [&](const JsonValue& text, const std::string& where) {
    if (!text.is_string())
      refuse_field(where, fmt::format("is of type {}, want a string", text.kind_name()));
    if (text.text().empty() || text.text().size() > 256) {
      refuse_field(where, fmt::format("has {} bytes, want 1 to 256", text.text().size()));
    }
    request.stop.push_back(text.text());
  };
  if (!stop->is_array()) return add(*stop, path);
  if (stop->size() > 16)
    refuse_field(path, fmt::format("has {} entries, want at most 16", stop->size()));
  for (size_t i = 0; i < stop->size(); ++i) add(stop->items()[i], fmt::format("{}[{}]", path, i));
}

namespace {

void read_logit_bias(FieldReader& fields, const ModelInfo& info, ApiRequest& request) {
  const JsonValue* bias = fields.object("logit_bias");
  if (bias == nullptr) return;
  if (bias->size() > 1024) {
    refuse_field("logit_bias", fmt::format("has {} entries, want at most 1024", bias->size()));
  }
  FieldReader values(*bias, fields.path("logit_bias"));
  for (const std::string& key : bias->keys()) {
    const bool digits =
        !key.empty() && key.size() < 9 && key.find_first_not_of("0123456789") == std::string::npos;
    const int32_t id = digits ? static_cast<int32_t>(std::stol(key)) : -1;
    if (id < 0 || id >= info.num_ids) {
      refuse_field(values.path(key), fmt::format("is no token id, want 0 to {}", info.num_ids - 1));
    }
    if (const auto value = values.number(key, -100, 100)) {
      request.sampling.logit_bias.emplace_back(id, static_cast<float>(*value));
    }
  }
}

void read_stop_token_ids(FieldReader& fields, const ModelInfo& info, ApiRequest& request) {
  const JsonValue* ids = fields.array("stop_token_ids");
  if (ids == nullptr) return;
  for (size_t i = 0; i < ids->size(); ++i) {
    const JsonValue& id = ids->items()[i];
    const std::string where = fmt::format("{}[{}]", fields.path("stop_token_ids"), i);
    const bool fits = id.is_integer() && id.as_double() >= 0 && id.as_double() < info.num_ids;
    if (!fits) refuse_field(where, fmt::format("is no token id, want 0 to {}", info.num_ids - 1));
    request.stop_token_ids.push_back(static_cast<int32_t>(id.as_double()));
  }
}

}  // namespace

void read_common(FieldReader& fields, const ModelInfo& info, ApiRequest& request) {
  request.model = fields.text("model").value_or(info.id);
  bool known = request.model == info.id;
  for (const std::string& alias : info.aliases) known = known || request.model == alias;
  if (!known) {
    throw ApiError(404,
                   fmt::format("the model '{}' does not exist, this server has '{}'",
                               request.model.substr(0, 128), info.id),
                   "model", "model_not_found");
  }
  request.stream = fields.boolean("stream").value_or(false);
  SamplingParams& sampling = request.sampling;
  sampling.temperature =
      static_cast<float>(fields.number("temperature", 0, 100).value_or(info.temperature));
  sampling.top_p = static_cast<float>(fields.number("top_p", 0, 1).value_or(info.top_p));
  if (sampling.top_p == 0)
    sampling.top_k = 1, sampling.top_p = 1;  // the shortest list that there is
  const int64_t top_k =
      fields.integer("top_k", -1, 1 << 30).value_or(info.top_k);  // -1 is vLLM's "off"
  if (sampling.top_k != 1) sampling.top_k = static_cast<int>(std::max<int64_t>(0, top_k));
  sampling.min_p = static_cast<float>(fields.number("min_p", 0, 1).value_or(0));
  sampling.presence_penalty =
      static_cast<float>(fields.number("presence_penalty", -2, 2).value_or(0));
  sampling.frequency_penalty =
      static_cast<float>(fields.number("frequency_penalty", -2, 2).value_or(0));
  sampling.repetition_penalty =
      static_cast<float>(fields.number("repetition_penalty", 0.01, 10).value_or(1));
  if (const auto seed = fields.integer("seed", INT64_MIN, INT64_MAX)) {
    sampling.seed = static_cast<uint64_t>(*seed);
    request.has_seed = true;
  }
  request.n = static_cast<int>(fields.integer("n", 1, 8).value_or(1));
  request.min_tokens = fields.integer("min_tokens", 0, int64_t{1} << 31).value_or(0);
  request.ignore_eos = fields.boolean("ignore_eos").value_or(false);
  request.return_token_ids = fields.boolean("return_token_ids").value_or(false);
  request.return_progress = fields.boolean("return_progress").value_or(false);
  read_logit_bias(fields, info, request);
  read_stop_token_ids(fields, info, request);
  fields.accept({"user", "metadata", "service_tier", "prompt_cache_key", "cache_control",
                 "safety_identifier"});
  fields.not_built("best_of");
  fields.not_built("use_beam_search");
  fields.not_built("return_routing");
  fields.not_built("truncate_prompt_tokens");
}

void read_structured_outputs(FieldReader& fields, ApiRequest& request) {
  const JsonValue* wanted = fields.object("structured_outputs");
  if (wanted == nullptr) return;
  FieldReader inner(*wanted, fields.path("structured_outputs"));
  AnswerForm& form = request.form;
  const auto begin = [&](AnswerForm::Kind kind, std::string_view key) {
    if (form.kind != AnswerForm::Kind::kText) {
      refuse_field(inner.path(key), fmt::format("{} asks for another form already", form.where));
    }
    form.kind = kind;
    form.where = inner.path(key);
  };
  if (const JsonValue* schema = inner.take("json")) {
    begin(AnswerForm::Kind::kJsonSchema, "json");
    form.schema = schema->is_string()
                      ? JsonValue::parse(schema->text(), inner.path("json"), kMaxJsonDepth)
                      : *schema;
  }
  if (const auto regex = inner.text("regex")) {
    begin(AnswerForm::Kind::kRegex, "regex");
    form.regex = *regex;
  }
  if (const JsonValue* choices = inner.array("choice")) {
    begin(AnswerForm::Kind::kChoice, "choice");
    for (const JsonValue& text : choices->items()) {
      if (!text.is_string()) refuse_field(inner.path("choice"), "want a list of strings");
      form.choices.push_back(text.text());
    }
    if (form.choices.empty())
      refuse_field(inner.path("choice"), "is empty, want at least one string");
  }
  inner.refuse_unknown();
}

void read_answer_form(const JsonValue& format, const std::string& path, ApiRequest& request) {
  FieldReader fields(format, path);
  const auto type = fields.word("type", {"text", "json_object", "json_schema"});
  if (!type)
    refuse_field(fields.path("type"), "is missing, want 'text', 'json_object' or 'json_schema'");
  if (*type == "text") return;
  if (request.form.kind != AnswerForm::Kind::kText) {
    refuse_field(path, fmt::format("{} asks for another form already", request.form.where));
  }
  request.form.where = path;
  if (*type == "json_object") {
    request.form.kind = AnswerForm::Kind::kJsonObject;
    return;
  }
  request.form.kind = AnswerForm::Kind::kJsonSchema;
  const JsonValue* outer = fields.object("json_schema");
  FieldReader inner(outer != nullptr ? *outer : format,
                    outer != nullptr ? fields.path("json_schema") : path);
  const JsonValue* schema = inner.take("schema");
  if (schema == nullptr) refuse_field(inner.path("schema"), "is missing, want a JSON schema");
  request.form.schema = *schema;
  request.form.where = inner.path("schema");
}

ContentPart ConversationBuilder::media(bool is_video, std::string bytes, double fps,
                                       const std::string& where) {
  if (!info_.has_vision)
    refuse_field(where, fmt::format("the model '{}' takes no pictures and no films", info_.id));
  if (request_.media.size() >= kMaxMedia) {
    refuse_field(where, fmt::format("more than {} pictures and films in one request", kMaxMedia));
  }
  request_.media.push_back({is_video, std::move(bytes), fps, where});
  return is_video ? ContentPart::video() : ContentPart::image();
}

ContentPart ConversationBuilder::media_url(bool is_video, const std::string& url, double fps,
                                           const std::string& where) {
  if (url.starts_with("file://"))
    return media(is_video, read_local_media(url, info_.media_folder, where), fps, where);
  if (url.starts_with("http://") || url.starts_with("https://")) {
    refuse_field(where,
                 "this server fetches nothing from the network; send the bytes as a data: URL");
  }
  constexpr std::string_view kMark = ";base64,";
  const size_t mark = url.substr(0, 256).find(kMark);
  if (!url.starts_with("data:") || mark == std::string::npos) {
    refuse_field(where, fmt::format("is '{}', want data:TYPE;base64,BYTES", url.substr(0, 32)));
  }
  // The type in front of the mark is not asked: the first bytes decide what the file is.
  const std::string_view text = std::string_view(url).substr(mark + kMark.size());
  if (text.size() / 4 * 3 > kMaxMediaBytes) {
    refuse_field(
        where,
        fmt::format("has {} bytes of base64, want at most {} bytes; upload larger films as files",
                    text.size(), kMaxMediaBytes));
  }
  return media(is_video, decode_base64(text, where), fps, where);
}

ContentPart ConversationBuilder::media_file(const std::string& id, const std::string& where) {
  if (info_.files == nullptr)
    refuse_field(where, "uploads are off; start the server with --files-dir FOLDER");
  auto bytes = info_.files->read(id);
  if (!bytes) refuse_field(where, fmt::format("there is no file '{}'", id.substr(0, 64)));
  const bool is_video = is_film(sniff_media(std::as_bytes(std::span(*bytes))));
  return media(is_video, std::move(*bytes), 1, where);
}

ToolCall ConversationBuilder::call(const std::string& id, std::string name,
                                   const JsonValue* arguments, const std::string& where) {
  if (!id.empty()) call_ids_.insert(id);
  ToolCall call{.name = std::move(name)};
  if (arguments == nullptr || (arguments->is_string() && arguments->text().empty())) return call;
  if (arguments->is_string()) {
    try {
      call.arguments = JsonValue::parse(arguments->text(), where, kMaxJsonDepth);
    } catch (const Error& error) {
      throw ApiError(400, error.what(), where);
    }
  } else {
    call.arguments = *arguments;
  }
  if (!call.arguments.is_object()) {
    refuse_field(where, fmt::format("is of type {}, want an object or its JSON text",
                                    call.arguments.kind_name()));
  }
  return call;
}

void ConversationBuilder::check_result_id(const std::string& id, const std::string& where) const {
  if (!id.empty() && !call_ids_.contains(id)) {
    refuse_field(where, fmt::format("'{}' is the id of no call before it", id.substr(0, 64)));
  }
}

void ConversationBuilder::add(Message message, const std::string& where) {
  if (request_.messages.size() >= kMaxMessages)
    refuse_field(where, fmt::format("more than {} messages", kMaxMessages));
  const bool is_system = message.role == "system" || message.role == "developer";
  // The official template drops these without a word.
  if ((is_system || message.role == "root") && (has_turn_ || (is_system && has_system_))) {
    if (info_.drop_late_system) {
      request_.ignored_fields.push_back(where);
      return;
    }
    refuse_field(
        where,
        fmt::format(
            "a {} message may only stand once, before all other turns: M3's template drops later "
            "ones; join them to the first (or start the server with --late-system drop)",
            message.role));
  }
  if (message.role == "tool") {
    const bool follows =
        !request_.messages.empty() &&
        (request_.messages.back().role == "tool" || !request_.messages.back().tool_calls.empty());
    if (!follows)
      refuse_field(where, "a tool result must follow an assistant message with tool calls");
  }
  has_system_ = has_system_ || is_system;
  has_turn_ = has_turn_ || (!is_system && message.role != "root");
  last_where_ = where;
  request_.messages.push_back(std::move(message));
}

void ConversationBuilder::add_tool(const JsonValue& function, const std::string& where) {
  if (request_.tools.size() >= kMaxTools)
    refuse_field(where, fmt::format("more than {} tools", kMaxTools));
  Tool tool{function};
  const JsonValue* name = function.find("name");
  if (name == nullptr || !name->is_string() || name->text().empty())
    refuse_field(where + ".name", "want a name (a string)");
  if (const JsonValue* parameters = tool.parameters()) {
    if (!parameters->is_object())
      refuse_field(where + ".parameters", "want an object (a JSON schema)");
    if (const size_t bytes = parameters->dump().size(); bytes > kMaxToolBytes) {
      refuse_field(where + ".parameters",
                   fmt::format("has {} bytes, want at most {}", bytes, kMaxToolBytes));
    }
  }
  for (const Tool& other : request_.tools) {
    if (other.name() == tool.name())
      refuse_field(where + ".name", fmt::format("'{}' is declared twice", tool.name()));
  }
  request_.tools.push_back(std::move(tool));
}

void ConversationBuilder::finish() const {
  if (!has_turn_)
    throw ApiError(400, "messages: want at least one message that is no system message",
                   "messages");
  if (request_.messages.back().role == "assistant") {
    refuse_field(last_where_,
                 "continuing an assistant message is not supported; the last message must be of "
                 "another role");
  }
  const ToolChoice& choice = request_.tool_choice;
  const bool forced =
      choice.kind == ToolChoice::Kind::kRequired || choice.kind == ToolChoice::Kind::kNamed;
  if (forced && request_.tools.empty())
    refuse_field("tool_choice", "asks for a call, but there are no tools");
  if (forced && request_.form.kind != AnswerForm::Kind::kText) {
    refuse_field("tool_choice", fmt::format("asks for a call, but {} asks for text of a fixed form",
                                            request_.form.where));
  }
  if (choice.kind != ToolChoice::Kind::kNamed) return;
  for (const Tool& tool : request_.tools) {
    if (tool.name() == choice.name) return;
  }
  refuse_field("tool_choice",
               fmt::format("names '{}', which is no declared tool", choice.name.substr(0, 64)));
}

std::string decode_base64(std::string_view text, const std::string& where) {
  static const std::array<int8_t, 256> kValues = [] {
    std::array<int8_t, 256> values;
    values.fill(-1);
    constexpr std::string_view kAlphabet =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < kAlphabet.size(); ++i)
      values[static_cast<uint8_t>(kAlphabet[i])] = static_cast<int8_t>(i);
    return values;
  }();
  if (text.size() % 4 != 0)
    refuse_field(where, fmt::format("base64 of {} characters, want a multiple of 4", text.size()));
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with("=") ? 1 : 0;
  std::string out;
  out.reserve(text.size() / 4 * 3);
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool is_padding = i >= text.size() - padding;
    const int value = is_padding ? 0 : kValues[static_cast<uint8_t>(text[i])];
    if (value < 0) refuse_field(where, fmt::format("no base64 at character {}", i));
    bits = bits << 6 | static_cast<uint32_t>(value);
    if (i % 4 != 3) continue;
    out += {static_cast<char>(bits >> 16), static_cast<char>(bits >> 8), static_cast<char>(bits)};
    bits = 0;
  }
  const char lost_bits = padding == 2 ? out[out.size() - 2] : padding == 1 ? out.back() : 0;
  if (lost_bits != 0) refuse_field(where, "base64 whose last character has bits beyond the end");
  out.resize(out.size() - padding);
  return out;
}

const JsonValue* read_tool_choice_word(FieldReader& fields, ApiRequest& request) {
  request.parallel_tool_calls = fields.boolean("parallel_tool_calls").value_or(true);
  const JsonValue* choice = fields.take("tool_choice");
  if (choice == nullptr || !choice->is_string()) return choice;
  const auto word = fields.word("tool_choice", {"auto", "none", "required"});
  using Kind = ToolChoice::Kind;
  request.tool_choice.kind = *word == "auto"   ? Kind::kAuto
                             : *word == "none" ? Kind::kNone
                                               : Kind::kRequired;
  return nullptr;
}

}  // namespace m3
