// From a request of any API family to what the engine takes: media decoded, text rendered and
// tokenised, grammars compiled. Runs in a worker. Complaints are ApiErrors that name the field.
#pragma once
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/chat_prompt.h"
#include "engine/request.h"
#include "server/api_request.h"
#include "text/encode_cache.h"
#include "text/grammar.h"

namespace m3 {

struct BuiltPrompt {
  std::string text;
  std::vector<int32_t> ids;
  std::vector<MediaInput> media;
  int64_t image_tokens = 0, video_tokens = 0;
  std::vector<double> media_seconds;  // to decode each
};

class PromptBuilder {
 public:
  // `stop_ids`: what ends a turn. Both must outlive the builder. Thread-safe.
  PromptBuilder(const Tokenizer& tokenizer, std::vector<int32_t> stop_ids);

  BuiltPrompt build_chat(const ApiRequest& request);
  BuiltPrompt build_plain(const RawPrompt& prompt) const;
  EncodeCache::Counts encode_counts() const { return encoded_.counts(); }

  // Everything but the choice index: sampling, limits, guide. `rest`: tokens that the context
  // leaves for the answer.
  GenerationRequest generation(const ApiRequest& request, const BuiltPrompt& prompt, int64_t rest);

 private:
  std::shared_ptr<TokenGuide> guide(const ApiRequest& request, const BuiltPrompt& prompt);
  std::shared_ptr<const Grammar> form_grammar(const AnswerForm& form);
  std::shared_ptr<const Grammar> tool_grammar(const ApiRequest& request);
  std::shared_ptr<const Grammar> cached(
      const std::string& key, const std::function<std::shared_ptr<const Grammar>()>& make);
  std::shared_ptr<const TokenTrie> trie();

  const Tokenizer& tokenizer_;
  const std::vector<int32_t> stop_ids_;
  EncodeCache encoded_;  // of chats, for their next turns
  std::mutex mutex_;  // guards what follows
  std::shared_ptr<const TokenTrie> trie_;
  std::list<std::pair<std::string, std::shared_ptr<const Grammar>>>
      grammars_;  // most recently used first
};

}  // namespace m3
