// What the engine is asked and what it answers. All plain values: the engine's thread never parses JSON,
// renders text or decodes files.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "model/vision.h"
#include "ops/sampling/sampling.h"

namespace m3 {

// A picture or a clip, ready for the tower; placeholders of the prompt take them in order. Patch rows are large
// and may be needed again in the next turn, so they are shared; the engine lets go of them once they are encoded.
struct MediaInput {
  bool is_video = false;
  VisionGrid grid;
  std::shared_ptr<const std::vector<float>> patches_NP;  // [t*h*w, values of a patch]
};

struct GenerationRequest {
  std::vector<int32_t> prompt;
  std::vector<MediaInput> media;
  SamplingParams sampling;
  int64_t max_tokens = 0;          // of the answer; at least 1
  std::vector<int32_t> stop_ids;   // end of turn; the id itself is part of the answer
  std::vector<std::string> stop;   // stop strings, not part of the text
};

enum class FinishReason : uint8_t {
  kStop,       // a stop id or a stop string
  kLength,     // max_tokens, or the cache is full
  kCancelled,
};
const char* finish_reason_name(FinishReason reason);  // "stop", "length", "cancelled"

struct GenerationTimings {
  double media_seconds = 0;    // vision tower
  double prefill_seconds = 0;  // steps that computed prompt tokens, up to the first answer token
  double decode_seconds = 0;   // from the first answer token to the last
  int64_t prompt_tokens = 0, answer_tokens = 0;
  double prefill_rate() const { return prefill_seconds > 0 ? prompt_tokens / prefill_seconds : 0; }
  double decode_rate() const { return decode_seconds > 0 ? (answer_tokens - 1) / decode_seconds : 0; }
};

struct GenerationEvent {
  enum class Kind : uint8_t {
    kPrefill,  // prompt_done of the prompt's tokens are computed
    kToken,    // `token` was drawn; `text` became certain (it may lag behind the tokens)
    kFinish,   // `reason`, `timings`, and the last `text`
  };
  Kind kind;
  int64_t prompt_done = 0;
  int32_t token = -1;
  std::string text;
  FinishReason reason = FinishReason::kStop;
  GenerationTimings timings;
};

using RequestId = int64_t;
using GenerationCallback = std::function<void(const GenerationEvent& event)>;  // called by the engine's thread

}  // namespace m3
