// 8-bit index keys on the GPU: conversion and scores bit by bit against plain loops, the rescored
// choice against a sort of the same scores, and `exact` against the bf16 path on every data set.
#include <gtest/gtest.h>

#include <array>

#include "ops/common/paged_case.h"
#include "ops/index_select/index_decode8.h"

namespace m3 {
namespace {

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

struct Codes {
  Mirror codes, scale, error, norm;
  explicit Codes(int64_t pages)
      : codes(DType::kU8, {pages, 128, 128}, true),
        scale(DType::kF32, {pages}, true),
        error(DType::kF32, {pages}, true),
        norm(DType::kF32, {pages}, true) {
    for (Mirror* m : all()) m->fill_bytes(0xff), m->upload();
  }
  std::array<Mirror*, 4> all() { return {&codes, &scale, &error, &norm}; }
  IndexKeys8 device() {
    return {codes.device_ptr<int8_t>(), scale.device_ptr<float>(), error.device_ptr<float>(),
            norm.device_ptr<float>()};
  }
  IndexKeys8 host() {
    return {codes.ptr<int8_t>(), scale.ptr<float>(), error.ptr<float>(), norm.ptr<float>()};
  }
};

PagedSpec spec_of(std::vector<int> lens, std::vector<int> q_lens, PagedData data, uint64_t seed) {
  PagedSpec spec;
  spec.lens = std::move(lens), spec.q_lens = std::move(q_lens);
  spec.data = data, spec.seed = seed, spec.page_seed = seed + 99, spec.attention = false;
  return spec;
}

struct Selection {
  std::vector<float> scores8, scores16;
  std::vector<int32_t> ids8, ids16;
  int64_t stride = 0;
  int uncertified = 0;
};

Selection run(PagedCase& c, Codes& codes, int candidates, bool exact) {
  const MsaGeometry& g = c.spec().geometry;
  Selection out;
  out.stride = index_decode_score_stride(c.max_blocks());
  Mirror scores(DType::kF32, {c.num_queries(), g.groups, out.stride}, true);
  Mirror ids(DType::kI32, {g.groups, c.num_queries(), g.topk}, true),
      flags(DType::kI32, {c.num_seqs()}, true);
  for (Mirror* m : {&scores, &ids}) m->fill_bytes(0xff), m->upload();
  flags.fill_bytes(0), flags.upload();
  const MsaBatch batch = c.device_batch();
  IndexDecodeParams scan = {.qi_TRX = c.qi().device_ptr<bf16>(),
                            .x_PBX = c.x().device_ptr<bf16>(),
                            .cu_q = batch.cu_q,
                            .seq_lens = batch.seq_lens,
                            .page_table = batch.page_table,
                            .page_stride = batch.max_pages,
                            .num_seqs = batch.num_seqs,
                            .groups = g.groups,
                            .topk = g.topk,
                            .scores_TRM = scores.device_ptr<float>(),
                            .score_stride = out.stride};
  index_decode_scores(scan, c.max_q_len(), {}, {});
  index_decode_choose({.scores_TRM = scan.scores_TRM,
                       .score_stride = out.stride,
                       .cu_q = batch.cu_q,
                       .seq_lens = batch.seq_lens,
                       .num_seqs = batch.num_seqs,
                       .groups = g.groups,
                       .topk = g.topk,
                       .num_queries = c.num_queries(),
                       .ids_RTK = ids.device_ptr<int32_t>()},
                      c.max_blocks(), true, {});
  scores.download(), ids.download();
  out.scores16.assign(scores.ptr<float>(), scores.ptr<float>() + scores.host().numel());
  out.ids16.assign(ids.ptr<int32_t>(), ids.ptr<int32_t>() + ids.host().numel());

  for (Mirror* m : {&scores, &ids}) m->fill_bytes(0xff), m->upload();
  IndexDecodeParams scan8 = scan;
  scan8.x_PBX = codes.device().codes_PBX, scan8.scale_P = codes.device().scale_P;
  index_decode_scores8(scan8, c.max_q_len(), {.stages = 6}, {});
  scores.download();
  out.scores8.assign(scores.ptr<float>(), scores.ptr<float>() + scores.host().numel());
  const IndexRescoreParams params = {
      .scan = scan,
      .keys = codes.device(),
      .candidates = candidates,
      .num_queries = c.num_queries(),
      .ids_RTK = ids.device_ptr<int32_t>(),
      .uncertified_N = exact ? flags.device_ptr<int32_t>() : nullptr};
  index_decode_rescore(params, c.max_blocks(), true, {});
  if (exact) index_decode_exact(params, c.max_q_len(), c.max_blocks(), {});
  ids.download(), flags.download();
  out.ids8.assign(ids.ptr<int32_t>(), ids.ptr<int32_t>() + ids.host().numel());
  for (int n = 0; n < c.num_seqs(); ++n) out.uncertified += flags.ptr<int32_t>()[n];
  return out;
}

constexpr PagedData kAllData[] = {PagedData::kNormal, PagedData::kPeaked, PagedData::kInteger,
                                  PagedData::kCorrelated, PagedData::kBad};

TEST(IndexKeys8Cuda, ConversionEqualsPlainLoops) {
  M3_NEEDS_GPU();
  for (const PagedData data : kAllData) {
    PagedCase c(spec_of({3000, 128}, {1, 1}, data, 51));
    Codes got(c.num_pages()), want(c.num_pages());
    index_keys8_convert(c.x().device_ptr<bf16>(), 0, c.num_pages(), got.device(), {});
    for (Mirror* m : got.all()) m->download();
    index_keys8_ref(c.x().host(), 0, c.num_pages(), want.host());
    EXPECT_EQ(0,
              std::memcmp(got.host().codes_PBX, want.host().codes_PBX, got.codes.host().bytes()));
    EXPECT_EQ(0, std::memcmp(got.host().scale_P, want.host().scale_P, got.scale.host().bytes()));
    for (int64_t p = 0; p < c.num_pages(); ++p) {
      for (const bool error : {true, false}) {  // bounds: not below the exact value, hardly above
        const float mine = error ? got.host().error_P[p] : got.host().norm_P[p];
        const float exact = error ? want.host().error_P[p] : want.host().norm_P[p];
        if (std::isinf(exact)) {
          EXPECT_EQ(mine, exact) << "page " << p;
        } else {
          EXPECT_GE(mine, exact * 0.9999999f - 1e-30f) << "page " << p;
          EXPECT_LE(mine, exact * 1.0001f) << "page " << p;
        }
      }
    }
  }
}

TEST(IndexKeys8Cuda, AppendConvertsExactlyTheCompletedPages) {
  M3_NEEDS_GPU();
  // Completes block 0 of the first, none of the second, blocks 1 and 2 of the third, none of an
  // unused slot.
  PagedCase c(spec_of({128, 200, 400, 0, 257}, {1, 3, 200, 1, 1}, PagedData::kNormal, 52));
  Codes got(c.num_pages()), want(c.num_pages());
  index_keys8_append(c.device_batch(), c.x().device_ptr<bf16>(), got.device(), {});
  for (Mirror* m : got.all()) m->download();
  const auto page = [&](int n, int b) {
    return c.page_table().ptr<int32_t>()[n * c.page_stride() + b];
  };
  for (const int32_t p : {page(0, 0), page(2, 1), page(2, 2)})
    index_keys8_ref(c.x().host(), p, 1, want.host());
  EXPECT_EQ(0, std::memcmp(got.host().codes_PBX, want.host().codes_PBX, got.codes.host().bytes()));
  EXPECT_EQ(0, std::memcmp(got.host().scale_P, want.host().scale_P, got.scale.host().bytes()));
}

TEST(IndexDecode8Cuda, ScoresEqualIntegerLoops) {
  M3_NEEDS_GPU();
  for (const PagedData data : {PagedData::kNormal, PagedData::kInteger}) {
    PagedCase c(spec_of({5000, 2300, 2177}, {1, 5, 16}, data, 53));
    Codes codes(c.num_pages());
    index_keys8_convert(c.x().device_ptr<bf16>(), 0, c.num_pages(), codes.device(), {});
    for (Mirror* m : codes.all()) m->download();
    const Selection got = run(c, codes, 32, false);
    for (int64_t t = 0; t < c.num_queries(); ++t) {
      const auto [n, position] = c.row(t);
      if (position / 128 + 1 <= 16) continue;
      for (int r = 0; r < 4; ++r) {
        const bf16* query = c.qi().ptr<bf16>() + (t * 4 + r) * 128;
        float largest = 0;
        for (int i = 0; i < 128; ++i) largest = std::max(largest, std::abs(to_float(query[i])));
        const float scale = largest / 127.0f;
        int code[128];
        for (int i = 0; i < 128; ++i)
          code[i] = static_cast<int>(std::nearbyint(to_float(query[i]) / scale));
        for (int64_t b = 0; b < position / 128; ++b) {
          const int64_t page = c.page_table().ptr<int32_t>()[n * c.page_stride() + b];
          int best = std::numeric_limits<int>::min();
          for (int j = 0; j < 128; ++j) {
            int sum = 0;
            for (int i = 0; i < 128; ++i)
              sum += code[i] * codes.host().codes_PBX[(page * 128 + j) * 128 + i];
            best = std::max(best, sum);
          }
          ASSERT_EQ(got.scores8[(t * 4 + r) * got.stride + b],
                    codes.host().scale_P[page] * static_cast<float>(best) + 0.0f)
              << c.spec().str() << " token " << t << " group " << r << " block " << b;
        }
      }
    }
  }
}

TEST(IndexDecode8Cuda, RescoredChoiceIsTheBestOfTheCandidates) {
  M3_NEEDS_GPU();
  for (const PagedData data : kAllData) {
    PagedCase c(spec_of({5000, 2300, 100, 20000, 0}, {1, 3, 1, 2, 1}, data, 54));
    Codes codes(c.num_pages());
    index_keys8_convert(c.x().device_ptr<bf16>(), 0, c.num_pages(), codes.device(), {});
    for (const int candidates : {15, 24, 32, 64}) {
      const Selection got = run(c, codes, candidates, false);
      for (int64_t t = 0; t < c.num_queries(); ++t) {
        const int64_t own = c.row(t).second < 0 ? -1 : c.row(t).second / 128;
        if (own + 1 <= 16) continue;
        for (int r = 0; r < 4; ++r) {
          const float *by8 = got.scores8.data() + (t * 4 + r) * got.stride,
                      *by16 = got.scores16.data() + (t * 4 + r) * got.stride;
          std::vector<int32_t> order(own);
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(),
                           [&](int a, int b) { return by8[a] > by8[b]; });
          order.resize(std::min<int64_t>(candidates, own));
          std::sort(order.begin(), order.end());
          std::stable_sort(order.begin(), order.end(),
                           [&](int a, int b) { return by16[a] > by16[b]; });
          order.resize(15);
          order.push_back(static_cast<int32_t>(own));
          std::sort(order.begin(), order.end());
          const auto ids = got.ids8.begin() + (r * c.num_queries() + t) * 16;
          ASSERT_EQ(std::vector<int32_t>(ids, ids + 16), order)
              << c.spec().str() << " token " << t << " group " << r << " candidates " << candidates;
        }
      }
    }
  }
}

TEST(IndexDecode8Cuda, ExactEqualsBf16OnEveryDataSet) {
  M3_NEEDS_GPU();
  for (const PagedData data : kAllData) {
    PagedCase c(spec_of({5000, 2300, 100, 20000, 0, 2049, 9000}, {1, 3, 1, 2, 1, 1, 16}, data, 55));
    Codes codes(c.num_pages());
    index_keys8_convert(c.x().device_ptr<bf16>(), 0, c.num_pages(), codes.device(), {});
    for (const int candidates : {15, 32, 64}) {
      const Selection got = run(c, codes, candidates, true);
      ASSERT_EQ(got.ids8, got.ids16) << c.spec().str() << " candidates " << candidates;
      std::printf("[ exact    ] data %d, %d candidates: %d of %d rows uncertified\n",
                  static_cast<int>(data), candidates, got.uncertified,
                  static_cast<int>(c.num_queries()) * 4);
    }
  }
}

TEST(IndexDecode8Cuda, MostRandomRowsAreCertifiedWith64Candidates) {
  M3_NEEDS_GPU();
  PagedCase c(spec_of({131072}, {16}, PagedData::kNormal, 56));
  Codes codes(c.num_pages());
  index_keys8_convert(c.x().device_ptr<bf16>(), 0, c.num_pages(), codes.device(), {});
  const Selection got = run(c, codes, 64, true);
  EXPECT_EQ(got.ids8, got.ids16);
  EXPECT_LE(got.uncertified, 64 / 4) << "of 64 rows; msa.md §12 expects all to be certified";
}

}  // namespace
}  // namespace m3
