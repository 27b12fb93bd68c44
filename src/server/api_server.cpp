#include "server/api_server.h"

#include <fmt/core.h>

#include <condition_variable>
#include <random>
#include <set>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "engine/token_guide.h"
#include "server/api_routes.h"
#include "server/chat_api.h"
#include "server/completions_api.h"
#include "server/field_reader.h"
#include "server/generation_job.h"
#include "server/json_build.h"
#include "server/messages_api.h"
#include "server/page.h"
#include "server/prompt_builder.h"
#include "server/request_fields.h"
#include "server/responses_api.h"

namespace m3 {

namespace {

constexpr std::string_view kPagePolicy =
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: "
    "blob:; media-src data: "
    "blob:; connect-src 'self'; base-uri 'none'; form-action 'none'";

// Does not stop at the first difference, so that the time says nothing about the key.
bool equal_in_constant_time(std::string_view a, std::string_view b) {
  unsigned difference = a.size() ^ b.size();
  for (size_t i = 0; i < a.size(); ++i)
    difference |=
        static_cast<uint8_t>(a[i]) ^ static_cast<uint8_t>(b.empty() ? 0 : b[i % b.size()]);
  return difference == 0;
}

bool is_plain_word(std::string_view text) {
  if (text.empty() || text.size() > 128) return false;
  for (const char c : text) {
    const bool fits = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
                      c == '-' || c == '_' || c == '.';
    if (!fits) return false;
  }
  return true;
}

bool is_loopback_name(std::string_view host) {
  if (host.starts_with("[")) return host.starts_with("[::1]");
  host = host.substr(0, host.rfind(':'));
  return host == "localhost" || host.starts_with("127.");
}

std::string join(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : ", ") + word;
  return out.substr(0, 1000);
}

// What a header may carry: a field's name comes from the client.
std::string header_text(std::string text) {
  for (char& c : text) c = c < ' ' || c > '~' ? '?' : c;
  return text;
}

}  // namespace

struct ApiServer::Impl {
  Impl(ModelInfo info, const Tokenizer& tokenizer, std::vector<int32_t> stop_ids,
       ApiServerOptions options)
      : info(std::move(info)),
        tokenizer(tokenizer),
        options(std::move(options)),
        prompts(tokenizer, std::move(stop_ids)) {}

  // One HTTP request on its way through a worker.
  struct Call {
    HttpRequest request;
    std::shared_ptr<HttpResponder> responder;
    std::string id;
    std::string route;  // for metrics: a path of ours, never one that a client made up
    ApiFamily family = ApiFamily::kOpenAi;
  };

  void handle(HttpRequest request, std::shared_ptr<HttpResponder> responder);
  void route(Call& call);
  void check_access(const Call& call) const;
  HttpHeaders base_headers(const Call& call) const;
  void send(const Call& call, int status, const JsonValue& body, HttpHeaders extra = {});
  void send_error(const Call& call, const ApiError& error);
  void send_page(const Call& call);
  JsonValue body_json(const Call& call) const;

  void generate(Call& call);
  void start_job(Call& call, ApiRequest request, EngineThread& engine);
  std::vector<BuiltPrompt> build_prompts(const ApiRequest& request);
  HttpHeaders job_headers(const Call& call, const ApiRequest& request, const Answer& answer) const;
  void job_ended(const GenerationJob& job, int status, const std::string& route,
                 const std::string& client);
  void watch();

  JsonValue health(int& status) const;
  EngineThread& running_engine();

  const ModelInfo info;
  const Tokenizer& tokenizer;
  const ApiServerOptions options;
  PromptBuilder prompts;
  ServerMetrics metrics;
  std::atomic<EngineThread*> engine = nullptr;
  std::atomic<bool> stopping = false;
  std::atomic<int64_t> parsing = 0;
  const uint64_t run = std::random_device{}();
  std::atomic<uint64_t> next_id = 0;

  mutable std::mutex mutex;  // guards what follows
  std::condition_variable changed;
  std::set<std::shared_ptr<GenerationJob>> jobs;
  bool closed = false;

  std::optional<WorkerPool> answers{std::in_place, 2};
  std::unique_ptr<HttpServer> http;
  std::thread watcher;
};

