// m3 serve: the HTTP server (src/server) in front of an engine (src/engine).
#include <fmt/core.h>
#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <mutex>
#include <thread>

#include "base/file.h"
#include "base/log.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "engine/session.h"
#include "media/preprocess.h"
#include "server/api_server.h"
#include "server/file_store.h"

namespace m3::cli {

namespace {

constexpr int kInterrupted = 130;
constexpr int64_t kAutoContext = 131'072;  // a CPU needs minutes for more; --context asks for it

struct ServeFlags {
  std::string model, host = "127.0.0.1", dtype = "bf16", thinking = "adaptive",
                     late_system = "refuse";
  std::vector<std::string> names, api_keys, cors_origins;
  std::optional<std::string> api_key_file;
  std::string media_path, files_dir, offload_dir, cache_file;
  double offload_gib = 8;
  int64_t port = 8000, max_requests = 16, step_tokens = SessionOptions::kDefaultStepTokens,
          max_queue = 1024;
  int64_t max_connections = 4096, max_body_mib = 256, draft_tokens = 0;
  std::optional<int64_t> context, cache_tokens;
  double max_step_ms = 100, queue_seconds = 60, request_seconds = 0, shutdown_seconds = 30;
  int threads = 0;
  bool no_prefix_cache = false, no_media = false, allow_no_key = false, metrics_open = false;
};

std::vector<std::string> keys_of(const ServeFlags& flags) {
  std::vector<std::string> keys = flags.api_keys;
  if (const char* key = std::getenv("M3_API_KEY"); key != nullptr && *key != 0)
    keys.emplace_back(key);
  if (flags.api_key_file) {
    std::string text = read_file(*flags.api_key_file);
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find('\n', at), text.size());
      if (end > at) keys.push_back(text.substr(at, end - at));
      at = end + 1;
    }
  }
  return keys;
}

