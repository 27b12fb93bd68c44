// The only file that includes Boost.Asio and Beast (12 s to compile).
#include "server/http_server.h"

#include <atomic>
#include <boost/asio.hpp>
#include <boost/asio/experimental/awaitable_operators.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <boost/beast/version.hpp>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "base/check.h"
#include "base/log.h"
#include "server/worker_pool.h"

namespace m3 {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using namespace asio::experimental::awaitable_operators;  // NOLINT: operator|| on awaitables

std::string_view HttpRequest::header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

const char* http_status_text(int status) {
  const auto text = http::obsolete_reason(static_cast<http::status>(status));
  return text.empty() ? "Unknown" : text.data();
}

namespace {

constexpr auto kAwait = asio::as_tuple(asio::use_awaitable);
constexpr std::chrono::seconds kLongestClosing{2};  // of all connections, when the server stops

// Bytes of one answer on their way from any thread to the connection's coroutine.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(std::shared_ptr<asio::io_context> io, uint64_t max_unsent_bytes, bool keep_alive,
           bool chunked)
      : io_(std::move(io)),
        wake_(*io_),
        max_unsent_bytes_(max_unsent_bytes),
        keep_alive_(keep_alive),
        chunked_(chunked) {}

  void push(std::string bytes, bool last) {
    std::function<void()> abandoned;
    {
      const std::lock_guard lock(mutex_);
      if (complete_ || gone_) return;
      complete_ = last;
      unsent_ += bytes;
      if (unsent_.size() > max_unsent_bytes_ && !last) {
        gone_ = true;
        abandoned = std::move(on_gone_);
      }
    }
    notify();
    if (abandoned) abandoned();
  }

  // For the coroutine: what to write now; nullopt when there is nothing yet.
  struct Piece {
    std::string bytes;
    bool last;
  };
  std::optional<Piece> take() {
    const std::lock_guard lock(mutex_);
    if (unsent_.empty() && !complete_) return std::nullopt;
    Piece piece{std::move(unsent_), complete_};
    unsent_.clear();
    return piece;
  }

  void mark_gone() {
    std::function<void()> callback;
    {
      const std::lock_guard lock(mutex_);
      if (gone_ || (complete_ && unsent_.empty())) return;
      gone_ = true;
      callback = std::move(on_gone_);
    }
    if (callback) callback();
  }
  bool gone() const {
    const std::lock_guard lock(mutex_);
    return gone_;
  }
  void on_gone(std::function<void()> callback) {
    {
      const std::lock_guard lock(mutex_);
      if (!gone_) {
        on_gone_ = std::move(callback);
        return;
      }
    }
    callback();
  }

  // For the coroutine: re-arm before take(), so that what is pushed afterwards ends the wait.
  void arm() { wake_.expires_at(std::chrono::steady_clock::time_point::max()); }
  asio::steady_timer& wake() { return wake_; }
  bool keep_alive() const { return keep_alive_; }
  bool chunked() const { return chunked_; }

 private:
  // An expired timer ends the wait that runs now or the one that starts next. Only the I/O thread
  // may touch it.
  void notify() {
    asio::post(*io_, [self = shared_from_this()] {
      self->wake_.expires_at(std::chrono::steady_clock::time_point::min());
    });
  }

  std::shared_ptr<asio::io_context> io_;  // an answer may outlive the server
  asio::steady_timer wake_;
  const uint64_t max_unsent_bytes_;
  const bool keep_alive_, chunked_;
  mutable std::mutex mutex_;  // guards what follows
  std::string unsent_;
  bool complete_ = false, gone_ = false;
  std::function<void()> on_gone_;
};

std::string answer_head(int status, std::string_view content_type, const HttpHeaders& headers,
                        bool keep_alive) {
  std::string head =
      fmt::format("HTTP/1.1 {} {}\r\nContent-Type: {}\r\nConnection: {}\r\n", status,
                  http_status_text(status), content_type, keep_alive ? "keep-alive" : "close");
  for (const auto& [name, value] : headers) head += name + ": " + value + "\r\n";
  return head;
}

class Responder : public HttpResponder {
 public:
  Responder(std::shared_ptr<Exchange> exchange, bool head_only)
      : exchange_(std::move(exchange)), head_only_(head_only) {}
  ~Responder() override {
    if (!begun_) send(500, "text/plain", "the request was dropped\n", {});
    if (!ended_) end();
  }