void ApiServer::Impl::handle(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  Call call{std::move(request), std::move(responder), "", "other"};
  const std::string_view sent_id = call.request.header("x-request-id");
  call.id = is_plain_word(sent_id) ? std::string(sent_id)
                                   : fmt::format("{:08x}{:08x}", run & 0xffffffff, ++next_id);
  if (call.request.path.starts_with("/v1/messages")) call.family = ApiFamily::kAnthropic;
  try {
    route(call);
  } catch (const ApiError& error) {
    send_error(call, error);
  } catch (const std::exception& error) {
    log_error("{}: {}", call.id, error.what());
    send_error(call, ApiError(500, "internal error"));
  }
}

void ApiServer::Impl::check_access(const Call& call) const {
  const HttpRequest& request = call.request;
  if (options.api_keys.empty()) {
    // A web page of somebody else must not reach a server that only this machine should see (DNS
    // rebinding).
    const std::string_view host = request.header("host");
    if (is_loopback_name(options.host + ":") && !host.empty() &&
        !is_loopback_name(fmt::format("{}:", host.substr(0, host.rfind(':'))))) {
      throw ApiError(403,
                     "this server has no key and answers for localhost only; start it with "
                     "--api-key to use other names");
    }
    return;
  }
  std::string_view key = request.header("authorization");
  key = key.starts_with("Bearer ") ? key.substr(7) : request.header("x-api-key");
  bool known = false;
  for (const std::string& wanted : options.api_keys) known |= equal_in_constant_time(key, wanted);
  if (!known)
    throw ApiError(401, key.empty()
                            ? "an API key is needed (Authorization: Bearer KEY, or x-api-key)"
                            : "the API key is wrong");
}

void ApiServer::Impl::route(Call& call) {
  const HttpRequest& request = call.request;
  const Route* found = find_route(request.path);
  if (found == nullptr) {
    check_access(call);
    throw ApiError(404, fmt::format("there is no {}", request.path.substr(0, 200)));
  }
  call.route = found->path;
  if (request.method == "OPTIONS") {
    call.responder->send(204, "text/plain", "", base_headers(call));
    metrics.http_request(call.route, 204);
    return;
  }
  const bool open = found->open || (found->what == RouteKind::kMetrics && options.metrics_open);
  if (!open) check_access(call);
  const std::string_view method =
      request.method == "HEAD" ? "GET" : std::string_view(request.method);
  if (std::string_view(found->methods).find(method) == std::string_view::npos) {
    throw ApiError(405, fmt::format("{} takes {}, not {}", found->path, found->methods,
                                    request.method.substr(0, 32)));
  }
  const std::string tail =
      request.path.substr(std::min(request.path.size(), found->matched(request.path)));
  switch (found->what) {
    case RouteKind::kPage:
      return send_page(call);
    case RouteKind::kHealth: {
      int status = 200;
      const JsonValue body = health(status);
      return send(call, status, body);
    }
    case RouteKind::kVersion:
      return send(
          call, 200,
          json_object({{"version", info.version}, {"model", info.id}, {"device", info.device}}));
    case RouteKind::kMetrics: {
      EngineThread* running = engine;
      const std::string text = metrics.render(
          info.id, running ? running->metrics() : EngineMetrics(), prompts.encode_counts(),
          running && !stopping);
      metrics.http_request(call.route, 200);
      return call.responder->send(200, "text/plain; version=0.0.4", text, base_headers(call));
    }
    case RouteKind::kModels:
      return send(call, 200, models_json(info, tail));
    case RouteKind::kRequests:
      return send(call, 200, requests_json(running_engine().requests()));
    case RouteKind::kProps:
      return send(call, 200, props_json(info, options, running_engine()));
    case RouteKind::kFiles:
      return send(call, 200, files_json(info, request, tail));
    case RouteKind::kTokenize: {
      const ApiRequest wanted = read_tokenize_request(body_json(call), info);
      const BuiltPrompt prompt = wanted.prompts.empty()
                                     ? prompts.build_chat(wanted)
                                     : prompts.build_plain(wanted.prompts.front());
      return send(call, 200, tokenize_json(wanted, prompt.ids, tokenizer, info));
    }
    case RouteKind::kDetokenize:
      return send(call, 200, detokenize_json(body_json(call), tokenizer, info));
    case RouteKind::kTemplate: {
      const BuiltPrompt prompt = prompts.build_chat(read_tokenize_request(body_json(call), info));
      return send(call, 200,
                  json_object({{"prompt", prompt.text},
                               {"count", static_cast<int64_t>(prompt.ids.size())}}));
    }
    case RouteKind::kCountMessages: {
      const BuiltPrompt prompt = prompts.build_chat(read_messages_request(body_json(call), info));
      return send(call, 200,
                  json_object({{"input_tokens", static_cast<int64_t>(prompt.ids.size())}}));
    }
    case RouteKind::kCountResponses: {
      const BuiltPrompt prompt = prompts.build_chat(read_responses_request(body_json(call), info));
      return send(call, 200,
                  json_object({{"object", "response.input_tokens"},
                               {"input_tokens", static_cast<int64_t>(prompt.ids.size())}}));
    }
    case RouteKind::kChat:
    case RouteKind::kCompletions:
    case RouteKind::kResponses:
    case RouteKind::kMessages:
      return generate(call);
  }
}

