// A whole server on a small golden model, for tests: real protocol, real engine; a test may
// prescribe the tokens.
#pragma once
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "engine/session.h"
#include "server/answer.h"
#include "server/api_server.h"
#include "server/test_client.h"

namespace m3 {

struct HttpReply {
  int status = 0;
  std::string head, body;
  JsonValue json() const { return JsonValue::parse(body, "reply"); }
  std::string header(const std::string& name) const;
  // Events of a stream: name (may be empty) and data; "[DONE]" is a string.
  std::vector<std::pair<std::string, JsonValue>> events() const;
};

// One request on a connection of its own.
HttpReply http_call(uint16_t port, const std::string& method, const std::string& path,
                    const std::string& body = "",
                    const std::string& headers = "Content-Type: application/json\r\n");

struct TestServerOptions {
  EngineOptions engine;
  ApiServerOptions api;
  int64_t max_requests = 8, context = 4096, cache_tokens = 16384;
};

class TestServer {
 public:
  explicit TestServer(TestServerOptions options = {});
  ~TestServer();

  HttpReply post(const std::string& path, const std::string& body) const {
    return http_call(port(), "POST", path, body);
  }
  HttpReply get(const std::string& path) const { return http_call(port(), "GET", path); }
  uint16_t port() const { return server_->port(); }
  ApiServer& server() { return *server_; }
  EngineThread& engine() { return *engine_; }
  Session& session() { return *session_; }
  static const Tokenizer& tokenizer();

  // From here on every answer is this text; its markers are tokens, except inside of `plain`.
  void say(const std::string& text, std::span<const TextRange> plain = {});
  void say_ids(std::vector<int32_t> ids);
  void say_what_the_model_says();
  bool wait_until_idle();  // no request in work and no page in use

 private:
  std::unique_ptr<Session> session_;
  std::unique_ptr<EngineThread> engine_;
  std::mutex mutex_;  // guards script_
  std::optional<std::vector<int32_t>> script_;
  std::unique_ptr<ApiServer> server_;
};

}  // namespace m3
