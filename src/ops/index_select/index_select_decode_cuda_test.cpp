// Decode selection on the GPU: scores against fp64, choice against a sort of the same scores
// (exact), ids against index_select_ref with the near-tie band of msa.md §14.
#include <gtest/gtest.h>

#include <set>

#include "ops/common/paged_case.h"
#include "ops/index_select/index_select.h"
#include "ops/index_select/index_select_decode.h"

namespace m3 {
namespace {

struct Selected {
  std::vector<float> scores;      // [T, R, stride], NaN where nothing was written
  std::vector<int32_t> ids;       // [R, T, K]
  std::vector<float> sel_scores;  // the same shape
  int64_t stride = 0;
};

Selected run(PagedCase& c, const IndexDecodeTuning& tuning = {}, bool score_all = false) {
  const MsaGeometry& g = c.spec().geometry;
  Selected out;
  out.stride = index_decode_score_stride(c.max_blocks());
  Mirror scores(DType::kF32, {c.num_queries(), g.groups, out.stride}, true);
  Mirror ids(DType::kI32, {g.groups, c.num_queries(), g.topk}, true);
  Mirror sel(DType::kF32, {g.groups, c.num_queries(), g.topk}, true);
  for (Mirror* m : {&scores, &ids, &sel}) m->fill_bytes(0xff), m->upload();
  const IndexDecodeParams params = {.qi_TRX = c.qi().device_ptr<bf16>(),
                                    .x_PBX = c.x().device_ptr<bf16>(),
                                    .cu_q = c.cu_q().device_ptr<int32_t>(),
                                    .seq_lens = c.seq_lens().device_ptr<int32_t>(),
                                    .page_table = c.page_table().device_ptr<int32_t>(),
                                    .page_stride = c.page_stride(),
                                    .num_seqs = c.num_seqs(),
                                    .groups = g.groups,
                                    .topk = g.topk,
                                    .score_all = score_all,
                                    .scores_TRM = scores.device_ptr<float>(),
                                    .score_stride = out.stride};
  index_decode_scores(params, c.max_q_len(), tuning, {});
  const IndexChooseParams choose = {
      .scores_TRM = scores.device_ptr<float>(),
      .score_stride = out.stride,
      .cu_q = params.cu_q,
      .seq_lens = params.seq_lens,
      .num_seqs = c.num_seqs(),
      .groups = g.groups,
      .topk = g.topk,
      .num_queries = c.num_queries(),
      .ids_RTK = ids.device_ptr<int32_t>(),
      .sel_scores_RTK = score_all ? sel.device_ptr<float>() : nullptr};
  index_decode_choose(choose, c.max_blocks(), true, {});
  for (Mirror* m : {&scores, &ids, &sel}) m->download();
  out.scores.assign(scores.ptr<float>(), scores.ptr<float>() + scores.host().numel());
  out.ids.assign(ids.ptr<int32_t>(), ids.ptr<int32_t>() + ids.host().numel());
  out.sel_scores.assign(sel.ptr<float>(), sel.ptr<float>() + sel.host().numel());
  return out;
}

double norm(const bf16* x, int n) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += double{to_float(x[i])} * to_float(x[i]);
  return std::sqrt(sum);
}

// fp64 block scores of a row, and the near-tie band 3e-5 |qi| max |ki|.
struct Exact {
  std::vector<double> score;
  double band = 0;
};
Exact exact_scores(PagedCase& c, int64_t t, int group, int64_t blocks) {
  const MsaGeometry& g = c.spec().geometry;
  const int n = c.row(t).first;
  const bf16* query = c.qi().ptr<bf16>() + (t * g.groups + group) * g.index_dim;
  Exact e;
  double largest = 0;
  for (int64_t b = 0; b < blocks; ++b) {
    const bf16* page =
        c.x().ptr<bf16>() +
        int64_t{c.page_table().ptr<int32_t>()[n * c.page_stride() + b]} * g.block * g.index_dim;
    double best = -std::numeric_limits<double>::infinity();
    for (int j = 0; j < g.block; ++j) {
      double z = 0;
      for (int i = 0; i < g.index_dim; ++i)
        z += double{to_float(query[i])} * to_float(page[j * g.index_dim + i]);
      if (!std::isnan(z)) best = std::max(best, z);
      const double length = norm(page + j * g.index_dim, g.index_dim);
      if (std::isfinite(length)) largest = std::max(largest, length);
    }
    e.score.push_back(best + 0.0);
  }
  const double length = norm(query, g.index_dim);
  e.band = std::isfinite(length) ? 3e-5 * length * largest : 0;
  return e;
}

void check(PagedCase& c, const Selected& got) {
  const MsaGeometry& g = c.spec().geometry;
  const bool exact_data = c.spec().data == PagedData::kInteger;
  for (int64_t t = 0; t < c.num_queries(); ++t) {
    const auto [n, position] = c.row(t);
    const int64_t own = position < 0 ? -1 : position / g.block;
    const int wanted = static_cast<int>(std::min<int64_t>(g.topk - 1, own));
    for (int r = 0; r < g.groups; ++r) {
      SCOPED_TRACE(fmt::format("{} token {} group {}", c.spec().str(), t, r));
      const int32_t* ids = got.ids.data() + (r * c.num_queries() + t) * g.topk;
      std::vector<int32_t> expected;
      if (own + 1 <= g.topk) {
        for (int b = 0; b <= own; ++b) expected.push_back(b);
      } else {
        const Exact exact = exact_scores(c, t, r, own);
        const float* scores = got.scores.data() + (t * g.groups + r) * got.stride;
        for (int64_t b = 0; b < own; ++b) {
          if (exact_data || std::isinf(exact.score[b])) {
            ASSERT_EQ(scores[b], exact.score[b]) << "block " << b;
            ASSERT_FALSE(scores[b] == 0 && std::signbit(scores[b])) << "block " << b << ": -0";
          } else {
            ASSERT_NEAR(scores[b], exact.score[b], exact.band) << "block " << b;
          }
        }
        // The choice from these very scores must be exact: score descending, then id ascending.
        std::vector<int32_t> order(own);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return scores[a] > scores[b]; });
        expected.assign(order.begin(), order.begin() + wanted);
        expected.push_back(static_cast<int32_t>(own));
        std::sort(expected.begin(), expected.end());
      }
      expected.resize(g.topk, -1);
      ASSERT_EQ(std::vector<int32_t>(ids, ids + g.topk), expected);
    }
  }
}