HttpHeaders ApiServer::Impl::base_headers(const Call& call) const {
  HttpHeaders headers = {{"x-request-id", call.id}, {"X-Content-Type-Options", "nosniff"}};
  const std::string_view origin = call.request.header("origin");
  for (const std::string& allowed : options.cors_origins) {
    if (allowed != "*" && origin != allowed) continue;
    headers.emplace_back("Access-Control-Allow-Origin", allowed);
    headers.emplace_back("Access-Control-Allow-Methods", "GET, POST, DELETE, OPTIONS");
    headers.emplace_back("Access-Control-Allow-Headers",
                         "authorization, content-type, x-api-key, x-request-id, anthropic-version");
    headers.emplace_back("Vary", "Origin");
    break;
  }
  return headers;
}

void ApiServer::Impl::send(const Call& call, int status, const JsonValue& body, HttpHeaders extra) {
  metrics.http_request(call.route, status);
  HttpHeaders headers = base_headers(call);
  headers.insert(headers.end(), extra.begin(), extra.end());
  call.responder->send(status, "application/json", body.dump(), std::move(headers));
}

void ApiServer::Impl::send_error(const Call& call, const ApiError& error) {
  HttpHeaders extra;
  if (error.status == 429 || error.status == 503) extra.emplace_back("Retry-After", "2");
  log_debug("{} {} {}: {} {}", call.id, call.request.method, call.route, error.status,
            error.what());
  send(call, error.status, error_json(call.family, error, call.id), std::move(extra));
}

void ApiServer::Impl::send_page(const Call& call) {
  HttpHeaders headers = base_headers(call);
  headers.emplace_back("Content-Security-Policy", kPagePolicy);
  headers.emplace_back("Cache-Control", "no-cache");
  metrics.http_request(call.route, 200);
  call.responder->send(200, "text/html; charset=utf-8", std::string(page_html()),
                       std::move(headers));
}

// The content type must say JSON: a page of another origin cannot send that without asking first.
JsonValue ApiServer::Impl::body_json(const Call& call) const {
  const std::string_view type = call.request.header("content-type");
  if (!type.starts_with("application/json")) {
    throw ApiError(415,
                   fmt::format("Content-Type is '{}', want application/json", type.substr(0, 100)));
  }
  try {
    return JsonValue::parse(call.request.body, "the body", kMaxJsonDepth);
  } catch (const Error& error) {
    throw ApiError(400, error.what());
  }
}

EngineThread& ApiServer::Impl::running_engine() {
  EngineThread* running = engine;
  if (running == nullptr) throw ApiError(503, "the model is loading");
  if (stopping || running->stopped()) throw ApiError(503, "the server is stopping");
  return *running;
}

JsonValue ApiServer::Impl::health(int& status) const {
  EngineThread* running = engine;
  status = 503;
  if (stopping) return json_object({{"status", "stopping"}});
  if (running == nullptr) return json_object({{"status", "loading"}});
  if (running->stopped()) return json_object({{"status", "the engine has stopped"}});
  status = 200;
  return json_object({{"status", "ok"}});
}

void ApiServer::Impl::generate(Call& call) {
  EngineThread& running = running_engine();
  {
    const std::lock_guard lock(mutex);
    if (static_cast<int64_t>(jobs.size()) >= options.max_jobs) {
      metrics.rejected("max_jobs");
      throw ApiError(429,
                     fmt::format("{} requests are in work already; try again later", jobs.size()),
                     "", "queue_full");
    }
  }
  const JsonValue body = body_json(call);
  ApiRequest request;
  if (call.route == "/v1/chat/completions") request = read_chat_request(body, info);
  if (call.route == "/v1/completions") request = read_completions_request(body, info);
  if (call.route == "/v1/responses") request = read_responses_request(body, info);
  if (call.route == "/v1/messages") request = read_messages_request(body, info);
  for (const std::string& field : request.ignored_fields) metrics.ignored_field(field);
  start_job(call, std::move(request), running);
}