bool is_loopback(const std::string& host) {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

ServeFlags parse(const Args& args) {
  ServeFlags flags;
  Options options("serve",
                  "Serves a model over HTTP: the OpenAI (chat, completions, responses) and "
                  "Anthropic (messages) interfaces, and "
                  "a page for the browser. Listens on this machine alone unless --host says "
                  "otherwise. Ctrl-C lets running "
                  "answers end; a second one stops at once.",
                  "m3 serve tests/golden/models/tiny-vl --port 8000");
  options.positional("MODEL", flags.model, "checkpoint folder with tokenizer.json");
  options.add("--host", flags.host,
              "address to listen on; others than this machine's own need an API key");
  options.add("--port", flags.port, "port, 0: any free one");
  options.add("--api-key", flags.api_keys, "clients must send it (repeatable; or M3_API_KEY)");
  options.add("--api-key-file", flags.api_key_file, "file with one key a line");
  options.flag("--allow-no-key", flags.allow_no_key, "listen on other addresses without a key");
  options.add("--alias,--served-model-name", flags.names,
              "name of the model in requests (repeatable; default: the folder's)");
  options.add("-c,--context,--max-model-len,--ctx-size", flags.context,
              "most tokens of prompt and answer (default: what the model allows, at most 131072)");
  options.add("--cache-tokens", flags.cache_tokens,
              "tokens in the cache, of all requests together (default: twice the context)");
  options.add("--max-num-seqs,--max-running-requests,--max-requests", flags.max_requests,
              "requests that run together");
  options.add("--max-num-batched-tokens,--chunk", flags.step_tokens,
              "tokens of one step of the model");
  options.add("--max-step-ms", flags.max_step_ms,
              "prompts are cut so that a step beside answers takes about so long");
  options.add("--max-queue", flags.max_queue, "requests that wait; more are answered with 429");
  options.add("--max-queue-seconds", flags.queue_seconds, "longest wait for a place (0: no limit)");
  options.add("--request-timeout", flags.request_seconds,
              "longest time of a request in seconds (0: no limit)");
  options.add("--shutdown-timeout", flags.shutdown_seconds,
              "seconds that running answers get after Ctrl-C");
  options.add("--max-connections", flags.max_connections,
              "open connections; more are answered with 503");
  options.add("--max-body-mib", flags.max_body_mib, "largest request body");
  options.flag("--no-prefix-cache", flags.no_prefix_cache,
               "compute every prompt from its beginning");
  options.add("--offload-dir", flags.offload_dir,
              "folder for a file to which cache pages go that make room, until they are needed again");
  options.add("--offload-gib", flags.offload_gib, "most that this file takes");
  options.add("--cache-file", flags.cache_file,
              "file for the cache between two runs: read at the start, replaced at the end");
  options.add("--draft-tokens", flags.draft_tokens,
              "speculation by prompt lookup: tokens guessed a step (0: off)");
  options.choice("--default-thinking", flags.thinking, {"enabled", "disabled", "adaptive"},
                 "where a request does not say");
  options.choice("--late-system", flags.late_system, {"refuse", "drop"},
                 "system messages behind the first turn");
  options.flag("--no-media,--language-model-only", flags.no_media, "take no pictures and films");
  options.add("--media-path,--allowed-local-media-path", flags.media_path,
              "file:// URLs below this folder are allowed");
  options.add("--files-dir", flags.files_dir,
              "folder for uploads (/v1/files); emptied of earlier ones at the start");
  options.add("--cors-origins", flags.cors_origins,
              "origin of web pages that may call (repeatable)");
  options.flag("--metrics-open", flags.metrics_open, "/metrics needs no key");
  options.choice("--dtype", flags.dtype, {"bf16", "f32"}, "arithmetic and cache");
  options.threads(flags.threads, "CPU threads of the model (0: all)");
  options.parse(args);
  if (flags.port < 0 || flags.port > 65535) throw UsageError{"--port must be 0 to 65535"};
  for (const auto& [name, value] : {std::pair{"--max-num-seqs", flags.max_requests},
                                    {"--chunk", flags.step_tokens},
                                    {"--max-connections", flags.max_connections},
                                    {"--max-body-mib", flags.max_body_mib},
                                    {"--context", flags.context.value_or(2) - 1},
                                    {"--cache-tokens", flags.cache_tokens.value_or(1)}}) {
    if (value < 1) throw UsageError{fmt::format("{} is too small", name)};
  }
  if (flags.max_queue < 0 || flags.draft_tokens < 0)
    throw UsageError{"--max-queue and --draft-tokens must be 0 or more"};
  if (!(flags.offload_gib > 0 && flags.offload_gib < 1 << 20))
    throw UsageError{"--offload-gib must be above 0 and below 1048576"};
  if (flags.no_prefix_cache && !(flags.offload_dir.empty() && flags.cache_file.empty()))
    throw UsageError{"--offload-dir and --cache-file keep pages of the prefix cache: leave --no-prefix-cache out"};
  if (!is_loopback(flags.host) && keys_of(flags).empty() && !flags.allow_no_key) {
    throw UsageError{
        fmt::format("--host {} is not this machine alone: set --api-key KEY, or say --allow-no-key",
                    flags.host)};
  }
  return flags;
}

// SIGINT and SIGTERM, taken by a thread of their own: the first asks the server to end, the second
// ends the process. Make it before any other thread, so that they inherit the blocked signals.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGINT);
    sigaddset(&set_, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
    std::thread([this] {
      for (int signal = 0;;) {
        sigwait(&set_, &signal);
        const std::lock_guard lock(mutex_);
        if (!serving_ || stop_) _exit(kInterrupted);  // nothing to drain, or asked twice
        stop_ = true;
        changed_.notify_all();
      }
    }).detach();  // lives as long as the process
  }
  void serving() {
    const std::lock_guard lock(mutex_);
    serving_ = true;
  }
  bool wait(std::chrono::seconds limit) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return stop_; });
  }

 private:
  sigset_t set_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool serving_ = false, stop_ = false;
};

SessionOptions session_options(const ServeFlags& flags, const Checkpoint& checkpoint) {
  const ModelConfig& config = checkpoint.config();
  const int64_t limit = config.text.max_position_embeddings;
  M3_CHECK(flags.context.value_or(1) <= limit, "--context {}: the model has positions for {}",
           flags.context.value_or(1), limit);
  SessionOptions options;
  options.dtype = flags.dtype == "f32" ? DType::kF32 : DType::kBF16;
  options.longest_sequence = flags.context.value_or(std::min(limit, kAutoContext));
  options.context_tokens = flags.cache_tokens.value_or(2 * options.longest_sequence);
  options.longest_sequence = std::min(options.longest_sequence, options.context_tokens);
  options.max_step_tokens = std::max(flags.step_tokens, flags.max_requests);
  options.max_requests = flags.max_requests;
  if (config.vision && !flags.no_media) {
    options.max_vision_patches =
        config.vision->segment_max_frames * (kVideoBounds.max_pixels / (kPatchSize * kPatchSize));
  }
  options.engine.prefix_cache = !flags.no_prefix_cache;
  options.engine.offload_dir = flags.offload_dir;
  options.engine.offload_bytes = static_cast<int64_t>(flags.offload_gib * (1 << 30));
  options.engine.cache_file = flags.cache_file;
  options.engine.max_waiting = flags.max_queue;
  options.engine.max_queue_seconds = flags.queue_seconds;
  options.engine.max_step_seconds = flags.max_step_ms / 1e3;
  options.engine.max_draft_tokens = static_cast<int>(flags.draft_tokens);
  return options;
}