// Blocks that differ from the fp64 reference must lie in the near-tie band around its last chosen
// score.
void check_reference(PagedCase& c, const Selected& got) {
  const MsaGeometry& g = c.spec().geometry;
  std::vector<int32_t> ids(got.ids.size());
  Tensor ids_RTK(ids.data(), DType::kI32, {g.groups, c.num_queries(), g.topk});
  index_select_ref(g, c.host_batch(), {}, c.qi().host(), c.x().host(), ids_RTK, {});
  for (int64_t t = 0; t < c.num_queries(); ++t) {
    for (int r = 0; r < g.groups; ++r) {
      const auto at = (r * c.num_queries() + t) * g.topk;
      if (std::equal(ids.begin() + at, ids.begin() + at + g.topk, got.ids.begin() + at)) continue;
      SCOPED_TRACE(fmt::format("{} token {} group {}", c.spec().str(), t, r));
      ASSERT_NE(c.spec().data, PagedData::kInteger) << "exact data allows no difference";
      const std::set<int32_t> mine(got.ids.begin() + at, got.ids.begin() + at + g.topk);
      const std::set<int32_t> theirs(ids.begin() + at, ids.begin() + at + g.topk);
      const int64_t own = c.row(t).second / g.block;
      const Exact exact = exact_scores(c, t, r, own);
      double last = std::numeric_limits<double>::infinity();
      for (int32_t b : theirs) {
        if (b < own) last = std::min(last, exact.score[b]);
      }
      for (int32_t b : mine) {
        if (!theirs.count(b)) {
          EXPECT_GE(exact.score[b], last - exact.band) << b;
        }
      }
      for (int32_t b : theirs) {
        if (!mine.count(b)) {
          EXPECT_LE(exact.score[b], last + exact.band) << b;
        }
      }
    }
  }
}

