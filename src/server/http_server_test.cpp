// The transport against plain sockets: what a client sees and when the server notices that it left.
#include "server/http_server.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "server/test_client.h"

namespace m3 {
namespace {

using namespace std::chrono_literals;

std::string get(const std::string& path) {
  return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n";
}

// A flag that another thread raises.
class Signal {
 public:
  void raise() {
    {
      const std::lock_guard lock(mutex_);
      raised_ = true;
    }
    changed_.notify_all();
  }
  bool wait(std::chrono::seconds limit = 10s) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [this] { return raised_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool raised_ = false;
};

HttpLimits quick_limits() {
  HttpLimits limits;
  limits.max_body_bytes = 1000;
  limits.max_header_bytes = 2048;
  limits.header_timeout = 300ms;
  limits.body_idle_timeout = 300ms;
  return limits;
}

void echo(HttpRequest request, std::shared_ptr<HttpResponder> responder) {
  responder->send(200, "text/plain",
                  request.method + " " + request.path + "?" + request.query + " " + request.body);
}

TEST(HttpServer, answers_and_keeps_the_connection) {
  HttpServer server("127.0.0.1", 0, {}, 2, echo);
  Client client(server.port());
  for (int i = 0; i < 3; ++i) {
    client.send("POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nxyz");
    const std::string answer = client.read_until("xyz");
    EXPECT_NE(answer.find("HTTP/1.1 200 OK"), std::string::npos) << answer;
    EXPECT_NE(answer.find("POST /a?b=c xyz"), std::string::npos) << answer;
  }
  // Two requests in one packet are answered in order.
  client.send(get("/1") + get("/2"));
  const std::string both = client.read_until("GET /2?");
  EXPECT_LT(both.find("GET /1?"), both.find("GET /2?"));
}

TEST(HttpServer, refuses_what_is_over_a_limit_or_no_http) {
  HttpServer server("127.0.0.1", 0, quick_limits(), 1, echo);
  const auto answer = [&](const std::string& text) {
    Client client(server.port());
    client.send(text);
    return client.read_all().substr(0, 12);
  };
  EXPECT_EQ(answer("POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n"), "HTTP/1.1 413");
  EXPECT_EQ(answer("GET / HTTP/1.1\r\nX: " + std::string(4096, 'x') + "\r\n\r\n"), "HTTP/1.1 431");
  EXPECT_EQ(answer("nonsense\r\n\r\n"), "HTTP/1.1 400");
  // A header or body that never ends: the connection closes at the time limit.
  EXPECT_EQ(answer("GET / HTTP/1.1\r\nHost"), "");
  EXPECT_EQ(answer("POST / HTTP/1.1\r\nContent-Length: 10\r\n\r\nabc"), "");
}

TEST(HttpServer, a_stream_arrives_in_pieces_as_they_are_written) {
  Signal first_seen;
  HttpServer server("127.0.0.1", 0, {}, 1,
                    [&](HttpRequest, std::shared_ptr<HttpResponder> responder) {
                      responder->begin_stream(200, "text/event-stream");
                      responder->write("data: one\n\n");
                      ASSERT_TRUE(first_seen.wait());
                      responder->write("data: two\n\n");
                      responder->end();
                    });
  Client client(server.port());
  client.send(get("/"));
  std::string text = client.read_until("data: one\n\n\r\n");
  EXPECT_EQ(text.find("two"), std::string::npos);
  first_seen.raise();
  EXPECT_EQ(client.read_until("0\r\n\r\n"), "b\r\ndata: two\n\n\r\n0\r\n\r\n");
}

TEST(HttpServer, notices_a_client_that_leaves_before_the_answer) {
  Signal asked, left;
  std::shared_ptr<HttpResponder> kept;
  HttpServer server("127.0.0.1", 0, {}, 1,
                    [&](HttpRequest, std::shared_ptr<HttpResponder> responder) {
                      responder->on_gone([&] { left.raise(); });
                      kept = responder;
                      asked.raise();
                    });
  Client client(server.port());
  client.send(get("/"));
  ASSERT_TRUE(asked.wait());
  EXPECT_FALSE(kept->gone());
  client.close();
  EXPECT_TRUE(left.wait());
  EXPECT_TRUE(kept->gone());
  kept->send(200, "text/plain", "too late");  // harmless
}

TEST(HttpServer, gives_up_on_a_client_that_does_not_read) {
  HttpLimits limits;
  limits.max_unsent_bytes = 1 << 20;
  Signal left;
  HttpServer server("127.0.0.1", 0, limits, 1,
                    [&](HttpRequest, std::shared_ptr<HttpResponder> responder) {
                      responder->on_gone([&] { left.raise(); });
                      responder->begin_stream(200, "text/plain");
                      const std::string piece(64 << 10, 'x');
                      for (int i = 0; i < 4096 && !responder->gone(); ++i) responder->write(piece);
                      EXPECT_TRUE(responder->gone());
                    });
  Client client(server.port());
  client.send(get("/"));
  EXPECT_TRUE(left.wait());
}

TEST(HttpServer, a_dropped_responder_is_an_error_answer) {
  HttpServer server("127.0.0.1", 0, {}, 1, [](HttpRequest, std::shared_ptr<HttpResponder>) {});
  Client client(server.port());
  client.send(get("/"));
  EXPECT_NE(client.read_until("dropped").find("HTTP/1.1 500"), std::string::npos);
}

TEST(HttpServer, drain_waits_for_answers_in_progress) {
  Signal asked, finish;
  HttpServer server("127.0.0.1", 0, {}, 1,
                    [&](HttpRequest, std::shared_ptr<HttpResponder> responder) {
                      asked.raise();
                      ASSERT_TRUE(finish.wait());
                      responder->send(200, "text/plain", "done");
                    });
  Client client(server.port());
  client.send(get("/"));
  ASSERT_TRUE(asked.wait());
  EXPECT_FALSE(server.drain(50ms));
  finish.raise();
  EXPECT_TRUE(server.drain(5s));
  EXPECT_NE(client.read_until("done").find("200"), std::string::npos);
}

TEST(HttpServer, holds_a_thousand_streams) {
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < 2200) GTEST_SKIP() << "only " << files.rlim_cur << " file descriptors";
  constexpr int kStreams = 1000;
  std::mutex mutex;
  std::vector<std::shared_ptr<HttpResponder>> open;
  HttpServer server("127.0.0.1", 0, {}, 1,
                    [&](HttpRequest, std::shared_ptr<HttpResponder> responder) {
                      const std::lock_guard lock(mutex);
                      responder->begin_stream(200, "text/event-stream");
                      open.push_back(std::move(responder));
                    });
  std::vector<Client> clients;
  for (int i = 0; i < kStreams; ++i) {
    clients.emplace_back(server.port());
    clients.back().send(get("/"));
  }
  for (auto& client : clients) client.read_until("\r\n\r\n");
  const std::lock_guard lock(mutex);
  for (auto& responder : open) responder->write("data: x\n\n");
  for (auto& client : clients)
    EXPECT_EQ(client.read_until("data: x\n\n\r\n"), "9\r\ndata: x\n\n\r\n");
  for (auto& responder : open) responder->end();
  for (auto& client : clients) EXPECT_EQ(client.read_until("0\r\n\r\n"), "0\r\n\r\n");
}

TEST(HttpServer, an_address_in_use_is_named) {
  HttpServer first("127.0.0.1", 0, {}, 1, echo);
  try {
    HttpServer second("127.0.0.1", first.port(), {}, 1, echo);
    FAIL();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(std::to_string(first.port())), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace m3
