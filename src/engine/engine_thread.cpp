#include "engine/engine_thread.h"

#include <condition_variable>
#include <mutex>
#include <thread>

#include "engine/sequence.h"

namespace m3 {

struct EngineThread::State {
  explicit State(Engine& engine) : engine(engine), metrics(engine.metrics()) {}

  Engine& engine;
  mutable std::mutex mutex;
  std::condition_variable wake, idle;

  // Under the mutex.
  std::vector<std::unique_ptr<Engine::Sequence>> inbox;  // ids given, not yet enqueued
  std::vector<RequestId> cancels;
  RequestId next_id = 1;
  int64_t num_open = 0, num_waiting = 0, rejected_full = 0;
  bool stopping = false, cancel_all = false, quit = false;
  EngineMetrics metrics;
  std::vector<RequestInfo> infos;

  std::thread thread;
};

EngineThread::EngineThread(Engine& engine) : state_(std::make_unique<State>(engine)) {
  state_->thread = std::thread([this] { loop(); });
}

EngineThread::~EngineThread() {
  stop(0);
  {
    const std::lock_guard lock(state_->mutex);
    state_->quit = true;
  }
  state_->wake.notify_one();
  state_->thread.join();
}

RequestId EngineThread::submit(GenerationRequest request, GenerationCallback callback) {
  auto sequence = state_->engine.prepare(std::move(request), std::move(callback));
  RequestId id;
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->stopping) throw EngineStopped("the engine takes no more requests: it is stopping");
    const auto waiting = state_->num_waiting + static_cast<int64_t>(state_->inbox.size());
    if (waiting >= state_->engine.options().max_waiting) {
      ++state_->rejected_full;
      throw QueueFull(fmt::format("{} requests are waiting already: try again later", waiting));
    }
    id = sequence->id = state_->next_id++;
    ++state_->num_open;
    state_->inbox.push_back(std::move(sequence));
  }
  state_->wake.notify_one();
  return id;
}

void EngineThread::cancel(RequestId id) {
  {
    const std::lock_guard lock(state_->mutex);
    state_->cancels.push_back(id);
  }
  state_->wake.notify_one();
}

EngineMetrics EngineThread::metrics() const {
  const std::lock_guard lock(state_->mutex);
  EngineMetrics metrics = state_->metrics;
  metrics.rejected_full += state_->rejected_full;
  metrics.waiting += static_cast<int64_t>(state_->inbox.size());
  return metrics;
}

std::vector<RequestInfo> EngineThread::requests() const {
  const std::lock_guard lock(state_->mutex);
  return state_->infos;
}

bool EngineThread::stopped() const {
  const std::lock_guard lock(state_->mutex);
  return state_->stopping;
}

void EngineThread::stop(double drain_seconds) {
  std::unique_lock lock(state_->mutex);
  state_->stopping = true;
  const auto all_ended = [this] { return state_->num_open == 0; };
  if (!state_->idle.wait_for(lock, std::chrono::duration<double>(drain_seconds), all_ended)) {
    state_->cancel_all = true;
    state_->wake.notify_one();
    state_->idle.wait(lock, all_ended);
  }
}

// Between steps the mutex is held for a few moves; callbacks run without it.
void EngineThread::loop() {
  State& s = *state_;
  std::vector<std::unique_ptr<Engine::Sequence>> arrived;
  std::vector<RequestId> cancels;
  while (true) {
    bool cancel_all = false;
    {
      std::unique_lock lock(s.mutex);
      s.wake.wait(lock, [&] { return s.quit || s.cancel_all || !s.inbox.empty() || !s.cancels.empty() || s.engine.num_requests() > 0; });
      if (s.quit) return;
      arrived.swap(s.inbox);
      cancels.swap(s.cancels);
      cancel_all = std::exchange(s.cancel_all, false);
      s.num_waiting += static_cast<int64_t>(arrived.size());
    }
    for (auto& sequence : arrived) {
      const RequestId id = sequence->id;
      s.engine.enqueue(std::move(sequence), id);
    }
    arrived.clear();
    for (const RequestId id : cancels) s.engine.cancel(id);
    cancels.clear();
    if (cancel_all) {
      for (const RequestInfo& info : s.engine.requests()) s.engine.cancel(info.id);
    }
    s.engine.step();
    {
      const std::lock_guard lock(s.mutex);
      s.metrics = s.engine.metrics();
      s.infos = s.engine.requests();
      s.num_waiting = s.metrics.waiting;
      s.num_open = s.engine.num_requests() + static_cast<int64_t>(s.inbox.size());
      if (s.num_open == 0) s.idle.notify_all();
    }
  }
}

}  // namespace m3
