#include "server/api_routes.h"

#include <fmt/core.h>

#include "server/answer.h"
#include "server/chat_api.h"
#include "server/field_reader.h"
#include "server/file_store.h"
#include "server/json_build.h"

namespace m3 {

namespace {

constexpr Route kRoutes[] = {
    {"/", RouteKind::kPage, "GET", true},
    {"/health", RouteKind::kHealth, "GET", true},
    {"/v1/health", RouteKind::kHealth, "GET", true},
    {"/ready", RouteKind::kHealth, "GET", true},
    {"/version", RouteKind::kVersion, "GET"},
    {"/metrics", RouteKind::kMetrics, "GET"},
    {"/v1/metrics", RouteKind::kMetrics, "GET"},
    {"/v1/models", RouteKind::kModels, "GET", false, true},
    {"/v1/requests", RouteKind::kRequests, "GET"},
    {"/props", RouteKind::kProps, "GET"},
    {"/v1/files", RouteKind::kFiles, "GET, POST, DELETE", false, true},
    {"/tokenize", RouteKind::kTokenize, "POST"},
    {"/v1/tokenize", RouteKind::kTokenize, "POST"},
    {"/detokenize", RouteKind::kDetokenize, "POST"},
    {"/v1/detokenize", RouteKind::kDetokenize, "POST"},
    {"/apply-template", RouteKind::kTemplate, "POST"},
    {"/v1/messages/count_tokens", RouteKind::kCountMessages, "POST"},
    {"/v1/responses/input_tokens", RouteKind::kCountResponses, "POST"},
    {"/v1/chat/completions", RouteKind::kChat, "POST"},
    {"/v1/completions", RouteKind::kCompletions, "POST"},
    {"/v1/responses", RouteKind::kResponses, "POST"},
    {"/v1/messages", RouteKind::kMessages, "POST"},
};

JsonValue model_json(const ModelInfo& info) {
  JsonValue aliases = JsonValue::array();
  for (const std::string& alias : info.aliases) aliases.push_back(JsonValue::string(alias));
  JsonValue inputs = json_array({"text"});
  if (info.has_vision) {
    inputs.push_back(JsonValue::string("image"));
    inputs.push_back(JsonValue::string("video"));
  }
  // OpenAI's fields, Anthropic's (type, display_name, created_at), and those of other servers.
  return json_object({{"id", info.id},
                      {"object", "model"},
                      {"created", 0},
                      {"owned_by", "m3"},
                      {"type", "model"},
                      {"display_name", info.id},
                      {"created_at", "1970-01-01T00:00:00Z"},
                      {"aliases", std::move(aliases)},
                      {"max_model_len", info.max_model_len},
                      {"vocab_size", int64_t{info.num_ids}},
                      {"architecture", json_object({{"input_modalities", std::move(inputs)},
                                                    {"output_modalities", json_array({"text"})}})},
                      {"thinking_modes", json_array({"enabled", "disabled", "adaptive"})},
                      {"default_thinking_mode", info.default_thinking},
                      {"cache_type", info.cache_type}});
}

JsonValue file_json(const StoredFile& file) {
  return json_object({{"id", file.id},
                      {"object", "file"},
                      {"bytes", file.bytes},
                      {"created_at", file.created},
                      {"filename", file.name},
                      {"purpose", file.purpose},
                      {"status", "processed"}});
}

}  // namespace

size_t Route::matched(std::string_view request_path) const {
  const std::string_view own = path;
  return request_path.size() > own.size() ? own.size() + 1 : own.size();
}

const Route* find_route(std::string_view path) {
  for (const Route& route : kRoutes) {
    const std::string_view own = route.path;
    if (path == own) return &route;
    if (route.has_tail && path.starts_with(own) && path[own.size()] == '/' &&
        path.size() > own.size() + 1)
      return &route;
  }
  return nullptr;
}

JsonValue models_json(const ModelInfo& info, const std::string& id) {
  if (id.empty()) {
    return json_object({{"object", "list"},
                        {"data", json_array({model_json(info)})},
                        {"has_more", false},
                        {"first_id", info.id},
                        {"last_id", info.id}});
  }
  bool known = id == info.id;
  for (const std::string& alias : info.aliases) known = known || id == alias;
  if (!known)
    throw ApiError(404,
                   fmt::format("the model '{}' does not exist, this server has '{}'",
                               id.substr(0, 128), info.id),
                   "model", "model_not_found");
  return model_json(info);
}

JsonValue requests_json(std::span<const RequestInfo> requests) {
  JsonValue list = JsonValue::array();
  for (const RequestInfo& info : requests) {
    list.push_back(
        json_object({{"id", info.id},
                     {"state", info.running ? "running" : "waiting"},
                     {"wait_reason", kWaitReasonNames[static_cast<size_t>(info.wait_reason)]},
                     {"prompt_tokens", info.prompt_tokens},
                     {"prompt_done", info.prompt_done},
                     {"cached_tokens", info.cached_tokens},
                     {"answer_tokens", info.answer_tokens},
                     {"cache_blocks", info.cache_pages},
                     {"preemptions", info.preemptions},
                     {"age_seconds", info.age_seconds}}));
  }
  return json_object({{"object", "list"}, {"data", std::move(list)}});
}

JsonValue props_json(const ModelInfo& info, const ApiServerOptions& options,
                     const EngineThread& engine) {
  const EngineMetrics metrics = engine.metrics();
  return json_object(
      {{"model_alias", info.id},
       {"default_generation_settings", json_object({{"n_ctx", info.max_model_len},
                                                    {"temperature", info.temperature},
                                                    {"top_p", info.top_p},
                                                    {"top_k", info.top_k}})},
       {"modalities", json_object({{"vision", info.has_vision}})},
       {"default_thinking_mode", info.default_thinking},
       {"limits",
        json_object({{"max_body_bytes", static_cast<int64_t>(options.http.max_body_bytes)},
                     {"max_header_bytes", static_cast<int64_t>(options.http.max_header_bytes)},
                     {"max_connections", options.http.max_connections},
                     {"max_jobs", options.max_jobs},
                     {"request_timeout_seconds", options.request_timeout_seconds}})},
       {"cache_blocks", metrics.pages_total},
       {"build_info", info.version}});
}

JsonValue files_json(const ModelInfo& info, const HttpRequest& request, const std::string& tail) {
  if (info.files == nullptr)
    throw ApiError(404, "uploads are off; start the server with --files-dir FOLDER");
  FileStore& files = *info.files;
  if (request.method == "POST") {
    if (!tail.empty()) throw ApiError(405, "POST goes to /v1/files");
    std::string purpose;
    const FormPart* file = nullptr;
    const auto form = read_form(request.header("content-type"), request.body);
    for (const FormPart& part : form) {
      if (part.name == "purpose") purpose = part.data;
      if (part.name == "file") file = &part;
    }
    if (file == nullptr) throw ApiError(400, "the form has no part 'file'", "file");
    return file_json(files.add(file->filename, purpose, file->data));
  }
  if (tail.empty()) {
    if (request.method == "DELETE") throw ApiError(405, "DELETE needs /v1/files/ID");
    JsonValue list = JsonValue::array();
    for (const StoredFile& file : files.list()) list.push_back(file_json(file));
    return json_object({{"object", "list"}, {"data", std::move(list)}, {"has_more", false}});
  }
  const auto file = files.find(tail);
  const bool removed = file && request.method == "DELETE" && files.remove(tail);
  if (removed) return json_object({{"id", tail}, {"object", "file"}, {"deleted", true}});
  if (!file || request.method == "DELETE")
    throw ApiError(404, fmt::format("there is no file '{}'", tail.substr(0, 64)), "file_id");
  return file_json(*file);
}

ApiRequest read_tokenize_request(const JsonValue& body, const ModelInfo& info) {
  ApiRequest request;
  FieldReader fields(body, "");
  fields.accept({"model", "add_special", "add_special_tokens", "parse_special"});
  request.return_token_ids = fields.boolean("with_pieces").value_or(false) ||
                             fields.boolean("return_token_strs").value_or(false);
  auto text = fields.text("prompt");
  if (!text) text = fields.text("content");
  if (text) {
    request.prompts.push_back({*std::move(text), {}});
  } else if (fields.array("messages") != nullptr) {
    read_chat_prompt(fields, info, request);
  } else {
    throw ApiError(400, "want 'prompt', 'content' (texts) or 'messages'", "prompt");
  }
  return request;
}

JsonValue tokenize_json(const ApiRequest& request, const std::vector<int32_t>& ids,
                        const Tokenizer& tokenizer, const ModelInfo& info) {
  JsonValue json = json_object({{"count", static_cast<int64_t>(ids.size())},
                                {"max_model_len", info.max_model_len},
                                {"tokens", id_list(ids)}});
  if (!request.return_token_ids) return json;
  JsonValue pieces = JsonValue::array();
  for (const int32_t id : ids)
    pieces.push_back(JsonValue::string(tokenizer.decode(std::span(&id, 1))));
  json.append_member("token_strs", std::move(pieces));
  return json;
}

JsonValue detokenize_json(const JsonValue& body, const Tokenizer& tokenizer,
                          const ModelInfo& info) {
  FieldReader fields(body, "");
  const JsonValue* tokens = fields.array("tokens");
  if (tokens == nullptr) refuse_field("tokens", "is missing, want a list of token ids");
  std::vector<int32_t> ids;
  for (size_t i = 0; i < tokens->size(); ++i) {
    const JsonValue& id = tokens->items()[i];
    const bool fits = id.is_integer() && id.as_double() >= 0 && id.as_double() < info.num_ids;
    if (!fits)
      refuse_field(fmt::format("tokens[{}]", i),
                   fmt::format("is no token id, want 0 to {}", info.num_ids - 1));
    ids.push_back(static_cast<int32_t>(id.as_double()));
  }
  const std::string text = tokenizer.decode(ids);
  return json_object({{"prompt", text}, {"content", text}});
}

}  // namespace m3