ModelInfo model_info(const ServeFlags& flags, const Checkpoint& checkpoint,
                     const Tokenizer& tokenizer, const SessionOptions& session) {
  ModelInfo info;
  info.aliases = flags.names;
  const auto folder = std::filesystem::weakly_canonical(flags.model);
  info.id = flags.names.empty() ? folder.filename().string() : flags.names.front();
  info.max_model_len = session.longest_sequence;
  info.num_ids = tokenizer.size();
  info.has_vision = session.max_vision_patches > 0;
  const GenerationConfig& defaults = checkpoint.generation();
  info.temperature = defaults.do_sample ? defaults.temperature : 0;
  info.top_p = defaults.top_p;
  info.top_k = defaults.top_k;
  info.default_thinking = flags.thinking;
  info.drop_late_system = flags.late_system == "drop";
  info.media_folder = flags.media_path;
  info.cache_type = flags.dtype;
  info.device = "cpu";
  info.version = M3_VERSION;
  return info;
}

ApiServerOptions server_options(const ServeFlags& flags) {
  ApiServerOptions options;
  options.host = flags.host;
  options.port = static_cast<uint16_t>(flags.port);
  options.api_keys = keys_of(flags);
  options.metrics_open = flags.metrics_open;
  options.cors_origins = flags.cors_origins;
  options.request_timeout_seconds = flags.request_seconds;
  options.max_jobs = flags.max_queue + flags.max_requests;
  options.http.max_connections = static_cast<int>(flags.max_connections);
  options.http.max_body_bytes = static_cast<uint64_t>(flags.max_body_mib) << 20;
  return options;
}

// One line every ten seconds in which something happened.
void log_load(const EngineMetrics& before, const EngineMetrics& now, double seconds) {
  if (now.steps == before.steps && now.waiting == 0) return;
  log_info(
      "{} running, {} waiting | prompts {:.1f} tok/s, answers {:.1f} tok/s | cache {:.0f} % used, "
      "prefix hits {:.0f} %",
      now.running, now.waiting,
      static_cast<double>(now.computed_prompt_tokens - before.computed_prompt_tokens) / seconds,
      static_cast<double>(now.answer_tokens - before.answer_tokens) / seconds,
      now.pages_total > 0
          ? 100.0 * static_cast<double>(now.pages_used) / static_cast<double>(now.pages_total)
          : 0.0,
      100 * now.hit_rate());
}

}  // namespace

int command_serve(const Args& args) {
  const ServeFlags flags = parse(args);
  StopSignals& signals = *new StopSignals;  // its thread may use it until the process has ended
  set_num_threads(flags.threads);
  const Checkpoint checkpoint = Checkpoint::open(flags.model);
  const Tokenizer tokenizer = Tokenizer::load(flags.model);
  const SessionOptions session_flags = session_options(flags, checkpoint);
  ModelInfo info = model_info(flags, checkpoint, tokenizer, session_flags);
  std::unique_ptr<FileStore> files;
  if (!flags.files_dir.empty())
    info.files = (files = std::make_unique<FileStore>(flags.files_dir)).get();
  std::vector<int32_t> stop_ids(checkpoint.generation().eos_token_ids.begin(),
                                checkpoint.generation().eos_token_ids.end());
  if (const auto id = tokenizer.added_id(chat_token::kTurnEnd)) stop_ids.push_back(*id);

  // Listens first: a port that is taken must not cost the loading of a model.
  ApiServer server(info, tokenizer, stop_ids, server_options(flags));
  Session session(checkpoint, tokenizer, session_flags);
  fmt::print(stderr, "memory plan\n{}{}\n", session.plan().str(), session.capacity());
  EngineThread engine(session.engine());
  server.ready(engine);
  signals.serving();
  if (server_options(flags).api_keys.empty() && !is_loopback(flags.host))
    log_warn("anyone who reaches {} may use this server", flags.host);
  fmt::print(stderr,
             "{}: context {} tokens, cache {} tokens, {} requests together, loaded in {:.1f} s\n",
             info.id, info.max_model_len, session_flags.context_tokens, flags.max_requests,
             session.load_seconds());
  fmt::print("ready on http://{}:{}\n", flags.host, server.port());
  std::fflush(stdout);

  constexpr std::chrono::seconds kReportEvery{10};
  EngineMetrics before = engine.metrics();
  while (!signals.wait(kReportEvery)) {
    const EngineMetrics now = engine.metrics();
    log_load(before, now, static_cast<double>(kReportEvery.count()));
    before = now;
  }
  log_info("stopping: {} answers in work get {:.0f} s, Ctrl-C again ends them", server.num_jobs(),
           flags.shutdown_seconds);
  const bool all_ended = server.shut_down(flags.shutdown_seconds);
  engine.stop(0);
  try {
    session.engine().save_cache();
  } catch (const std::exception& error) {
    log_warn("the cache is not kept: {}", error.what());
  }
  log_info("stopped{}", all_ended ? "" : "; some answers were cut");
  return 0;
}

}  // namespace m3::cli
