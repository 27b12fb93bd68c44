// A request inside the engine, and its place in the cache.
#pragma once
#include <chrono>

#include "engine/engine.h"
#include "engine/media_cache.h"
#include "engine/prompt_lookup.h"
#include "engine/stop_strings.h"

namespace m3 {

using EngineClock = std::chrono::steady_clock;
inline double seconds_between(EngineClock::time_point from, EngineClock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

struct Engine::Sequence {
  struct Media {
    MediaHash hash;
    int64_t first_row = 0, num_rows = 0;  // in the order of PlaceholderMap
    int64_t last_position = 0;            // of its placeholders
    std::shared_ptr<const MediaFeatures> features;
  };

  RequestId id = 0;
  GenerationRequest request;
  GenerationCallback callback;

  // Prompt and answer; the first num_cached have their keys and values in `pages`. `keys` tell what each position
  // depends on besides those before it: its token, or its row of media features.
  std::vector<int32_t> tokens;
  std::vector<PageCache::Key> keys;
  int64_t prompt_tokens = 0, max_tokens = 0;
  int64_t num_cached = 0;
  PageCache::Pages pages;

  std::vector<Media> media;
  PlaceholderMap placeholders;

  PromptLookup lookup;
  StreamDecoder decoder;
  StopStrings stop;
  std::vector<int32_t> draft;  // of the step at hand

  WaitReason wait_reason = WaitReason::kNone;
  GenerationTimings timings;
  EngineClock::time_point submitted, admitted, first_token, last_token;
  int64_t prompt_reported = 0;
  bool was_admitted = false, cancelled = false, finished = false;

  int64_t num_pending() const { return static_cast<int64_t>(tokens.size()) - num_cached; }
  int64_t num_answered() const { return static_cast<int64_t>(tokens.size()) - prompt_tokens; }
  // Only its newest token is missing in the cache.
  bool is_answering() const { return num_answered() > 0 && num_pending() == 1; }
  std::span<const PageCache::Key> computed() const { return std::span(keys).first(num_cached); }
  // The first picture or clip that the rest of the sequence needs and that is not encoded; null: none.
  Media* missing_media();
};

// Keys of a prompt. A row of media stands for (hash of the picture or clip, row): 63 bits, so that another content is
// taken for it with a probability of 2^-63.
std::vector<PageCache::Key> sequence_keys(std::span<const int32_t> prompt, const PlaceholderMap& placeholders,
                                          std::span<const Engine::Sequence::Media> media);

}  // namespace m3
