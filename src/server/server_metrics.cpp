#include "server/server_metrics.h"

#include <fmt/core.h>

namespace m3 {

namespace {

constexpr double kMediaBounds[] = {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30};
constexpr size_t kMaxIgnoredNames = 256;  // a client may invent names without end

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '\\' || c == '"') out += '\\';
    if (c == '\n') {
      out += "\\n";
    } else {
      out += c;
    }
  }
  return out;
}

// Lines of Prometheus' text format; every sample carries the model's name.
class MetricsText {
 public:
  explicit MetricsText(const std::string& model)
      : label_(fmt::format("model_name=\"{}\"", escaped(model))) {}

  void begin(const char* name, const char* type, const char* help) {
    name_ = name;
    text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, type);
  }
  void sample(double value, const std::string& labels = "", const char* suffix = "") {
    text_ += fmt::format("{}{}{{{}{}{}}} {}\n", name_, suffix, label_, labels.empty() ? "" : ",",
                         labels, value);
  }
  void gauge(const char* name, const char* help, double value) {
    begin(name, "gauge", help);
    sample(value);
  }
  void counter(const char* name, const char* help, int64_t value) {
    begin(name, "counter", help);
    sample(static_cast<double>(value));
  }
  void buckets(const Histogram& histogram, const std::string& labels = "") {
    const std::string comma = labels.empty() ? "" : labels + ",";
    int64_t below = 0;
    for (size_t i = 0; i < histogram.bounds().size(); ++i) {
      below += histogram.counts()[i];
      sample(static_cast<double>(below), fmt::format("{}le=\"{}\"", comma, histogram.bounds()[i]),
             "_bucket");
    }
    sample(static_cast<double>(histogram.count()), comma + "le=\"+Inf\"", "_bucket");
    sample(histogram.sum(), labels, "_sum");
    sample(static_cast<double>(histogram.count()), labels, "_count");
  }
  void histogram(const char* name, const char* help, const Histogram& histogram) {
    begin(name, "histogram", help);
    buckets(histogram);
  }
  std::string take() { return std::move(text_); }

 private:
  const std::string label_;
  const char* name_ = "";
  std::string text_;
};

void render_engine(MetricsText& out, const EngineMetrics& m) {
  const double used = m.pages_total > 0
                          ? static_cast<double>(m.pages_used) / static_cast<double>(m.pages_total)
                          : 0;
  out.gauge("vllm:num_requests_running", "Requests that the engine works on.",
            static_cast<double>(m.running));
  out.gauge("vllm:num_requests_waiting", "Requests that wait for a place.",
            static_cast<double>(m.waiting));
  out.gauge("vllm:kv_cache_usage_perc",
            "Share of cache pages that running requests hold (1 is all).", used);
  out.counter("vllm:prompt_tokens_total", "Prompt tokens of requests whose prompt is done.",
              m.prompt_tokens);
  out.counter("vllm:generation_tokens_total", "Tokens drawn.", m.answer_tokens);
  out.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.",
              m.prefix_queried_tokens);
  out.counter("vllm:prefix_cache_hits_total", "Prompt tokens found there.", m.prefix_hit_tokens);
  out.counter("vllm:num_preemptions_total", "Requests that gave up their pages for others.",
              m.preemptions);
  out.histogram("vllm:time_to_first_token_seconds", "From submission to the first token.",
                m.first_token_seconds);
  out.histogram("vllm:inter_token_latency_seconds", "Between two tokens of a request.",
                m.token_gap_seconds);
  out.histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.",
                m.request_seconds);
  out.histogram("vllm:request_queue_time_seconds", "Waiting before the first step.",
                m.queue_seconds);
  out.histogram("vllm:request_prefill_time_seconds", "From admission to the first token.",
                m.prefill_seconds);
  out.histogram("vllm:request_decode_time_seconds", "From the first token to the last.",
                m.decode_seconds);
  out.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.",
                m.request_prompt_tokens);
  out.histogram("vllm:request_generation_tokens", "Answer tokens of a request.",
                m.request_answer_tokens);
  out.histogram("vllm:iteration_tokens_total", "Tokens of a step.", m.step_tokens);
  out.histogram("m3:step_seconds", "A whole step of the engine.", m.step_seconds);
  out.histogram("m3:step_model_seconds", "The model's share of a step.", m.step_model_seconds);
  out.histogram("m3:encoder_seconds", "Vision tower, one picture or film.", m.media_seconds);
  out.begin("m3:cache_blocks", "gauge", "Cache pages by state.");
  out.sample(static_cast<double>(m.pages_used), "state=\"used\"");
  out.sample(static_cast<double>(m.pages_cached), "state=\"cached\"");
  out.sample(static_cast<double>(m.pages_free), "state=\"free\"");
  out.gauge("m3:cache_block_bytes", "Bytes of a cache page.", static_cast<double>(m.page_bytes));
  out.gauge("m3:offload_blocks", "Cache pages that lie in the offload file.",
            static_cast<double>(m.offload_used));
  out.gauge("m3:offload_capacity_blocks", "Cache pages that it has room for.",
            static_cast<double>(m.offload_slots));
  out.begin("m3:waiting_reason", "gauge", "Waiting requests by reason.");
  for (size_t i = 0; i < kWaitReasonNames.size(); ++i) {
    out.sample(static_cast<double>(m.waiting_by_reason[i]),
               fmt::format("reason=\"{}\"", kWaitReasonNames[i]));
  }
  out.counter("m3:computed_prompt_tokens_total", "Prompt rows of model steps.",
              m.computed_prompt_tokens);
  out.counter("m3:spec_drafted_tokens_total", "Tokens guessed by prompt lookup.", m.drafted_tokens);
  out.counter("m3:spec_accepted_tokens_total", "Guesses that were right.", m.accepted_tokens);
  out.counter("m3:cache_evicted_blocks_total", "Cached pages that made room.", m.pages_evicted);
  out.counter("m3:offload_stored_blocks_total", "Of them those written to the offload file.",
              m.pages_offloaded);
  out.counter("m3:offload_restored_blocks_total", "Cache pages filled from it instead of computed.",
              m.pages_restored);
  out.counter("m3:offload_failures_total", "Pages that it could not take or give back.",
              m.offload_failures);
  out.counter("m3:media_encoded_total", "Pictures and films that went through the vision tower.",
              m.media_encoded);
  out.counter("m3:media_cache_hits_total", "Pictures and films whose features were there.",
              m.media_cache_hits);
}

}  // namespace

