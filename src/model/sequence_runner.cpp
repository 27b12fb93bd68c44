#include "model/sequence_runner.h"

#include <algorithm>
#include <numeric>

namespace m3 {

namespace {

int64_t pages_for(const TextConfig& config, int64_t num_tokens) {
  return (num_tokens + config.block_size - 1) / config.block_size;
}

}  // namespace

SequenceRunner::SequenceRunner(Model& model, int64_t max_tokens)
    : model_(model),
      cache_(model.make_cache(pages_for(model.config().text, max_tokens))),
      pages_(cache_.num_pages()) {
  std::iota(pages_.begin(), pages_.end(), 0);
}

void SequenceRunner::set_features(std::vector<int32_t> positions, const Tensor& features_MC) {
  M3_CHECK(static_cast<int64_t>(positions.size()) == features_MC.dim(0), "{} placeholder positions for {} feature rows",
           positions.size(), features_MC.dim(0));
  feature_positions_ = std::move(positions);
  features_MC_ = features_MC;
}

Tensor SequenceRunner::feed(std::span<const int32_t> ids, std::span<const int32_t> logit_rows,
                            const StepTrace* trace) {
  const auto count = static_cast<int64_t>(ids.size());
  M3_CHECK(pages_for(model_.config().text, length_ + count) <= cache_.num_pages(),
           "a sequence of {} tokens does not fit {} pages of {}", length_ + count, cache_.num_pages(),
           cache_.page_tokens());
  const int32_t cu_q[] = {0, static_cast<int32_t>(count)};
  const int32_t seq_lens[] = {static_cast<int32_t>(length_ + count)};
  StepInput input;
  input.ids_T = ids;
  input.cu_q = cu_q;
  input.seq_lens = seq_lens;
  input.page_table = pages_;
  input.max_pages = cache_.num_pages();
  input.logit_rows = logit_rows;

  const auto begin = std::lower_bound(feature_positions_.begin(), feature_positions_.end(), length_);
  const auto end = std::lower_bound(begin, feature_positions_.end(), length_ + count);
  std::vector<int32_t> rows;
  for (auto it = begin; it != end; ++it) rows.push_back(static_cast<int32_t>(*it - length_));
  FeatureRows features;
  if (!rows.empty()) {
    features.rows = rows;
    features.features_MC =
        features_MC_.rows(begin - feature_positions_.begin(), end - feature_positions_.begin());
    input.features = std::span(&features, 1);
  }
  const Tensor logits = model_.step(input, cache_, trace);
  length_ += count;
  return logits;
}

Tensor SequenceRunner::feed(std::span<const int32_t> ids) {
  const int32_t last[] = {static_cast<int32_t>(ids.size()) - 1};
  return feed(ids, last);
}

void SequenceRunner::rewind(int64_t length) {
  M3_CHECK(0 <= length && length <= length_, "cannot rewind {} tokens to {}", length_, length);
  length_ = length;
}

}  // namespace m3