std::vector<BuiltPrompt> ApiServer::Impl::build_prompts(const ApiRequest& request) {
  std::vector<BuiltPrompt> built;
  for (const RawPrompt& prompt : request.prompts) built.push_back(prompts.build_plain(prompt));
  if (request.prompts.empty()) built.push_back(prompts.build_chat(request));
  for (size_t i = 0; i < request.media.size(); ++i) {
    metrics.media_decoded(request.media[i].is_video, built.front().media_seconds[i]);
  }
  for (const BuiltPrompt& prompt : built) {
    const auto tokens = static_cast<int64_t>(prompt.ids.size());
    if (tokens < info.max_model_len) continue;
    throw ApiError(
        400,
        fmt::format(
            "the prompt has {} tokens and the answer needs at least one, the context holds {}",
            tokens, info.max_model_len),
        request.prompts.empty() ? "messages" : "prompt", "context_length_exceeded");
  }
  return built;
}

HttpHeaders ApiServer::Impl::job_headers(const Call& call, const ApiRequest& request,
                                         const Answer& answer) const {
  HttpHeaders headers = base_headers(call);
  if (!answer.thinking_mode.empty())
    headers.emplace_back("x-m3-thinking-mode", answer.thinking_mode);
  if (!request.ignored_fields.empty())
    headers.emplace_back("x-m3-ignored-fields", header_text(join(request.ignored_fields)));
  if (answer.max_tokens_clamped)
    headers.emplace_back("x-m3-max-tokens", std::to_string(answer.max_tokens));
  if (request.stream) {
    headers.emplace_back("Cache-Control", "no-cache");
    headers.emplace_back("X-Accel-Buffering", "no");
  }
  return headers;
}

void ApiServer::Impl::start_job(Call& call, ApiRequest wanted, EngineThread& running) {
  std::vector<BuiltPrompt> built = build_prompts(wanted);
  const JobServices services{running, *answers, metrics, tokenizer};
  const auto job =
      std::make_shared<GenerationJob>(services, call.family, std::move(wanted), call.responder);
  ApiRequest& request = job->request();
  request.media.clear();  // what follows needs the prompts alone
  request.messages.clear();

  Answer& answer = job->answer();
  const char* prefix = call.route == "/v1/chat/completions" ? "chatcmpl-"
                       : call.route == "/v1/completions"    ? "cmpl-"
                       : call.route == "/v1/responses"      ? "resp_"
                                                            : "msg_";
  answer.id = prefix + call.id;
  answer.request_id = call.id;
  answer.model = request.model;
  answer.thinking_mode = request.thinking_mode;
  answer.created = std::chrono::duration_cast<std::chrono::seconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  std::vector<GenerationJob::Part> parts;
  std::vector<std::string> texts;
  for (const BuiltPrompt& prompt : built) {
    texts.push_back(prompt.text);
    const auto tokens = static_cast<int64_t>(prompt.ids.size());
    const int64_t rest = info.max_model_len - tokens;
    answer.prompt_tokens += tokens;
    answer.image_tokens += prompt.image_tokens;
    answer.video_tokens += prompt.video_tokens;
    if (request.max_tokens && *request.max_tokens > rest) answer.max_tokens_clamped = true;
    if (request.return_token_ids) answer.prompt_ids.push_back(prompt.ids);
    for (int choice = 0; choice < request.n; ++choice) {
      GenerationRequest generation = prompts.generation(request, prompt, rest);
      answer.max_tokens = generation.max_tokens;
      if (options.request_timeout_seconds > 0) {
        generation.deadline =
            job->start() + std::chrono::duration_cast<GenerationJob::Clock::duration>(
                               std::chrono::duration<double>(options.request_timeout_seconds));
      }
      if (options.script) {
        if (auto script = options.script(prompt.text)) {
          generation.guide = std::make_shared<ScriptGuide>(*std::move(script), tokenizer.size());
        }
      }
      parts.push_back({std::move(generation), prompt.text});
    }
  }
  if (call.route == "/v1/chat/completions") job->set_format(chat_format(request, tokenizer));
  if (call.route == "/v1/completions")
    job->set_format(completions_format(request, tokenizer, std::move(texts)));
  if (call.route == "/v1/responses") job->set_format(responses_format(request));
  if (call.route == "/v1/messages") job->set_format(messages_format(request));
  job->set_headers(job_headers(call, request, answer));
  job->on_end(
      [this, route = call.route, client = call.request.client](
          const GenerationJob& ended, int status) { job_ended(ended, status, route, client); });
  {
    const std::lock_guard lock(mutex);
    jobs.insert(job);
  }
  try {
    job->submit(std::move(parts));
  } catch (...) {
    const std::lock_guard lock(mutex);
    jobs.erase(job);
    throw;
  }
  if (stopping) job->cancel(ApiError(503, "the server is stopping"));
}

