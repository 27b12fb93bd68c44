// Streams many completions from a server at once and notes when what came: the measuring side of m3
// bench serve. One thread, plain sockets, HTTP/1.0 (an answer is what comes until the connection
// closes).
#pragma once
#include <chrono>
#include <map>
#include <string>
#include <vector>

namespace m3::cli {

struct LoadRequest {
  double at_seconds =
      0;  // when it is sent, from the start of the run; only used without a concurrency limit
  std::string body;  // of POST /v1/completions, streaming with usage
};

struct LoadResult {
  int status = 0;  // 0: no answer
  std::string error;
  double start_seconds = 0, first_seconds = 0,
         last_seconds = 0;           // from the start of the run; first and last text
  std::vector<double> gaps_seconds;  // between pieces of text
  int64_t prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
  bool complete = false;  // the end mark came
};

struct LoadTarget {
  std::string host = "127.0.0.1", api_key;
  int port = 8000;
};
LoadTarget parse_url(const std::string& url);  // http://HOST[:PORT]; throws UsageError

// Sends all and returns their results in order. concurrency 0: each at its time, however many are
// open.
std::vector<LoadResult> run_load(const LoadTarget& target, const std::vector<LoadRequest>& requests,
                                 int64_t concurrency);

// The body of a GET; throws Error.
std::string http_get(const LoadTarget& target, const std::string& path);

}  // namespace m3::cli
