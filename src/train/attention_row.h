// One row of attention probabilities, for instruments: plain loops in fp64.
#pragma once
#include <vector>

#include "model/attention_block.h"

namespace m3::train {

// A query of a packed micro-batch: its row, and the first row of its document.
struct QueryRow {
  int32_t row = 0, first = 0;
  int64_t num_keys() const { return row - first + 1; }
};

// Scaled logits of query head `head` over the document's keys up to the query; -infinity where it
// does not attend (see attention_row).
std::vector<double> logit_row(const TextConfig& config, const AttentionActs& acts,
                              const QueryRow& query, int head, bool selected);

// Probabilities of query head `head` over the document's keys up to the query. `selected`: over the
// blocks of the layer's lists alone (0 elsewhere), as the sparse stage attends; else over all of
// them.
std::vector<double> attention_row(const TextConfig& config, const AttentionActs& acts,
                                  const QueryRow& query, int head, bool selected);

double value_at(const Tensor& tensor, int64_t index);  // of f32 or bf16
void softmax(std::vector<double>& row);  // logits to probabilities, in place

// Block ids that the layer's lists hold for the query and group, ascending.
std::vector<int32_t> selected_blocks(const TextConfig& config, const AttentionActs& acts,
                                     const QueryRow& query, int group);

}  // namespace m3::train
