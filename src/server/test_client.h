// A plain socket for tests: what a client really sees. Tests only.
#pragma once
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "base/check.h"

namespace m3 {

class Client {
 public:
  explicit Client(uint16_t port) {
    fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    M3_CHECK(::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
             "connect");
    const timeval limit{10, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  ~Client() { close(); }
  Client(Client&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  void close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  void send(const std::string& text) { ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL); }
  // Reads until `mark` has been seen or the connection ends.
  std::string read_until(const std::string& mark) {
    while (text_.find(mark) == std::string::npos) {
      char buffer[4096];
      const ssize_t got = ::recv(fd_, buffer, sizeof(buffer), 0);
      if (got <= 0) break;
      text_.append(buffer, got);
    }
    return std::exchange(text_, {});
  }
  std::string read_all() { return read_until("\x01 never \x01"); }

 private:
  int fd_;
  std::string text_;
};

}  // namespace m3
