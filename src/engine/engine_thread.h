// The engine behind a thread of its own: what a server talks to. Every function may be called from any thread.
//
// Events of a request come on the engine's thread, in order, one at a time, kFinish last and exactly once for every
// submit that returned, also when the engine stops.
#pragma once
#include <memory>
#include <vector>

#include "engine/engine.h"

namespace m3 {

class EngineThread {
 public:
  // `engine` is used by this thread alone from here on and must outlive it.
  explicit EngineThread(Engine& engine);
  ~EngineThread();  // stop(0)
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  // Checks the request on the calling thread. Throws Error (it can never run), QueueFull, or EngineStopped.
  RequestId submit(GenerationRequest request, GenerationCallback callback);
  void cancel(RequestId id);  // unknown or finished: ignored

  EngineMetrics metrics() const;               // as of the last step
  std::vector<RequestInfo> requests() const;   // likewise
  bool stopped() const;  // or stopping: submit would throw

  // No new requests; running ones go on for so many seconds and are then cancelled. Returns when all have ended.
  void stop(double drain_seconds);

 private:
  struct State;
  void loop();
  std::unique_ptr<State> state_;
};

}  // namespace m3
