// The HTTP front of an engine: routes, keys, limits, and the four API families over one internal
// form (serving.md). A request's way: http_server reads it; a worker of it authenticates, parses,
// decodes media, renders and tokenises (prompt_builder) and submits a GenerationJob; the engine's
// thread draws tokens; answer workers write them.
#pragma once
#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine_thread.h"
#include "server/api_request.h"
#include "server/http_server.h"
#include "text/tokenizer.h"

namespace m3 {

struct ApiServerOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;  // 0: any free one
  HttpLimits http;
  int num_workers = 4;                    // parse requests and decode media
  std::vector<std::string> api_keys;      // none: everybody may ask
  bool metrics_open = false;              // /metrics without a key
  std::vector<std::string> cors_origins;  // pages of these origins may call
  double request_timeout_seconds = 0;     // 0: none
  double ping_seconds = 15;               // a stream's silence before a comment
  int64_t max_jobs = 2048;  // requests in work; more are refused before they are parsed
  // For tests: the tokens of the answer to a rendered prompt, whatever the model says. Everything
  // else is real.
  std::function<std::optional<std::vector<int32_t>>(const std::string& prompt)> script;
};

class ApiServer {
 public:
  // Listens at once and answers 503 until ready(). `stop_ids` end a turn. Tokenizer must outlive
  // the server.
  ApiServer(ModelInfo info, const Tokenizer& tokenizer, std::vector<int32_t> stop_ids,
            ApiServerOptions options);
  ~ApiServer();  // shut_down(0)
  ApiServer(const ApiServer&) = delete;
  ApiServer& operator=(const ApiServer&) = delete;

  void ready(EngineThread&
                 engine);  // must outlive the server, and be running until shut_down() has returned
  uint16_t port() const;
  int64_t num_jobs() const;  // requests whose answer is not complete

  // 503 for new requests; those in work go on for so many seconds and then end with an error.
  // Returns whether none had to be ended.
  bool shut_down(double seconds);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace m3
