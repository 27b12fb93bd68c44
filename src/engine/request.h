// What the engine is asked and what it answers. All plain values: the engine's thread never parses JSON,
// renders text or decodes files.
#pragma once
#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/vision.h"
#include "ops/sampling/sampling.h"

namespace m3 {

class TokenGuide;

using RequestId = int64_t;  // from 1 on, never used twice by an engine

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
  uint64_t choice = 0;              // index among several answers to one prompt; part of the draws
  int64_t max_tokens = 0;           // of the answer; at least 1; cut to what the context leaves
  int64_t min_tokens = 0;           // stop ids are not drawn before so many
  std::vector<int32_t> stop_ids;    // end of turn; the id itself is part of the answer
  std::vector<std::string> stop;    // stop strings, not part of the text
  std::shared_ptr<TokenGuide> guide;  // which tokens may come (token_guide.h); of this request alone
  int num_logprobs = -1;            // -1: none; 0: of the drawn token; n: and of the n likeliest
  // Waits until that request's prompt is computed, then finds it in the prefix cache: choices of one prompt. 0: none.
  RequestId after_prompt_of = 0;
  // Ends with kDeadline when it passes, in whatever state the request is.
  std::optional<std::chrono::steady_clock::time_point> deadline;
};

enum class FinishReason : uint8_t {
  kStop,       // a stop id or a stop string
  kLength,     // max_tokens, or the context is full
  kCancelled,
  kDeadline,   // its own deadline, or EngineOptions::max_queue_seconds (then timings.prompt_done is 0)
  kFailed,     // GenerationEvent::error says why; other requests go on
};
// "stop", "length", "cancelled", "deadline", "failed"
const char* finish_reason_name(FinishReason reason);

struct GenerationTimings {
  double queue_seconds = 0;    // until it was first admitted
  double media_seconds = 0;    // vision tower
  double prefill_seconds = 0;  // from admission to the first answer token, media excluded
  double decode_seconds = 0;   // from the first answer token to the last
  int64_t prompt_tokens = 0, answer_tokens = 0;
  int64_t cached_tokens = 0;   // of the prompt, taken from the prefix cache when it was first admitted
  int64_t media_tokens = 0;    // of the prompt
  int64_t drafted_tokens = 0, accepted_tokens = 0;  // speculation
  int64_t preemptions = 0;
  double prefill_rate() const { return prefill_seconds > 0 ? (prompt_tokens - cached_tokens) / prefill_seconds : 0; }
  double decode_rate() const { return decode_seconds > 0 ? (answer_tokens - 1) / decode_seconds : 0; }
};

struct GenerationEvent {
  enum class Kind : uint8_t {
    kPrefill,  // prompt_done of the prompt's tokens are in the cache
    kToken,    // `token` was drawn; `text` became certain (it may lag behind the tokens)
    kFinish,   // `reason`, `timings`, and the last `text`; the last event of a request
  };
  Kind kind;
  int64_t prompt_done = 0;
  int32_t token = -1;
  std::string text;
  std::optional<TokenLogprobs> logprobs;  // with kToken, if asked for
  FinishReason reason = FinishReason::kStop;
  std::string stop_string;  // which one ended the answer; empty where an id did
  std::string error;        // of kFailed
  GenerationTimings timings;
};

// Called by the engine's thread; must be quick and must not call the engine. An exception ends the request (kFailed).
using GenerationCallback = std::function<void(const GenerationEvent& event)>;

// Why a request does not run.
enum class WaitReason : uint8_t {
  kNone,          // it runs, or the next step looks at it
  kBehindOthers,  // first come, first served
  kCachePages,    // too few free pages for its prompt
  kMaxSequences,  // as many requests as the model takes are running
  kSharedPrompt,  // after_prompt_of is not done
};
constexpr std::array<const char*, 5> kWaitReasonNames = {"none", "behind_others", "no_cache_blocks", "max_seqs",
                                                         "shared_prompt"};

// One line of a list of requests.
struct RequestInfo {
  RequestId id = 0;
  bool running = false;
  WaitReason wait_reason = WaitReason::kNone;
  int64_t prompt_tokens = 0, cached_tokens = 0, prompt_done = 0, answer_tokens = 0, cache_pages = 0, preemptions = 0;
  double age_seconds = 0;
};

}  // namespace m3