// The end of a job's life as far as the server is concerned: from here on shut_down() does not wait
// for it.
void ApiServer::Impl::job_ended(const GenerationJob& job, int status, const std::string& route,
                                const std::string& client) {
  const Answer& answer = job.answer();
  std::string ends;
  for (const AnswerChoice& choice : answer.choices)
    ends += (ends.empty() ? "" : ",") + (choice.done() ? choice.finish_reason : "-");
  log_info(
      "{} {} {} {}: prompt {} tokens ({} cached), answer {} ({} reasoning), {}, {:.3f} s, first "
      "after {:.3f} s",
      answer.request_id, client, route, status, answer.prompt_tokens, answer.cached_tokens,
      answer.completion_tokens(), answer.reasoning_tokens(), ends,
      std::chrono::duration<double>(GenerationJob::Clock::now() - job.start()).count(),
      answer.first_token_ms / 1e3);
  metrics.http_request(route, status);
  const std::lock_guard lock(mutex);
  std::erase_if(jobs, [&](const auto& other) { return other.get() == &job; });
  changed.notify_all();
}

// Keeps silent streams alive through proxies.
void ApiServer::Impl::watch() {
  const auto quiet = std::chrono::duration_cast<GenerationJob::Clock::duration>(
      std::chrono::duration<double>(options.ping_seconds));
  std::unique_lock lock(mutex);
  while (!closed) {
    changed.wait_for(lock, std::min<std::chrono::nanoseconds>(quiet / 2, std::chrono::seconds(1)));
    for (const auto& job : std::vector(jobs.begin(), jobs.end())) job->ping_if_quiet(quiet);
  }
}

ApiServer::ApiServer(ModelInfo info, const Tokenizer& tokenizer, std::vector<int32_t> stop_ids,
                     ApiServerOptions options)
    : impl_(std::make_unique<Impl>(std::move(info), tokenizer, std::move(stop_ids),
                                   std::move(options))) {
  Impl& impl = *impl_;
  impl.http = std::make_unique<HttpServer>(
      impl.options.host, impl.options.port, impl.options.http, impl.options.num_workers,
      [&impl](HttpRequest request, std::shared_ptr<HttpResponder> responder) {
        impl.handle(std::move(request), std::move(responder));
      });
  impl.watcher = std::thread([&impl] { impl.watch(); });
}

ApiServer::~ApiServer() {
  shut_down(0);
}

void ApiServer::ready(EngineThread& engine) {
  impl_->engine = &engine;
}
uint16_t ApiServer::port() const {
  return impl_->http->port();
}

int64_t ApiServer::num_jobs() const {
  const std::lock_guard lock(impl_->mutex);
  return static_cast<int64_t>(impl_->jobs.size());
}

bool ApiServer::shut_down(double seconds) {
  Impl& impl = *impl_;
  if (!impl.answers) return true;
  impl.stopping = true;
  bool all_ended = false;
  {
    std::unique_lock lock(impl.mutex);
    const auto none_left = [&] { return impl.jobs.empty(); };
    all_ended = impl.changed.wait_for(lock, std::chrono::duration<double>(seconds), none_left);
    if (!all_ended) {
      const std::vector left(impl.jobs.begin(), impl.jobs.end());
      lock.unlock();
      for (const auto& job : left) job->cancel(ApiError(503, "the server is stopping"));
      lock.lock();
      impl.changed.wait(lock, none_left);  // the engine ends them at its next step
    }
    impl.closed = true;
  }
  impl.changed.notify_all();
  impl.watcher.join();
  impl.http->drain(std::chrono::seconds(2));  // last bytes
  impl.http->stop();
  impl.answers.reset();
  return all_ended;
}

}  // namespace m3
