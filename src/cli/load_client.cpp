#include "cli/load_client.h"

#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>

#include "base/check.h"
#include "cli/options.h"
#include "text/json_value.h"

namespace m3::cli {

namespace {

using Clock = std::chrono::steady_clock;

int connect_to(const LoadTarget& target) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int problem =
      ::getaddrinfo(target.host.c_str(), std::to_string(target.port).c_str(), &hints, &list);
  M3_CHECK(problem == 0, "{}: {}", target.host, ::gai_strerror(problem));
  const int fd = ::socket(list->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  const bool failed = ::connect(fd, list->ai_addr, list->ai_addrlen) != 0 && errno != EINPROGRESS;
  const int reason = errno;
  ::freeaddrinfo(list);
  if (failed) {
    ::close(fd);
    M3_FAIL("cannot connect to {}:{}: {}", target.host, target.port, std::strerror(reason));
  }
  return fd;
}

std::string head_of(const LoadTarget& target, const std::string& line) {
  std::string head = fmt::format("{} HTTP/1.0\r\nHost: {}:{}\r\n", line, target.host, target.port);
  if (!target.api_key.empty()) head += fmt::format("Authorization: Bearer {}\r\n", target.api_key);
  return head;
}

// One request on its way.
class Flight {
 public:
  Flight(int fd, std::string bytes, LoadResult& result, Clock::time_point origin)
      : fd_(fd), outgoing_(std::move(bytes)), result_(result), origin_(origin) {
    result_.start_seconds = now();
  }
  ~Flight() { ::close(fd_); }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  int fd() const { return fd_; }
  short events() const { return static_cast<short>(sent_ < outgoing_.size() ? POLLOUT : POLLIN); }

  // False: over.
  bool advance() {
    if (sent_ < outgoing_.size()) {
      const ssize_t count =
          ::send(fd_, outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_NOSIGNAL);
      if (count > 0) sent_ += static_cast<size_t>(count);
      if (count >= 0 || errno == EAGAIN) return true;
      result_.error = std::strerror(errno);
      return false;
    }
    char buffer[65536];
    for (;;) {
      const ssize_t count = ::recv(fd_, buffer, sizeof buffer, 0);
      if (count < 0 && errno == EAGAIN) return true;
      if (count < 0) result_.error = std::strerror(errno);
      if (count <= 0) {
        if (result_.status != 200) result_.error = incoming_.substr(0, 300);
        return false;
      }
      incoming_.append(buffer, static_cast<size_t>(count));
      take_in();
    }
  }

 private:
  double now() const { return std::chrono::duration<double>(Clock::now() - origin_).count(); }

  void take_in() {
    if (result_.status == 0) {
      const size_t end = incoming_.find("\r\n\r\n");
      if (end == std::string::npos) return;
      result_.status = std::atoi(incoming_.c_str() + incoming_.find(' ') + 1);
      incoming_.erase(0, end + 4);
    }
    if (result_.status != 200) return;
    for (size_t end; (end = incoming_.find("\n\n")) != std::string::npos;
         incoming_.erase(0, end + 2)) {
      if (incoming_.starts_with("data: ")) take_event(incoming_.substr(6, end - 6));
    }
  }

  void take_event(const std::string& data) {
    if (data == "[DONE]") {
      result_.complete = true;
      return;
    }
    const auto json = JsonValue::try_parse(data);
    if (!json) return;
    if (const JsonValue* problem = json->find("error")) result_.error = problem->dump();
    const JsonValue* choices = json->find("choices");
    const JsonValue* text =
        choices != nullptr && choices->size() > 0 ? choices->items()[0].find("text") : nullptr;
    if (text != nullptr && !text->text().empty()) {
      const double time = now();
      if (result_.first_seconds == 0) {
        result_.first_seconds = time;
      } else {
        result_.gaps_seconds.push_back(time - result_.last_seconds);
      }
      result_.last_seconds = time;
    }
    const JsonValue* usage = json->find("usage");
    if (usage == nullptr || !usage->is_object()) return;
    const auto number = [](const JsonValue* object, const char* key) {
      const JsonValue* value = object == nullptr ? nullptr : object->find(key);
      return value != nullptr && value->is_number() ? static_cast<int64_t>(value->as_double()) : 0;
    };
    result_.prompt_tokens = number(usage, "prompt_tokens");
    result_.answer_tokens = number(usage, "completion_tokens");
    result_.cached_tokens = number(usage->find("prompt_tokens_details"), "cached_tokens");
  }

