// Many clients at once: what is held, what is left behind.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <thread>

#include "base/rng.h"
#include "server/test_server.h"

namespace m3 {
namespace {

std::string post_text(const std::string& body) {
  return fmt::format(
      "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: "
      "application/json\r\nContent-Length: {}\r\n\r\n{}",
      body.size(), body);
}

TEST(ApiLoad, a_thousand_open_streams_are_held_and_all_end) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_cur < 2100)
    GTEST_SKIP() << "only " << files.rlim_cur << " open files are allowed here";
  TestServerOptions options;
  options.max_requests = 8;
  options.engine.max_waiting = 2000;
  TestServer server(options);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 1000; ++i) {
    clients.push_back(std::make_unique<Client>(server.port()));
    clients.back()->send(post_text(fmt::format(
        R"({{"prompt":"stream {}","max_tokens":3,"ignore_eos":true,"stream":true}})", i)));
  }
  for (auto& client : clients) {
    const std::string all = client->read_until("[DONE]");
    ASSERT_NE(all.find("200 OK"), std::string::npos) << all;
    ASSERT_NE(all.find("\"finish_reason\":\"length\""), std::string::npos) << all;
  }
  EXPECT_TRUE(server.wait_until_idle());
}

TEST(ApiLoad, mixed_requests_with_random_disconnects_leave_nothing_behind) {
  TestServerOptions options;
  options.cache_tokens =
      4096;  // less than what they need together: waiting, eviction and preemption take part
  options.context = 2048;
  TestServer server(options);
  constexpr int kRequests = 500, kThreads = 8;
  std::atomic<int> next = 0, answered = 0, dropped = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      Philox rng(1000 + t);
      while (next++ < kRequests) {
        std::string prompt(1 + rng.below(rng.below(10) == 0 ? 1500 : 60), 'a');
        for (char& c : prompt) c = static_cast<char>('a' + rng.below(26));
        const bool stream = rng.below(2) == 0, leaves = rng.below(3) == 0;
        Client client(server.port());
        client.send(post_text(
            fmt::format(R"({{"prompt":"{}","max_tokens":{},"ignore_eos":true,"stream":{}}})",
                        prompt, 1 + rng.below(40), stream)));
        if (leaves) {
          std::this_thread::sleep_for(std::chrono::microseconds(rng.below(8000)));
          client.close();
          ++dropped;
          continue;
        }
        const std::string all = client.read_until(stream ? "[DONE]" : "queue_ms");
        if (all.find("200 OK") != std::string::npos) ++answered;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(answered + dropped, kRequests) << "who stayed has an answer";
  EXPECT_GT(dropped, 100);
  EXPECT_TRUE(server.wait_until_idle()) << "a request is stuck or a page is lost";
  server.server().shut_down(0);
  server.engine().stop(0);
  server.session().engine().check_pages();
}

}  // namespace
}  // namespace m3
