// The model against itself: every way of feeding the same tokens gives the same logits. What the right
// logits are is checked by the goldens (verify_model.cpp).
#include "model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>

#include "base/rng.h"
#include "model/sequence_runner.h"

namespace m3 {
namespace {

// Blocks of 16 tokens, 4 chosen: sparse from position 64 on.
const Checkpoint& tiny() {
  static const Checkpoint checkpoint = Checkpoint::open(M3_SOURCE_DIR "/tests/golden/models/tiny-small");
  return checkpoint;
}
constexpr int64_t kBlock = 16, kTopk = 4;

std::vector<int32_t> random_ids(uint64_t seed, int64_t count) {
  Philox rng(seed);
  std::vector<int32_t> ids(count);
  for (int32_t& id : ids) id = static_cast<int32_t>(rng.below(tiny().config().text.vocab_size));
  return ids;
}

struct Arithmetic {
  const char* name;
  DType dtype, activations;
};
constexpr Arithmetic kF32 = {"f32", DType::kF32, DType::kF32};

ModelOptions options_for(int64_t max_tokens, const Arithmetic& arithmetic, AttentionMode mode = AttentionMode::kMsa) {
  ModelOptions options;
  options.decoder.dtype = arithmetic.dtype;
  options.decoder.activations = arithmetic.activations;
  options.decoder.attention = mode;
  options.step = {max_tokens, 8, max_tokens, 512};
  return options;
}

std::vector<int32_t> all_rows(int64_t count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

using Rows = std::vector<std::vector<float>>;

void append_rows(const Tensor& logits_LV, Rows& rows) {
  for (int64_t i = 0; i < logits_LV.dim(0); ++i) {
    const float* row = logits_LV[i].ptr<float>();
    rows.emplace_back(row, row + logits_LV.dim(1));
  }
}

// Logits of every position, fed in pieces of `piece` tokens.
Rows logits_in_pieces(Model& model, const std::vector<int32_t>& ids, int64_t piece) {
  SequenceRunner sequence(model, ids.size());
  Rows rows;
  for (size_t begin = 0; begin < ids.size(); begin += piece) {
    const size_t count = std::min<size_t>(piece, ids.size() - begin);
    append_rows(sequence.feed(std::span(ids).subspan(begin, count), all_rows(count)), rows);
  }
  return rows;
}

void expect_close(const Rows& got, const Rows& want, double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < want.size(); ++i) {
    double difference = 0, norm = 0;
    for (size_t j = 0; j < want[i].size(); ++j) {
      difference += std::pow(double{got[i][j]} - want[i][j], 2);
      norm += std::pow(double{want[i][j]}, 2);
    }
    ASSERT_LE(std::sqrt(difference / norm), tolerance) << what << ", row " << i;
  }
}

class EveryArithmetic : public testing::TestWithParam<Arithmetic> {
 protected:
  // bf16 rounds activations; rows of the decode path and of the prefill path sum in different orders, and a near-tied
  // expert or block may flip (tests/golden/README.md allows a row 5e-2 against the reference).
  double tolerance() const { return GetParam().dtype == DType::kF32 ? 2e-5 : 5e-2; }
};
INSTANTIATE_TEST_SUITE_P(Model, EveryArithmetic,
                         testing::Values(kF32, Arithmetic{"bf16_cache", DType::kBF16, DType::kF32},
                                         Arithmetic{"bf16", DType::kBF16, DType::kBF16}),
                         [](const auto& info) { return info.param.name; });

TEST_P(EveryArithmetic, tokens_in_pieces_of_any_size_equal_one_piece) {
  const auto ids = random_ids(1, kTopk * kBlock * 2 + 3);
  Model model(tiny(), options_for(ids.size(), GetParam()));
  const Rows whole = logits_in_pieces(model, ids, ids.size());
  for (const int64_t piece : {int64_t{1}, int64_t{2}, kBlock - 1, kBlock, kBlock + 1, 2 * kBlock - 1, 2 * kBlock,
                              2 * kBlock + 1, kTopk * kBlock - 1, kTopk * kBlock, kTopk * kBlock + 1}) {
    expect_close(logits_in_pieces(model, ids, piece), whole, tolerance(), fmt::format("pieces of {}", piece));
  }
}

// Three sequences of different lengths, interleaved over one pool of pages.
struct Batch {
  std::vector<std::vector<int32_t>> sequences;
  std::vector<std::vector<int32_t>> pages;
  int64_t max_pages = 16;

