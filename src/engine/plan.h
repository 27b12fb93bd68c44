// One step of the engine: the storage behind StepInput, and what each sequence takes part with. Kept from step to
// step, so that its memory is.
#pragma once
#include <optional>
#include <vector>

#include "engine/sequence.h"

namespace m3 {

struct Engine::Plan {
  struct Drawn {
    int32_t id;
    std::optional<TokenLogprobs> logprobs;
  };
  struct Part {
    Sequence* sequence;
    int64_t num_rows;
    int64_t num_logits;  // of its last rows
    bool is_prompt;
    std::vector<Drawn> drawn = {};
    std::string error = {};
  };
  struct Piece {  // media rows: indices into feature_rows
    int64_t begin, end;
    Tensor features_MC;
  };

  std::vector<Part> parts;
  std::vector<int32_t> ids, cu_q, seq_lens, page_table, logit_rows, feature_rows;
  std::vector<Piece> pieces;
  std::vector<FeatureRows> features;
  int64_t max_pages = 0;
  bool has_answers = false, has_prompts = false;

  void clear();
  int64_t num_rows() const { return static_cast<int64_t>(ids.size()); }
  StepInput input();  // of all parts
};

}  // namespace m3