bool no_gpu() {
  return num_cuda_devices() == 0;
}
#define M3_NEEDS_GPU() \
  if (no_gpu()) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

PagedSpec spec_of(std::vector<int> lens, std::vector<int> q_lens, PagedData data, uint64_t seed) {
  PagedSpec spec;
  spec.lens = std::move(lens), spec.q_lens = std::move(q_lens);
  spec.data = data, spec.seed = seed, spec.page_seed = seed + 99, spec.attention = false;
  return spec;
}

TEST(IndexDecodeCuda, BorderLengthsInOneBatchMatchReference) {
  M3_NEEDS_GPU();
  for (const PagedData data :
       {PagedData::kNormal, PagedData::kInteger, PagedData::kCorrelated, PagedData::kBad}) {
    PagedSpec spec =
        spec_of({1, 127, 128, 129, 255, 2047, 2048, 2049, 2176, 2177, 4096, 6001, 0}, {}, data, 11);
    spec.q_lens.assign(spec.lens.size(), 1);
    PagedCase c(spec);
    const Selected got = run(c);
    check(c, got);
    check_reference(c, got);
  }
}

TEST(IndexDecodeCuda, LongContextMatchesReference) {
  M3_NEEDS_GPU();
  PagedCase c(spec_of({32769, 131072 + 5}, {1, 1}, PagedData::kNormal, 12));
  const Selected got = run(c);
  check(c, got);
  check_reference(c, got);
}

TEST(IndexDecodeCuda, LargestContextTakesEveryBlock) {
  M3_NEEDS_GPU();
  PagedSpec spec =
      spec_of({1 << 20}, {1}, PagedData::kInteger, 13);  // 8192 blocks, thousands of ties
  PagedCase c(spec);
  check(c, run(c));
}

class IndexDecodeRandom : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Cuda, IndexDecodeRandom, testing::Range(0, 100, 5));

TEST_P(IndexDecodeRandom, BatchesMatchReference) {
  M3_NEEDS_GPU();
  for (uint64_t seed = GetParam(); seed < static_cast<uint64_t>(GetParam()) + 5; ++seed) {
    Philox rng(seed, 3);
    PagedSpec spec = spec_of({}, {}, static_cast<PagedData>(seed % 5), seed);
    spec.geometry.groups = std::array{4, 4, 4, 1, 2, 8}[rng.below(6)];
    spec.geometry.topk = std::array{16, 16, 16, 4, 8, 32, 1}[rng.below(7)];
    const int most = std::min<int>(16, kIndexDecodeMaxColumns / spec.geometry.groups);
    const int num = 1 + static_cast<int>(rng.below(6));
    for (int n = 0; n < num; ++n) {
      const int queries = seed % 2 == 0 ? 1 : static_cast<int>(rng.below(most + 1));
      const int length = std::array{200, 2100, 5000, 12000}[rng.below(4)];
      spec.q_lens.push_back(queries);
      spec.lens.push_back(rng.below(8) == 0 ? 0 : queries + static_cast<int>(rng.below(length)));
    }
    PagedCase c(spec);
    const Selected got = run(c);
    check(c, got);
    check_reference(c, got);
    if (HasFatalFailure()) return;
  }
}

TEST(IndexDecodeCuda, AnySplitAndAnyPageOrderGivesTheSameBits) {
  M3_NEEDS_GPU();
  PagedSpec spec =
      spec_of({20000, 3000, 2049, 100, 40000}, {1, 8, 3, 2, 16}, PagedData::kNormal, 21);
  PagedCase c(spec);
  const Selected first = run(c);
  for (const int ctas : {1, 2, 7, 100, 256}) {
    for (const int stages : {2, 3, 6}) {
      const Selected again = run(c, {.stages = stages, .ctas = ctas});
      ASSERT_EQ(first.ids, again.ids) << ctas << " CTAs, " << stages << " stages";
      ASSERT_EQ(0, std::memcmp(first.scores.data(), again.scores.data(), first.scores.size() * 4))
          << ctas;
    }
  }
  spec.page_seed = 4711;
  PagedCase other(spec);
  const Selected moved = run(other);
  ASSERT_EQ(first.ids, moved.ids);
  ASSERT_EQ(0, std::memcmp(first.scores.data(), moved.scores.data(), first.scores.size() * 4));
}