  // Feeds every sequence its tokens [from[n], to[n]) in one step; all their logits.
  Rows feed(Model& model, const KvCache& cache, const std::vector<int64_t>& from, const std::vector<int64_t>& to) const {
    std::vector<int32_t> ids, cu_q = {0}, seq_lens, table;
    for (size_t n = 0; n < sequences.size(); ++n) {
      ids.insert(ids.end(), sequences[n].begin() + from[n], sequences[n].begin() + to[n]);
      cu_q.push_back(static_cast<int32_t>(ids.size()));
      seq_lens.push_back(static_cast<int32_t>(to[n]));
      table.insert(table.end(), pages[n].begin(), pages[n].end());
      table.resize((n + 1) * max_pages, -1);  // beyond the sequence: must not be read
    }
    const std::vector<int32_t> rows_wanted = all_rows(ids.size());
    StepInput input;
    input.ids_T = ids;
    input.cu_q = cu_q;
    input.seq_lens = seq_lens;
    input.page_table = table;
    input.max_pages = max_pages;
    input.logit_rows = rows_wanted;
    Rows rows;
    append_rows(model.step(input, cache), rows);
    return rows;
  }
};

Batch three_sequences() {
  Batch batch;
  batch.sequences = {random_ids(2, 1), random_ids(3, kTopk * kBlock + 40), random_ids(4, 2 * kBlock)};
  batch.pages = {{5}, {3, 9, 1, 12, 7, 0, 14}, {2, 11}};
  return batch;
}

TEST_P(EveryArithmetic, a_sequence_is_not_changed_by_its_neighbours_bit_for_bit) {
  Model model(tiny(), options_for(256, GetParam()));
  const KvCache cache = model.make_cache(16);
  const Batch batch = three_sequences();
  // A prompt, a chunk after a cached prefix and a single token together.
  batch.feed(model, cache, {0, 0, 0}, {0, 50, 2 * kBlock - 1});
  const Rows together = batch.feed(model, cache, {0, 50, 2 * kBlock - 1}, {1, 104, 2 * kBlock});
  Rows alone;
  for (size_t n = 0; n < 3; ++n) {
    Batch one;
    one.sequences = {batch.sequences[n]};
    one.pages = {batch.pages[n]};
    const KvCache own_cache = model.make_cache(16);
    const std::vector<int64_t> cut = {std::vector<int64_t>{0, 50, 2 * kBlock - 1}[n]};
    one.feed(model, own_cache, {0}, cut);
    const Rows rows = one.feed(model, own_cache, cut, {static_cast<int64_t>(one.sequences[0].size())});
    alone.insert(alone.end(), rows.begin(), rows.end());
  }
  EXPECT_EQ(together, alone);
}

TEST_P(EveryArithmetic, the_physical_order_of_pages_changes_no_bit) {
  Model model(tiny(), options_for(256, GetParam()));
  Batch batch = three_sequences(), moved = three_sequences();
  moved.pages = {{0}, {15, 14, 13, 12, 11, 10, 9}, {1, 2}};
  const std::vector<int64_t> zero = {0, 0, 0}, end = {1, 104, 2 * kBlock};
  const KvCache cache = model.make_cache(16), other = model.make_cache(16);
  EXPECT_EQ(batch.feed(model, cache, zero, end), moved.feed(model, other, zero, end));
}

TEST_P(EveryArithmetic, nan_in_unused_parts_of_the_cache_has_no_effect) {
  Model model(tiny(), options_for(256, GetParam()));
  const Batch batch = three_sequences();
  const KvCache clean = model.make_cache(16), poisoned = model.make_cache(16);
  for (int layer = 0; layer < tiny().config().text.num_layers; ++layer) {
    const KvLayer& lanes = poisoned.layer(layer);
    for (const Tensor& lane : {lanes.k_PRBD, lanes.v_PRBD, lanes.x_PBX}) {
      if (lane.defined()) std::memset(lane.data(), 0xff, lane.bytes());  // a NaN in both types
    }
  }
  for (int64_t step = 0; step < 3; ++step) {
    const std::vector<int64_t> from = {0, step * 30, step * 10}, to = {step == 2, step * 30 + 30, step * 10 + 10};
    const Rows rows = batch.feed(model, poisoned, from, to);
    EXPECT_EQ(rows, batch.feed(model, clean, from, to));
    for (const auto& row : rows) ASSERT_TRUE(std::isfinite(row[0]));
  }
}

TEST_P(EveryArithmetic, sequences_of_at_most_topk_blocks_equal_full_attention) {
  const auto ids = random_ids(5, kTopk * kBlock + 8);
  Model sparse(tiny(), options_for(ids.size(), GetParam()));
  Model full(tiny(), options_for(ids.size(), GetParam(), AttentionMode::kFull));
  Model dsa(tiny(), options_for(ids.size(), GetParam(), AttentionMode::kDsa));
  const std::vector<int32_t> short_ids(ids.begin(), ids.begin() + kTopk * kBlock);
  const Rows want = logits_in_pieces(full, short_ids, short_ids.size());
  expect_close(logits_in_pieces(sparse, short_ids, short_ids.size()), want, tolerance(), "msa");
  expect_close(logits_in_pieces(dsa, short_ids, short_ids.size()), want, tolerance(), "dsa");
  // One block more and they part.
  EXPECT_NE(logits_in_pieces(sparse, ids, ids.size()).back(), logits_in_pieces(full, ids, ids.size()).back());
}

TEST(AttentionModes, window_sees_the_first_block_and_the_newest_tokens_only) {
  const auto ids = random_ids(6, 2 * kTopk * kBlock);
  Model model(tiny(), options_for(ids.size(), kF32, AttentionMode::kWindow));
  StepTrace trace;
  int num_lists = 0;
  trace.after_layer = [&](const StepTrace::Layer& layer) { num_lists += layer.lists.defined(); };
  SequenceRunner sequence(model, ids.size());
  const Tensor logits = sequence.feed(ids, all_rows(1), &trace);
  EXPECT_TRUE(std::isfinite(logits.ptr<float>()[0]));
  EXPECT_EQ(num_lists, 0);
  EXPECT_FALSE(sequence.cache().layer(1).x_PBX.defined()) << "no index keys are cached where nobody reads them";
}

TEST(KvCache, a_page_is_copied_with_all_its_lanes) {
  KvCache cache(tiny().config().text, 4, DType::kF32);
  Philox rng(7);
  auto lanes = [&](int layer) {
    const KvLayer& l = cache.layer(layer);
    std::vector<Tensor> list = {l.k_PRBD, l.v_PRBD};
    if (l.x_PBX.defined()) list.push_back(l.x_PBX);
    return list;
  };
  int num_lanes = 0;
  for (int layer = 0; layer < tiny().config().text.num_layers; ++layer) {
    for (const Tensor& lane : lanes(layer)) {
      ++num_lanes;
      for (int64_t i = 0; i < lane.numel(); ++i) lane.ptr<float>()[i] = static_cast<float>(rng.normal());
    }
  }
  EXPECT_EQ(num_lanes, 3 + 3 + 2) << "K and V of three layers, index keys of the two sparse ones";
  cache.copy_page(1, 3);
  for (int layer = 0; layer < tiny().config().text.num_layers; ++layer) {
    for (const Tensor& lane : lanes(layer)) {
      EXPECT_EQ(std::memcmp(lane[1].data(), lane[3].data(), lane[1].bytes()), 0);
      EXPECT_NE(std::memcmp(lane[0].data(), lane[3].data(), lane[0].bytes()), 0);
    }
  }
  EXPECT_THROW(cache.copy_page(0, 4), Error);
}

TEST(MemoryPlan, a_step_stays_inside_its_plan_whatever_the_batch) {
  const TextConfig& config = tiny().config().text;
  const ModelWeights weights = weights_of(tiny());
  for (const AttentionMode mode : {AttentionMode::kMsa, AttentionMode::kFull, AttentionMode::kDsa}) {
    DecoderOptions options;
    options.attention = mode;
    const StepSizes sizes = {64, 4, 4, 256};
    const int64_t planned = decoder_step_bytes(config, options, sizes);
    const KvCache cache(config, 64, options.dtype);
    std::vector<int32_t> table(4 * 16);
    std::iota(table.begin(), table.end(), 0);
    for (const std::vector<int32_t>& cu_q : {std::vector<int32_t>{0, 64}, {0, 1, 2, 3, 4}, {0, 30, 31, 64}, {0, 0}}) {
      Arena arena("step", 4 * planned);
      const auto num_seqs = static_cast<int64_t>(cu_q.size()) - 1;
      const std::vector<int32_t> ids(cu_q.back(), 1), seq_lens(num_seqs, 256), rows(std::min(4, cu_q.back()), 0);
      StepInput input;
      input.ids_T = ids;
      input.cu_q = cu_q;
      input.seq_lens = seq_lens;
      input.page_table = std::span(table).first(num_seqs * 16);
      input.max_pages = 16;
      input.logit_rows = rows;
      decoder_step(config, weights.text, options, input, cache, arena);
      EXPECT_LE(arena.peak_bytes(), planned) << attention_mode_name(mode) << ", " << cu_q.size() - 1 << " sequences";
    }
  }
}

TEST(Step, inputs_that_do_not_fit_each_other_are_refused_by_name) {
  Model model(tiny(), options_for(64, kF32));
  SequenceRunner sequence(model, 64);
  const std::vector<int32_t> outside = {0, 160};
  EXPECT_THROW(sequence.feed(outside), Error);
  EXPECT_THROW(sequence.feed(random_ids(8, 65)), Error);
  EXPECT_THROW(Model(tiny(), ModelOptions{}), Error) << "a step without tokens";
  ModelOptions with_media = options_for(64, kF32);
  with_media.max_vision_patches = 4;
  EXPECT_THROW(Model(tiny(), with_media), Error) << "media for a text-only model";
}

}  // namespace
}  // namespace m3