  void send(int status, std::string_view content_type, std::string body,
            HttpHeaders headers) override {
    if (begun_.exchange(true)) return;
    ended_ = true;
    headers.emplace_back("Content-Length", std::to_string(body.size()));
    std::string bytes =
        answer_head(status, content_type, headers, exchange_->keep_alive()) + "\r\n";
    if (!head_only_) bytes += body;
    exchange_->push(std::move(bytes), true);
  }

  void begin_stream(int status, std::string_view content_type, HttpHeaders headers) override {
    if (begun_.exchange(true)) return;
    if (exchange_->chunked()) headers.emplace_back("Transfer-Encoding", "chunked");
    exchange_->push(answer_head(status, content_type, headers, exchange_->keep_alive()) + "\r\n",
                    false);
  }
  void write(std::string_view data) override {
    if (data.empty() || head_only_) return;
    exchange_->push(
        exchange_->chunked() ? fmt::format("{:x}\r\n{}\r\n", data.size(), data) : std::string(data),
        false);
  }
  void end() override {
    if (ended_.exchange(true)) return;
    exchange_->push(exchange_->chunked() && !head_only_ ? "0\r\n\r\n" : "", true);
  }
  bool gone() const override { return exchange_->gone(); }
  void on_gone(std::function<void()> callback) override { exchange_->on_gone(std::move(callback)); }

 private:
  std::shared_ptr<Exchange> exchange_;
  const bool head_only_;
  std::atomic<bool> begun_ = false, ended_ = false;
};

}  // namespace

struct HttpServer::Impl {
  HttpLimits limits;
  HttpHandler handler;
  std::shared_ptr<asio::io_context> io_owner = std::make_shared<asio::io_context>(1);
  asio::io_context& io = *io_owner;
  tcp::acceptor acceptor{io};
  std::atomic<int> connections = 0, answering = 0;
  std::atomic<bool> draining = false;
  std::map<tcp::socket*, std::shared_ptr<Exchange>> open;  // of the io thread: connections, what each is answering
  std::optional<WorkerPool> workers;
  std::thread io_thread;

  // A connection is in `open` as long as this lives.
  class Listed {
   public:
    Listed(std::map<tcp::socket*, std::shared_ptr<Exchange>>& open, tcp::socket* socket)
        : open_(open), socket_(socket) {
      open_.emplace(socket_, nullptr);
    }
    ~Listed() { open_.erase(socket_); }
    Listed(const Listed&) = delete;
    Listed& operator=(const Listed&) = delete;

   private:
    std::map<tcp::socket*, std::shared_ptr<Exchange>>& open_;
    tcp::socket* socket_;
  };

  void close_all() {
    beast::error_code ignored;
    acceptor.close(ignored);
    for (auto& [socket, exchange] : open) {
      socket->close(ignored);
      if (exchange) {
        exchange->mark_gone();
        exchange->wake().cancel();
      }
    }
  }

  asio::awaitable<void> accept_loop() {
    while (acceptor.is_open()) {
      auto [error, socket] = co_await acceptor.async_accept(kAwait);
      if (error == asio::error::operation_aborted) co_return;
      if (error) {  // out of file descriptors, for one: wait rather than spin
        log_warn("accept: {}", error.message());
        asio::steady_timer pause(io, std::chrono::milliseconds(50));
        co_await pause.async_wait(kAwait);
        continue;
      }
      if (connections >= limits.max_connections) {
        beast::error_code ignored;
        constexpr std::string_view kBusy =
            "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: "
            "close\r\nContent-Length: 0\r\n\r\n";
        socket.write_some(asio::buffer(kBusy), ignored);
        continue;
      }
      beast::error_code ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      ++connections;
      asio::co_spawn(io, serve(beast::tcp_stream(std::move(socket))),
                     [this](std::exception_ptr problem) {
                       --connections;
                       try {
                         if (problem) std::rethrow_exception(problem);
                       } catch (const std::exception& error) {
                         log_warn("connection closed: {}", error.what());
                       }
                     });
    }
  }

