// One request from its submission to the end of its answer. Engine events come from the engine's
// thread; what they mean for the client is worked out by answer workers, one at a time for each
// job, so that neither the engine nor a socket ever waits.
#pragma once
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "engine/engine_thread.h"
#include "server/answer.h"
#include "server/answer_reader.h"
#include "server/http_server.h"
#include "server/server_metrics.h"
#include "server/worker_pool.h"

namespace m3 {

struct JobServices {
  EngineThread& engine;
  WorkerPool& answers;
  ServerMetrics& metrics;
  const Tokenizer& tokenizer;
};

class GenerationJob : public std::enable_shared_from_this<GenerationJob> {
 public:
  using Clock = std::chrono::steady_clock;

  GenerationJob(JobServices services, ApiFamily family, ApiRequest request,
                std::shared_ptr<HttpResponder> responder);

  ApiRequest& request() { return request_; }
  Answer& answer() { return answer_; }
  const Answer& answer() const { return answer_; }
  void set_format(std::unique_ptr<AnswerFormat> format) { format_ = std::move(format); }
  void set_headers(HttpHeaders headers) { headers_ = std::move(headers); }
  // Called once, when the answer is complete or given up and the engine has nothing more to say:
  // from then on the job touches none of its services.
  void on_end(std::function<void(const GenerationJob&, int status)> callback) {
    on_end_ = std::move(callback);
  }

  // One engine request per choice, with the tails of their prompts; choices of one prompt follow
  // each other and share its prefill. Throws ApiError if the engine refuses them.
  struct Part {
    GenerationRequest generation;
    std::string prompt_tail;
  };
  void submit(std::vector<Part> parts);

  // Any thread. `why` goes to the client, if it is still there.
  void cancel(ApiError why);
  void ping_if_quiet(Clock::duration quiet);

  Clock::time_point start() const { return start_; }

 private:
  struct Pending {
    int choice;  // -1: a ping
    GenerationEvent event;
  };
  void post(Pending pending);
  void drain();
  void handle(int choice, const GenerationEvent& event);
  void handle_token(int choice, const GenerationEvent& event);
  void handle_finish(int choice, const GenerationEvent& event);
  AnswerReader::Sink sink(int choice);
  void complete();
  void fail(const ApiError& error);
  void end(int status);
  ApiError failure(const GenerationEvent& event);

  JobServices services_;
  const ApiFamily family_;
  ApiRequest request_;
  std::shared_ptr<HttpResponder> responder_;
  HttpHeaders headers_;
  const Clock::time_point start_ = Clock::now();
  std::function<void(const GenerationJob&, int status)> on_end_;

  // Of the answer workers, one at a time.
  Answer answer_;
  std::unique_ptr<AnswerFormat> format_;
  std::vector<AnswerReader> readers_;
  std::string unsent_;
  bool saw_prefill_ = false, saw_token_ = false, over_ = false;
  int status_ = 0;             // once over
  size_t num_unfinished_ = 0;  // engine requests whose kFinish has not come

  std::mutex mutex_;  // guards what follows
  std::vector<Pending> pending_;
  bool scheduled_ = true;  // a worker is or will be at it; true before the answer may begin
  std::vector<RequestId> ids_;
  std::optional<ApiError> cancelled_;
  std::atomic<Clock::rep> last_write_;
};

}  // namespace m3