TEST(IndexDecodeCuda, TokenOfALongerStepHasTheIdsOfASingleStep) {
  M3_NEEDS_GPU();
  PagedSpec spec = spec_of({5000}, {16}, PagedData::kNormal, 22);
  PagedCase many(spec);
  const Selected all = run(many);
  for (const int t : {0, 7, 15}) {  // the last rows of the case are queries; cut the sequence there
    PagedSpec cut = spec;
    cut.lens = {5000 - 15 + t}, cut.q_lens = {1};
    PagedCase one(cut);
    std::copy_n(many.qi().ptr<bf16>() + t * 4 * 128, 4 * 128, one.qi().ptr<bf16>());
    one.qi().upload();
    const Selected single = run(one);
    for (int r = 0; r < 4; ++r) {
      const auto at = all.ids.begin() + (r * 16 + t) * 16;
      ASSERT_EQ(
          std::vector<int32_t>(at, at + 16),
          std::vector<int32_t>(single.ids.begin() + r * 16, single.ids.begin() + r * 16 + 16));
    }
  }
}

TEST(IndexDecodeCuda, ScoresOfTheChosenBlocksComeOut) {
  M3_NEEDS_GPU();
  PagedCase c(spec_of({3000, 700, 0}, {2, 1, 1}, PagedData::kInteger, 23));
  const Selected got = run(c, {}, true);
  const MsaGeometry& g = c.spec().geometry;
  std::vector<int32_t> ids(got.ids.size());
  std::vector<float> scores(got.ids.size());
  const Shape shape = {g.groups, c.num_queries(), g.topk};
  index_select_ref(g, c.host_batch(), {.sel_scores = true}, c.qi().host(), c.x().host(),
                   Tensor(ids.data(), DType::kI32, shape),
                   Tensor(scores.data(), DType::kF32, shape));
  EXPECT_EQ(ids, got.ids);
  EXPECT_EQ(scores, got.sel_scores);
}

TEST(IndexDecodeCuda, EqualAndCrowdedScoresKeepTheTieRule) {
  M3_NEEDS_GPU();
  // All blocks that share b % 32 get huge scores: the candidate lists overflow their usual size.
  for (const int kind : {0, 1, 2}) {
    PagedSpec spec = spec_of({128 * 6000 + 1}, {1}, PagedData::kInteger, 24);
    PagedCase c(spec);
    for (int64_t b = 0; b < 6000; ++b) {
      bf16* page = c.x().ptr<bf16>() + int64_t{c.page_table().ptr<int32_t>()[b]} * 128 * 128;
      const float value = kind == 0   ? 0.0f
                          : kind == 1 ? (b % 32 == 5 ? 8.0f : -1.0f)
                                      : (b % 32 < 15 ? 8.0f : -1.0f);
      for (int i = 0; i < 128 * 128; ++i) page[i] = bf16(value);
    }
    c.x().upload();
    check(c, run(c));
  }
}

TEST(IndexDecodeCuda, UnsupportedGeometryIsNamed) {
  MsaGeometry g = msa_geometry_m3();
  EXPECT_EQ(index_decode_supports(g, 16, 8192), "");
  g.topk = 64;
  EXPECT_NE(index_decode_supports(g, 1, 8192).find("topk 64"), std::string::npos);
  EXPECT_NE(index_decode_supports(msa_geometry_m3(), 17, 8).find("17 query tokens"),
            std::string::npos);
  EXPECT_NE(index_decode_supports(msa_geometry_m3(), 1, 8193).find("8193 blocks"),
            std::string::npos);
}

}  // namespace
}  // namespace m3
