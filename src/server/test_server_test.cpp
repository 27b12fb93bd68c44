#include <mutex>
#include <thread>

#include "server/test_server.h"

namespace m3 {

namespace {

constexpr const char* kFolder = M3_SOURCE_DIR "/tests/golden/models/tiny-vl";

const Checkpoint& checkpoint() {
  static const Checkpoint opened = Checkpoint::open(kFolder);
  return opened;
}

std::string unchunked(std::string_view body) {
  std::string out;
  while (!body.empty()) {
    const size_t line = body.find("\r\n");
    const size_t size = std::stoul(std::string(body.substr(0, line)), nullptr, 16);
    if (size == 0) break;
    out += body.substr(line + 2, size);
    body.remove_prefix(line + 2 + size + 2);
  }
  return out;
}

}  // namespace

std::string HttpReply::header(const std::string& name) const {
  const size_t at = head.find("\r\n" + name + ": ");
  if (at == std::string::npos) return "";
  const size_t begin = at + name.size() + 4;
  return head.substr(begin, head.find("\r\n", begin) - begin);
}

std::vector<std::pair<std::string, JsonValue>> HttpReply::events() const {
  std::vector<std::pair<std::string, JsonValue>> list;
  for (size_t at = 0; at < body.size();) {
    const size_t end = body.find("\n\n", at);
    EXPECT_NE(end, std::string::npos) << "an event without its end: " << body.substr(at);
    if (end == std::string::npos) break;
    std::string block = body.substr(at, end - at), name;
    at = end + 2;
    if (block.starts_with(":")) continue;
    if (block.starts_with("event: ")) {
      const size_t line = block.find('\n');
      name = block.substr(7, line - 7);
      block = block.substr(line + 1);
    }
    EXPECT_TRUE(block.starts_with("data: ")) << block;
    const std::string data = block.substr(6);
    list.emplace_back(name,
                      data == "[DONE]" ? JsonValue::string(data) : JsonValue::parse(data, "event"));
  }
  return list;
}

HttpReply http_call(uint16_t port, const std::string& method, const std::string& path,
                    const std::string& body, const std::string& headers) {
  Client client(port);
  client.send(fmt::format(
      "{} {} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{}Content-Length: {}\r\n\r\n{}",
      method, path, headers, body.size(), body));
  const std::string all = client.read_all();
  HttpReply reply;
  const size_t end = all.find("\r\n\r\n");
  EXPECT_NE(end, std::string::npos) << "no answer to " << method << " " << path;
  if (end == std::string::npos) return reply;
  reply.head = all.substr(0, end + 2);
  reply.status = std::stoi(all.substr(9, 3));
  reply.body = all.substr(end + 4);
  if (!reply.header("Transfer-Encoding").empty()) reply.body = unchunked(reply.body);
  return reply;
}

const Tokenizer& TestServer::tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(kFolder);
  return loaded;
}

TestServer::TestServer(TestServerOptions options) {
  SessionOptions session;
  session.dtype = DType::kF32;
  session.context_tokens = options.cache_tokens;
  session.longest_sequence = options.context;
  session.max_requests = options.max_requests;
  session.max_vision_patches = 4096;
  session.engine = options.engine;
  session.progress = Progress::Mode::kOff;
  session_ = std::make_unique<Session>(checkpoint(), tokenizer(), session);
  engine_ = std::make_unique<EngineThread>(session_->engine());
  ModelInfo info;
  info.id = "tiny";
  info.aliases = {"other-name"};
  info.max_model_len = options.context;
  info.num_ids = tokenizer().size();
  info.has_vision = true;
  info.version = "test";
  options.api.port = 0;
  options.api.script = [this](const std::string&) {
    const std::lock_guard lock(mutex_);
    return script_;
  };
  server_ = std::make_unique<ApiServer>(
      info, tokenizer(), std::vector{tokenizer().require_added_id(chat_token::kTurnEnd)},
      options.api);
  server_->ready(*engine_);
}

TestServer::~TestServer() {
  server_->shut_down(0);
}

void TestServer::say(const std::string& text, std::span<const TextRange> plain) {
  say_ids(tokenizer().encode(text, {.plain = plain}));
}

void TestServer::say_ids(std::vector<int32_t> ids) {
  const std::lock_guard lock(mutex_);
  script_ = std::move(ids);
}

void TestServer::say_what_the_model_says() {
  const std::lock_guard lock(mutex_);
  script_.reset();
}

bool TestServer::wait_until_idle() {
  for (int i = 0; i < 1000; ++i) {
    const EngineMetrics metrics = engine_->metrics();
    if (server_->num_jobs() == 0 && metrics.running == 0 && metrics.waiting == 0 &&
        metrics.pages_used == 0)
      return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return false;
}

}  // namespace m3
