// What the server counts beside the engine, and /metrics in Prometheus' text form (serving.md §15).
// Thread-safe.
#pragma once
#include <map>
#include <mutex>
#include <string>
#include <string_view>

#include "engine/metrics.h"
#include "text/encode_cache.h"

namespace m3 {

class ServerMetrics {
 public:
  ServerMetrics();
  void http_request(const std::string& path, int status);
  void rejected(const std::string& reason);
  void ignored_field(const std::string& field);
  void finished(const std::string& reason);  // one choice: stop, length, abort, error
  void client_abort();
  void parse_error();
  void media_decoded(bool is_video, double seconds);

  std::string render(const std::string& model, const EngineMetrics& engine,
                     const EncodeCache::Counts& encoded, bool ready) const;

 private:
  mutable std::mutex mutex_;  // guards what follows
  std::map<std::pair<std::string, int>, int64_t> requests_;
  std::map<std::string, int64_t> rejected_, ignored_, finished_;
  int64_t aborts_ = 0, parse_errors_ = 0;
  Histogram image_seconds_, video_seconds_;
};

}  // namespace m3