  // One connection: request after request until it closes.
  asio::awaitable<void> serve(beast::tcp_stream stream) {
    beast::flat_buffer buffer;
    beast::error_code ignored;
    const Listed listed(open, &stream.socket());
    const auto peer = stream.socket().remote_endpoint(ignored);
    const std::string client = fmt::format("{}:{}", peer.address().to_string(), peer.port());
    for (;;) {
      if (buffer.size() == 0 && !co_await wait_for_request(stream)) break;
      http::request_parser<http::string_body> parser;
      parser.header_limit(limits.max_header_bytes);
      parser.body_limit(limits.max_body_bytes);
      if (!co_await read_request(stream, buffer, parser)) break;
      const bool keep_alive = parser.get().keep_alive() && !draining;
      auto exchange = std::make_shared<Exchange>(io_owner, limits.max_unsent_bytes, keep_alive,
                                                 parser.get().version() >= 11);
      ++answering;
      open[&stream.socket()] = exchange;
      dispatch(parser.release(), client, exchange);
      const bool written = co_await write_answer(stream, buffer, *exchange);
      --answering;
      open[&stream.socket()] = nullptr;
      exchange->mark_gone();
      if (!written || !keep_alive || !exchange->chunked()) break;
    }
    stream.socket().shutdown(tcp::socket::shutdown_both, ignored);
  }

  asio::awaitable<bool> wait_for_request(beast::tcp_stream& stream) {
    asio::steady_timer idle(io, limits.idle_timeout);
    const auto first = co_await (stream.socket().async_wait(tcp::socket::wait_read, kAwait) ||
                                 idle.async_wait(kAwait));
    co_return first.index() == 0 && !std::get<0>(std::get<0>(first));
  }

  // Reads header and body; answers what is not acceptable itself. False: close the connection.
  asio::awaitable<bool> read_request(beast::tcp_stream& stream, beast::flat_buffer& buffer,
                                     http::request_parser<http::string_body>& parser) {
    stream.expires_after(limits.header_timeout);
    auto [header_error, header_bytes] =
        co_await http::async_read_header(stream, buffer, parser, kAwait);
    if (header_error) {
      co_await refuse(stream, header_error);
      co_return false;
    }
    if (beast::iequals(parser.get()[http::field::expect], "100-continue")) {
      co_await asio::async_write(
          stream, asio::buffer(std::string_view("HTTP/1.1 100 Continue\r\n\r\n")), kAwait);
    }
    while (!parser.is_done()) {
      stream.expires_after(limits.body_idle_timeout);
      auto [error, bytes] = co_await http::async_read_some(stream, buffer, parser, kAwait);
      if (error) {
        co_await refuse(stream, error);
        co_return false;
      }
    }
    stream.expires_never();
    co_return true;
  }

  asio::awaitable<void> refuse(beast::tcp_stream& stream, beast::error_code error) {
    int status = 400;
    if (error == http::error::end_of_stream || error == asio::error::operation_aborted ||
        error == asio::error::connection_reset || error == asio::error::eof ||
        error == beast::error::timeout) {
      co_return;
    }
    if (error == http::error::body_limit) status = 413;
    if (error == http::error::header_limit) status = 431;
    const std::string body = fmt::format(
        R"({{"error":{{"message":"{}","type":"invalid_request_error","param":null,"code":{}}}}})",
        status == 413 ? fmt::format("the body is longer than {} bytes", limits.max_body_bytes)
                      : error.message(),
        status);
    const std::string bytes =
        answer_head(status, "application/json", {{"Content-Length", std::to_string(body.size())}},
                    false) +
        "\r\n" + body;
    stream.expires_after(std::chrono::seconds(2));
    co_await asio::async_write(stream, asio::buffer(bytes), kAwait);
    // A client still sending would see a reset instead of the answer: read on for a moment.
    beast::error_code ignored;
    stream.socket().shutdown(tcp::socket::shutdown_send, ignored);
    std::array<char, 4096> rest;
    for (int i = 0; i < 256; ++i) {
      auto [read_error, bytes_read] = co_await stream.async_read_some(asio::buffer(rest), kAwait);
      if (read_error) break;
    }
  }

