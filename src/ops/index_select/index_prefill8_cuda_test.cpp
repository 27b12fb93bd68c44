// Selection of a prefill with 8-bit index keys: `approx` against plain integer loops, `rescore` and
// `exact` against the bf16 selection.
#include <gtest/gtest.h>

#include "ops/common/msa_cuda_test_data.h"
#include "ops/index_select/index_prefill8.h"
#include "ops/index_select/index_select.h"
#include "ops/index_select/index_select_cuda.h"
#include "ops/index_select/index_select_expect.h"

namespace m3 {
namespace {

using namespace msa_test;

MsaGeometry geometry(int groups) {
  return {.groups = groups,
          .heads_per_group = 1,
          .head_dim = 16,
          .index_dim = 128,
          .block = 128,
          .topk = 16};
}

// `uncertified`, if present, asks for certificates and gets the number of rows without one. The pages
// of `gpu` begin at first_page of the pool.
Selection select8(const Data& d, const DeviceData& gpu, int candidates, int* uncertified = nullptr,
                  int64_t first_page = 0) {
  const int64_t P = first_page + d.num_pages;
  const DeviceTensor codes(DType::kU8, {P, 128, 128}), scale(DType::kF32, {P}),
      error(DType::kF32, {P}), norm(DType::kF32, {P});
  const DeviceTensor ids(DType::kI32, {d.g.groups, d.T(), d.g.topk}), count(DType::kI32, {1});
  const DeviceTensor workspace(
      DType::kU8, {index_prefill8_workspace_bytes(d.g, gpu.paged, P, candidates)});
  for (const DeviceTensor* t : {&codes, &scale, &ids, &workspace}) t->poison();
  const IndexKeys8 keys = {codes.ptr<int8_t>(), scale.ptr<float>(), error.ptr<float>(),
                           norm.ptr<float>()};
  index_keys8_convert(gpu.x_pages.tensor().data(), first_page, d.num_pages, keys, {});
  index_prefill8({.geometry = d.g,
                  .batch = gpu.paged,
                  .qi_TRX = gpu.qi.tensor().data(),
                  .x_PBX = gpu.x_pages.tensor().data(),
                  .keys = keys,
                  .num_pages = P,
                  .candidates = candidates,
                  .ids_RTK = ids.ptr<int32_t>(),
                  .uncertified = uncertified != nullptr ? count.ptr<int32_t>() : nullptr,
                  .workspace = workspace.tensor().data()},
                 {});
  if (uncertified != nullptr) *uncertified = count.download<int32_t>()[0];
  return {ids.download<int32_t>(), {}};
}

Selection select16(const Data& d, const DeviceData& gpu) {
  const DeviceTensor ids(DType::kI32, {d.g.groups, d.T(), d.g.topk}),
      workspace(DType::kU8, {index_select_cuda_workspace_bytes(d.g, gpu.paged)});
  index_select_cuda({.geometry = d.g,
                     .batch = gpu.paged,
                     .qi_TRX = gpu.qi.tensor().data(),
                     .ki = gpu.x_pages.tensor().data(),
                     .num_pages = d.num_pages,
                     .ids_RTK = ids.ptr<int32_t>(),
                     .workspace = workspace.tensor().data()},
                    IndexSelectPath::kPrefill, {});
  return {ids.download<int32_t>(), {}};
}

// The ids that the definition gives: block scores from codes, exact in integers.
Selection approx_ref(const Data& d) {
  const int X = 128, B = 128, K = d.g.topk;
  std::vector<int8_t> codes(d.num_pages * B * X);
  std::vector<float> scale(d.num_pages), error(d.num_pages), norm(d.num_pages);
  index_keys8_ref(d.x_pages.tensor(), 0, d.num_pages,
                  {codes.data(), scale.data(), error.data(), norm.data()});
  Selection s{std::vector<int32_t>(d.g.groups * d.T() * K, -1), {}};
  for (int n = 0; n < d.num_seqs(); ++n) {
    for (int64_t t = d.cu_q[n]; t < d.cu_q[n + 1]; ++t) {
      const int64_t position = d.seq_lens[n] - d.cu_q[n + 1] + t, own = position / B;
      if (position < 0) continue;
      for (int r = 0; r < d.g.groups; ++r) {
        int32_t* ids = &s.ids[(r * d.T() + t) * K];
        const bf16* query = d.qi.tensor().ptr<bf16>() + (t * d.g.groups + r) * X;
        float largest = 0;
        for (int i = 0; i < X; ++i) largest = std::max(largest, std::abs(to_float(query[i])));
        int code[128];
        for (int i = 0; i < X; ++i)
          code[i] = static_cast<int>(std::nearbyint(to_float(query[i]) / (largest / 127.0f)));
        std::vector<std::pair<float, int32_t>> order;
        for (int64_t b = 0; b < own; ++b) {
          const int64_t page = d.page_table[n * d.max_pages + b];
          int best = std::numeric_limits<int>::min();
          for (int j = 0; j < B; ++j) {
            int sum = 0;
            for (int i = 0; i < X; ++i) sum += code[i] * codes[(page * B + j) * X + i];
            best = std::max(best, sum);
          }
          order.emplace_back(-scale[page] * static_cast<float>(best), static_cast<int32_t>(b));
        }
        std::sort(order.begin(), order.end());
        order.resize(std::min<size_t>(order.size(), K - 1));
        std::vector<int32_t> chosen{static_cast<int32_t>(own)};
        for (const auto& [score, id] : order) chosen.push_back(id);
        std::sort(chosen.begin(), chosen.end());
        std::copy(chosen.begin(), chosen.end(), ids);
      }
    }
  }
  return s;
}

void make_integer(Data& d) {  // exact sums, many ties
  Philox rng(d.seed, 9);
  for (Buffer* b : {&d.qi, &d.ki}) {
    for (int64_t i = 0; i < b->tensor().numel(); ++i)
      b->set(i, static_cast<float>(rng.below(3)) - 1);
  }
  d.fill_pages();
}

void make_correlated(Data& d) {  // AR(1) along the sequence
  const int64_t row = d.g.groups * 128;
  for (int64_t i = row; i < d.qi.tensor().numel(); ++i)
    d.qi.set(i, 0.99f * d.qi.get(i - row) + 0.141f * d.qi.get(i));
}

void make_bad(Data& d) {
  Philox rng(d.seed, 9);
  for (int i = 0; i < 40; ++i) {
    const float values[] = {kNan, kInf, -kInf, 1e15f};
    d.ki.set(rng.below(d.ki.tensor().numel()), values[i % 4]);
    d.qi.set(rng.below(d.qi.tensor().numel()), values[(i + 1) % 4]);
  }
  d.fill_pages();
}

const std::vector<Lengths> kMixed = {{70, 5000}, {3, 2049}, {130, 2300}, {1, 129}, {20, 2176}};

TEST(IndexPrefill8Cuda, approx_equals_integer_loops) {
  M3_SKIP_WITHOUT_GPU();
  for (const int groups : {1, 4}) {
    for (const bool integer : {false, true}) {
      Data d = make_data(geometry(groups), kMixed, DType::kBF16, 70 + groups);
      if (integer) make_integer(d);
      const DeviceData gpu(d);
      const Selection got = select8(d, gpu, 15);
      expect_well_formed(d, got);
      EXPECT_EQ(got.ids, approx_ref(d).ids) << "groups " << groups << " integer " << integer;
      EXPECT_EQ(got, select8(d, gpu, 15)) << "second run";
    }
  }
}

TEST(IndexPrefill8Cuda, rescore_equals_bf16) {
  M3_SKIP_WITHOUT_GPU();
  for (const int groups : {1, 3, 4}) {
    for (const bool integer : {false, true}) {
      Data d = make_data(geometry(groups), kMixed, DType::kBF16, 80 + groups);
      if (integer) make_integer(d);
      const DeviceData gpu(d);
      const Selection want = select16(d, gpu);
      for (const int candidates : {24, 32, 64}) {
        const Selection got = select8(d, gpu, candidates);
        expect_well_formed(d, got);
        if (integer) {
          EXPECT_EQ(got.ids, want.ids) << "exact sums: ids must match bitwise";
        } else {
          expect_same_ids(d, got, want, fmt::format("{} candidates", candidates));
        }
        EXPECT_EQ(got, select8(d, gpu, candidates)) << "second run";
      }
    }
  }
}

// Whatever the data: rows that have no certificate are scanned again.
TEST(IndexPrefill8Cuda, exact_equals_bf16_on_every_data_set) {
  M3_SKIP_WITHOUT_GPU();
  const std::vector<Lengths> lengths = {{300, 20000}, {3, 2049}, {130, 12000}, {1, 129}};
  for (const int content : {0, 1, 2, 3}) {
    Data d = make_data(geometry(4), lengths, DType::kBF16, 96 + content);
    if (content == 1) make_integer(d);
    if (content == 2) make_correlated(d);
    if (content == 3) make_bad(d);
    const DeviceData gpu(d);
    int uncertified = -1;
    const Selection got = select8(d, gpu, 64, &uncertified);
    EXPECT_EQ(got.ids, select16(d, gpu).ids) << "content " << content;
    EXPECT_GE(uncertified, 0);
    if (content == 0) {
      EXPECT_LE(uncertified, d.T() * 4 / 20) << "random rows; msa.md §12 expects hardly any";
    }
    if (content == 3) {
      EXPECT_GT(uncertified, 0) << "infinite norms cannot be certified";
    }
    std::printf("[ exact    ] data %d: %d of %d rows without a certificate\n", content, uncertified,
                static_cast<int>(d.T()) * 4);
    int again = -1;
    EXPECT_EQ(got, select8(d, gpu, 64, &again)) << "second run";
    EXPECT_EQ(uncertified, again);
  }
}

// More rows than a chunk, whose border cuts a sequence, and lists joined from several items.
TEST(IndexPrefill8Cuda, several_chunks_equal_bf16) {
  M3_SKIP_WITHOUT_GPU();
  Data d = make_data(geometry(1), {{20000, 20000}, {15000, 16000}, {40, 30000}}, DType::kBF16, 91);
  const DeviceData gpu(d);
  const Selection want = select16(d, gpu);
  for (const int candidates : {15, 24, 32}) {
    const Selection got = select8(d, gpu, candidates);
    expect_well_formed(d, got);
    int64_t same = 0;
    for (size_t i = 0; i < want.ids.size(); ++i) {
      const size_t row = i / 16 * 16;
      same += std::count(got.ids.begin() + row, got.ids.begin() + row + 16, want.ids[i]) > 0;
    }
    const double share = static_cast<double>(same) / static_cast<double>(want.ids.size());
    EXPECT_GE(share, candidates == 15 ? 0.95 : 0.9999) << candidates << " candidates";
    EXPECT_EQ(got, select8(d, gpu, candidates)) << "second run";
  }
}

// More pages than are counted at a time (8,192), and sequences on both sides of that border.
TEST(IndexPrefill8Cuda, page_numbers_of_a_large_pool_change_nothing) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(geometry(2), {{70, 5000}, {20, 2500}}, DType::kBF16, 93);
  const DeviceData small(d);
  DeviceData large(d);
  const int64_t first = 8192 - d.num_pages / 2;
  large.x_pages = DeviceTensor(DType::kBF16, {first + d.num_pages, 128, 128});
  copy(d.x_pages.tensor(), Tensor(large.x_pages.ptr<bf16>() + first * 128 * 128, DType::kBF16,
                                  d.x_pages.tensor().shape(), kGpu));
  std::vector<int32_t> table = d.page_table;
  for (int32_t& page : table)
    if (page >= 0 && page < d.num_pages) page += static_cast<int32_t>(first);
  large.page_table = DeviceTensor(table);
  large.paged.page_table = large.page_table.ptr<int32_t>();
  for (const int candidates : {15, 24, 32, 64}) {
    EXPECT_EQ(select8(d, large, candidates, nullptr, first), select8(d, small, candidates))
        << candidates << " candidates";
  }
}

// Small enough for compute-sanitizer (scripts/gpu-check.sh).
TEST(IndexPrefill8Cuda, small_case_of_every_count) {
  M3_SKIP_WITHOUT_GPU();
  const Data d = make_data(geometry(2), {{40, 2500}, {5, 300}, {2, 0}}, DType::kBF16, 95);
  const DeviceData gpu(d);
  const Selection want = select16(d, gpu);
  EXPECT_EQ(select8(d, gpu, 15).ids, approx_ref(d).ids);
  for (const int candidates : {24, 32, 64})
    expect_same_ids(d, select8(d, gpu, candidates), want, fmt::format("{}", candidates));
  int uncertified = -1;
  EXPECT_EQ(select8(d, gpu, 64, &uncertified).ids, want.ids);
}

TEST(IndexPrefill8Cuda, refusals_name_what_is_wrong) {
  const MsaBatch paged{.layout = KvLayout::kPaged, .num_seqs = 1, .num_queries = 1000,
                       .max_q_len = 1000, .max_k_len = 131072};
  EXPECT_EQ(index_prefill8_supports(geometry(4), paged, 32), "");
  EXPECT_EQ(index_prefill8_supports(geometry(4), paged, 31),
            "want 15, 24, 32 or 64 candidates, got 31");
  MsaBatch packed = paged;
  packed.layout = KvLayout::kPacked;
  EXPECT_EQ(index_prefill8_supports(geometry(4), packed, 32), "want paged keys");
  MsaGeometry other = geometry(4);
  other.topk = 8;
  EXPECT_NE(index_prefill8_supports(other, paged, 32), "");
}

}  // namespace
}  // namespace m3