ServerMetrics::ServerMetrics() : image_seconds_(kMediaBounds), video_seconds_(kMediaBounds) {}

void ServerMetrics::http_request(const std::string& path, int status) {
  const std::lock_guard lock(mutex_);
  ++requests_[{path, status}];
}
void ServerMetrics::rejected(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++rejected_[reason];
}
void ServerMetrics::ignored_field(const std::string& field) {
  const std::lock_guard lock(mutex_);
  const bool known = ignored_.contains(field) || ignored_.size() < kMaxIgnoredNames;
  ++ignored_[known ? field.substr(0, 64) : "other"];
}
void ServerMetrics::finished(const std::string& reason) {
  const std::lock_guard lock(mutex_);
  ++finished_[reason];
}
void ServerMetrics::client_abort() {
  const std::lock_guard lock(mutex_);
  ++aborts_;
}
void ServerMetrics::parse_error() {
  const std::lock_guard lock(mutex_);
  ++parse_errors_;
}
void ServerMetrics::media_decoded(bool is_video, double seconds) {
  const std::lock_guard lock(mutex_);
  (is_video ? video_seconds_ : image_seconds_).add(seconds);
}

std::string ServerMetrics::render(const std::string& model, const EngineMetrics& engine,
                                  const EncodeCache::Counts& encoded, bool ready) const {
  MetricsText out(model);
  out.gauge("m3:ready", "1 once the model is loaded, 0 before and while stopping.", ready ? 1 : 0);
  render_engine(out, engine);
  const std::lock_guard lock(mutex_);
  const auto by_label = [&](const char* name, const char* help, const char* label,
                            const std::map<std::string, int64_t>& counts) {
    out.begin(name, "counter", help);
    for (const auto& [key, count] : counts)
      out.sample(static_cast<double>(count), fmt::format("{}=\"{}\"", label, escaped(key)));
  };
  by_label("vllm:request_success_total", "Answers by the reason of their end.", "finished_reason",
           finished_);
  by_label("m3:rejected_total", "Requests turned away.", "reason", rejected_);
  by_label("m3:ignored_fields_total", "Unknown fields of requests.", "field", ignored_);
  out.begin("m3:http_requests_total", "counter", "HTTP requests.");
  for (const auto& [key, count] : requests_) {
    out.sample(static_cast<double>(count),
               fmt::format("path=\"{}\",status=\"{}\"", escaped(key.first), key.second));
  }
  out.counter("m3:client_aborts_total", "Clients that left before their answer was complete.",
              aborts_);
  out.counter("m3:parse_errors_total", "Answers with a damaged tool call.", parse_errors_);
  out.counter("m3:tokenizer_cache_hits_total", "Texts of chats that an earlier turn had encoded.",
              encoded.hits);
  out.counter("m3:tokenizer_cache_hit_bytes_total", "Their bytes.", encoded.hit_bytes);
  out.counter("m3:tokenizer_encoded_bytes_total", "Bytes of chats that had to be encoded.",
              encoded.encoded_bytes);
  out.begin("m3:media_decode_seconds", "histogram", "Decoding and resizing one picture or film.");
  out.buckets(image_seconds_, "type=\"image\"");
  out.buckets(video_seconds_, "type=\"video\"");
  return out.take();
}

}  // namespace m3
