// HTTP/1.1 transport: connections, limits, streaming answers. Knows nothing of models or JSON.
//
// Threads: one I/O thread owns every socket (Boost.Asio coroutines); handlers run on worker threads
// and may answer later from any thread. A slow or absent client never blocks a thread: what it has
// not read waits in a bounded buffer, and past the bound the request counts as abandoned.
#pragma once
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace m3 {

struct HttpLimits {
  uint64_t max_body_bytes = uint64_t{256} << 20;
  uint32_t max_header_bytes = 64 << 10;
  int max_connections = 4096;
  uint64_t max_unsent_bytes = 4 << 20;  // of one answer; more means that the client does not read
  std::chrono::milliseconds idle_timeout{75'000};    // between requests of a kept-alive connection
  std::chrono::milliseconds header_timeout{10'000};  // first byte to end of header
  std::chrono::milliseconds body_idle_timeout{30'000};   // without a byte of the body
  std::chrono::milliseconds write_idle_timeout{60'000};  // without progress of a write
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method, path, query;  // path without the query, percent-encoding as received
  HttpHeaders headers;              // names in lower case
  std::string body;
  std::string client;  // address:port
  // Value of a header (lower-case name); empty if absent.
  std::string_view header(std::string_view name) const;
};

// The answer to one request; thread-safe. Exactly one of send() or begin_stream()...end() is used.
// Calls after the client has gone are harmless. A responder dropped without an answer sends a 500.
class HttpResponder {
 public:
  virtual ~HttpResponder() = default;
  virtual void send(int status, std::string_view content_type, std::string body,
                    HttpHeaders headers = {}) = 0;
  virtual void begin_stream(int status, std::string_view content_type,
                            HttpHeaders headers = {}) = 0;
  virtual void write(std::string_view data) = 0;
  virtual void end() = 0;
  // The client closed the connection, stopped reading, or the server gave up waiting for it.
  virtual bool gone() const = 0;
  // Called once, from the I/O thread, when that happens before the answer is complete; at once if
  // it already has. Must not block.
  virtual void on_gone(std::function<void()> callback) = 0;
};

using HttpHandler =
    std::function<void(HttpRequest request, std::shared_ptr<HttpResponder> responder)>;

class HttpServer {
 public:
  // Binds at once (port 0: any free one); throws with the address and the system's reason.
  HttpServer(const std::string& host, uint16_t port, const HttpLimits& limits, int num_workers,
             HttpHandler handler);
  ~HttpServer();
  HttpServer(const HttpServer&) = delete;
  HttpServer& operator=(const HttpServer&) = delete;

  uint16_t port() const;
  int num_connections() const;
  // Stops accepting; answers in progress go on. Returns true once none is left, false at the time
  // limit.
  bool drain(std::chrono::milliseconds timeout);
  // Closes every connection and joins the threads; the destructor calls it.
  void stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

const char* http_status_text(int status);

}  // namespace m3