  const int fd_;
  const std::string outgoing_;
  size_t sent_ = 0;
  std::string incoming_;
  LoadResult& result_;
  const Clock::time_point origin_;
};

}  // namespace

LoadTarget parse_url(const std::string& url) {
  constexpr std::string_view kScheme = "http://";
  if (!url.starts_with(kScheme))
    throw UsageError{fmt::format("'{}': want http://HOST[:PORT]", url)};
  std::string place = url.substr(kScheme.size());
  place = place.substr(0, place.find('/'));
  LoadTarget target;
  const size_t colon = place.rfind(':');
  target.host = place.substr(0, colon);
  target.port = colon == std::string::npos ? 80 : std::atoi(place.c_str() + colon + 1);
  if (target.host.empty() || target.port < 1 || target.port > 65535)
    throw UsageError{fmt::format("'{}': want http://HOST[:PORT]", url)};
  return target;
}

std::vector<LoadResult> run_load(const LoadTarget& target, const std::vector<LoadRequest>& requests,
                                 int64_t concurrency) {
  std::vector<LoadResult> results(requests.size());
  std::vector<std::unique_ptr<Flight>> flights;
  std::vector<pollfd> watched;
  const Clock::time_point origin = Clock::now();
  size_t next = 0;
  const auto is_due = [&] {
    if (next == requests.size()) return false;
    if (concurrency > 0) return static_cast<int64_t>(flights.size()) < concurrency;
    return std::chrono::duration<double>(Clock::now() - origin).count() >=
           requests[next].at_seconds;
  };
  while (next < requests.size() || !flights.empty()) {
    while (is_due()) {
      const LoadRequest& request = requests[next];
      std::string bytes =
          head_of(target, "POST /v1/completions") +
          fmt::format("Content-Type: application/json\r\nContent-Length: {}\r\n\r\n",
                      request.body.size()) +
          request.body;
      flights.push_back(
          std::make_unique<Flight>(connect_to(target), std::move(bytes), results[next], origin));
      ++next;
    }
    watched.clear();
    for (const auto& flight : flights) watched.push_back({flight->fd(), flight->events(), 0});
    ::poll(watched.data(), watched.size(), 1);  // a millisecond: the next request may be due
    for (size_t i = flights.size(); i-- > 0;) {
      if (watched[i].revents != 0 && !flights[i]->advance())
        flights.erase(flights.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  return results;
}

std::string http_get(const LoadTarget& target, const std::string& path) {
  const int fd = connect_to(target);
  const std::string bytes = head_of(target, "GET " + path) + "\r\n";
  std::string all;
  bool sent = false;
  for (;;) {
    pollfd watched{fd, static_cast<short>(sent ? POLLIN : POLLOUT), 0};
    if (::poll(&watched, 1, 10'000) <= 0) break;
    if (!sent) {
      if (::send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) {
        const int reason = errno;
        ::close(fd);
        M3_FAIL("cannot connect to {}:{}: {}", target.host, target.port, std::strerror(reason));
      }
      sent = true;
      continue;
    }
    char buffer[65536];
    const ssize_t count = ::recv(fd, buffer, sizeof buffer, 0);
    if (count <= 0) break;
    all.append(buffer, static_cast<size_t>(count));
  }
  ::close(fd);
  const size_t end = all.find("\r\n\r\n");
  M3_CHECK(end != std::string::npos && all.find(" 200 ") < all.find("\r\n"),
           "{}:{}{}: no good answer: {}", target.host, target.port, path, all.substr(0, 300));
  return all.substr(end + 4);
}

}  // namespace m3::cli