  void dispatch(http::request<http::string_body> message, const std::string& client,
                std::shared_ptr<Exchange> exchange) {
    HttpRequest request;
    request.method = std::string(message.method_string());
    const std::string_view target(message.target().data(), message.target().size());
    const size_t mark = target.find('?');
    request.path = target.substr(0, mark);
    if (mark != std::string_view::npos) request.query = target.substr(mark + 1);
    for (const auto& field : message) {
      std::string name(field.name_string());
      for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
      request.headers.emplace_back(std::move(name), std::string(field.value()));
    }
    request.body = std::move(message.body());
    request.client = client;
    auto responder = std::make_shared<Responder>(std::move(exchange), request.method == "HEAD");
    workers->post([this, request = std::move(request), responder = std::move(responder)]() mutable {
      try {
        handler(std::move(request), responder);
      } catch (
          const std::exception& error) {  // a handler answers its own errors; this is our mistake
        log_error("handler: {}", error.what());
        responder->send(500, "text/plain", "internal error\n", {});
      }
    });
  }

  // Moves the answer to the socket and watches for the client going away. False: the connection is
  // dead.
  asio::awaitable<bool> write_answer(beast::tcp_stream& stream, beast::flat_buffer& buffer,
                                     Exchange& exchange) {
    bool watch = buffer.size() == 0;  // bytes of a next request are there already: nothing to watch
    for (;;) {
      if (exchange.gone()) co_return false;
      exchange.arm();
      if (auto piece = exchange.take()) {
        stream.expires_after(limits.write_idle_timeout);
        if (!piece->bytes.empty()) {
          auto [error, bytes] =
              co_await asio::async_write(stream, asio::buffer(piece->bytes), kAwait);
          if (error) co_return false;
        }
        stream.expires_never();
        if (piece->last) co_return true;
        continue;
      }
      if (!watch) {
        co_await exchange.wake().async_wait(kAwait);
        continue;
      }
      const auto first = co_await (exchange.wake().async_wait(kAwait) ||
                                   stream.socket().async_wait(tcp::socket::wait_read, kAwait));
      if (first.index() == 0) continue;
      char byte;
      beast::error_code error;
      stream.socket().non_blocking(true, error);
      const size_t got =
          stream.socket().receive(asio::buffer(&byte, 1), tcp::socket::message_peek, error);
      if (error == asio::error::would_block) continue;
      if (error || got == 0) co_return false;
      watch = false;
    }
  }
};

HttpServer::HttpServer(const std::string& host, uint16_t port, const HttpLimits& limits,
                       int num_workers, HttpHandler handler)
    : impl_(std::make_unique<Impl>()) {
  impl_->limits = limits;
  impl_->handler = std::move(handler);
  beast::error_code error;
  tcp::resolver resolver(impl_->io);
  const auto places = resolver.resolve(host, std::to_string(port), tcp::resolver::passive, error);
  M3_CHECK(!error && !places.empty(), "cannot listen on {}: {}", host, error.message());
  const tcp::endpoint endpoint = places.begin()->endpoint();
  impl_->acceptor.open(endpoint.protocol());
  impl_->acceptor.set_option(asio::socket_base::reuse_address(true));
  impl_->acceptor.bind(endpoint, error);
  M3_CHECK(!error, "cannot listen on {}:{}: {}", host, port, error.message());
  impl_->acceptor.listen(asio::socket_base::max_listen_connections, error);
  M3_CHECK(!error, "cannot listen on {}:{}: {}", host, port, error.message());
  impl_->workers.emplace(num_workers);
  asio::co_spawn(impl_->io, impl_->accept_loop(), asio::detached);
  impl_->io_thread = std::thread([this] { impl_->io.run(); });
}

HttpServer::~HttpServer() {
  stop();
}

uint16_t HttpServer::port() const {
  return impl_->acceptor.local_endpoint().port();
}
int HttpServer::num_connections() const {
  return impl_->connections;
}

bool HttpServer::drain(std::chrono::milliseconds timeout) {
  impl_->draining = true;
  asio::post(impl_->io, [this] {
    beast::error_code ignored;
    impl_->acceptor.close(ignored);
  });
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  while (impl_->answering > 0) {
    if (std::chrono::steady_clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

void HttpServer::stop() {
  if (!impl_->io_thread.joinable()) return;
  // Connections must end by themselves: the frame of one holds its exchange, that the io_context, and that the frame.
  asio::post(impl_->io, [this] { impl_->close_all(); });
  const auto deadline = std::chrono::steady_clock::now() + kLongestClosing;
  while (impl_->connections > 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  impl_->io.stop();
  impl_->io_thread.join();
  impl_->workers.reset();  // waits for handlers; what they answer goes nowhere
}

}  // namespace m3
