// Names T01.. refer to msa.md §15, tolerances to §14.
#include "ops/attend/attend.h"

#include <gtest/gtest.h>

#include "base/threads.h"
#include "ops/common/msa_test_data.h"
#include "ops/common/testing.h"
#include "ops/index_select/index_select.h"
#include "tensor/arena.h"

namespace m3 {
namespace {

using namespace msa_test;

struct Output {
  Buffer o;                // f32 unless asked otherwise
  std::vector<float> lse;  // [T, H]
  std::vector<float> rows() const {
    std::vector<float> values(o.tensor().numel());
    for (size_t i = 0; i < values.size(); ++i) values[i] = o.get(i);
    return values;
  }
};

// Every bit equal, NaN included.
bool same_bits(const Output& a, const Output& b) {
  return std::memcmp(a.o.tensor().data(), b.o.tensor().data(), a.o.tensor().bytes()) == 0 &&
         std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0;
}

// Outputs are poisoned first (T41).
template <typename Run>
Output collect(const Data& d, DType dtype, const Run& run) {
  Output out{Buffer(dtype, {d.T(), d.g.heads(), d.g.head_dim}), std::vector<float>(d.T() * d.g.heads(), kNan)};
  out.o.fill(kNan);
  run(out.o.tensor(), Tensor(out.lse.data(), DType::kF32, {d.T(), d.g.heads()}));
  return out;
}

Output run_attend(const Data& d, const MsaBatch& batch, const AttendSupport& support, const Tensor& lists,
                  MsaCompute compute = MsaCompute::kF32, DType out_dtype = DType::kF32) {
  const bool paged = batch.layout == KvLayout::kPaged;
  return collect(d, out_dtype, [&](const Tensor& o, const Tensor& lse) {
    const AttendPlan plan = attend_plan(d.g, batch, {.support = support, .compute = compute});
    const Workspace workspace(plan.workspace_bytes);
    attend(plan, batch, d.q.tensor(), paged ? d.k_pages.tensor() : d.k.tensor(),
           paged ? d.v_pages.tensor() : d.v.tensor(), lists, o, lse, workspace.get());
  });
}

Output run_ref(const Data& d, const AttendSupport& support, const Tensor& lists) {
  return collect(d, DType::kF32, [&](const Tensor& o, const Tensor& lse) {
    attend_ref(d.g, d.packed(), support, d.q.tensor(), d.k.tensor(), d.v.tensor(), lists, o, lse);
  });
}

struct Tolerance {
  double mean, max, lse_max;
};
constexpr Tolerance kFp32 = {2e-6, 2e-5, 1e-4}, kBf16 = {4e-3, 8e-3, 5e-4};

// Row errors of msa.md §14: |x - ref| / max(|ref|, 0.1 RMS of the row norms).
void expect_close(const Data& d, const Output& got, const Output& want, const Tolerance& tolerance,
                  const std::string& what) {
  const int D = d.g.head_dim;
  const int64_t rows = d.T() * d.g.heads();
  double mean_square = 0;
  for (int64_t i = 0; i < rows * D; ++i) mean_square += std::pow(want.o.get(i), 2) / std::max<int64_t>(rows, 1);
  double sum = 0;
  for (int64_t row = 0; row < rows; ++row) {
    double error = 0, norm = 0;
    for (int c = 0; c < D; ++c) {
      error += std::pow(double(got.o.get(row * D + c)) - want.o.get(row * D + c), 2);
      norm += std::pow(want.o.get(row * D + c), 2);
    }
    const double e = mean_square == 0 ? std::sqrt(error)
                                      : std::sqrt(error) / std::max(std::sqrt(norm), 0.1 * std::sqrt(mean_square));
    ASSERT_LE(e, tolerance.max) << what << " seed " << d.seed << " row " << row / d.g.heads() << " head "
                                << row % d.g.heads();  // also fails for NaN
    sum += e / rows;
    const float a = got.lse[row], b = want.lse[row];
    if (std::isinf(b)) {
      ASSERT_EQ(a, b) << what << " LSE of row " << row;
    } else {
      ASSERT_NEAR(a, b, tolerance.lse_max + std::abs(b) * 0x1p-21) << what << " seed " << d.seed << " LSE of row " << row;
    }
  }
  EXPECT_LE(sum, tolerance.mean) << what << " seed " << d.seed;
}

Buffer select_ids(const Data& d) {
  Buffer ids(DType::kI32, {d.g.groups, d.T(), d.g.topk});
  index_select_ref(d.g, d.packed(), {}, d.qi.tensor(), d.ki.tensor(), ids.tensor(), {});
  return ids;
}

// Random distinct positions per row, ascending.
Buffer random_tokens(const Data& d, int64_t budget) {
  Buffer tokens(DType::kI32, {d.T(), budget});
  tokens.fill_ints(-1);
  Philox rng(d.seed, 5);
  for (int n = 0; n < d.num_seqs(); ++n) {
    for (int64_t t = d.cu_q[n]; t < d.cu_q[n + 1]; ++t) {
      const int64_t visible = d.seq_lens[n] - d.cu_q[n + 1] + t + 1;
      int64_t slot = 0;
      for (int64_t j = 0; j < visible && slot < budget; ++j) {
        if (static_cast<int64_t>(rng.below(visible - j)) < budget - slot) {
          tokens.tensor().ptr<int32_t>()[t * budget + slot++] = static_cast<int32_t>(j);
        }
      }
    }
  }
  return tokens;
}

MsaGeometry small(int topk = 4) {
  return {.groups = 2, .heads_per_group = 2, .head_dim = 32, .index_dim = 16, .block = 16, .topk = topk};
}

class Attend : public ::testing::Test {
 protected:
  void TearDown() override { set_num_threads(0); }
};

TEST_F(Attend, equals_reference_over_geometries_types_layouts_supports_and_instruction_sets) {
  const MsaGeometry geometries[] = {
      small(),
      {.groups = 2, .heads_per_group = 16, .head_dim = 128, .index_dim = 16, .block = 128, .topk = 2},
      {.groups = 3, .heads_per_group = 3, .head_dim = 48, .index_dim = 16, .block = 48, .topk = 4},
      {.groups = 4, .heads_per_group = 1, .head_dim = 37, .index_dim = 16, .block = 20, .topk = 1},
      {.groups = 1, .heads_per_group = 8, .head_dim = 256, .index_dim = 16, .block = 32, .topk = 5, .local = 2, .init = 1},
      {.groups = 2, .heads_per_group = 2, .head_dim = 64, .index_dim = 16, .block = 160, .topk = 2, .scale = 0.3},
      {.groups = 1, .heads_per_group = 20, .head_dim = 16, .index_dim = 16, .block = 16, .topk = 64},
  };
  uint64_t seed = 100;
  for (const MsaGeometry& g : geometries) {
    const int32_t most = g.topk * g.block < 300 ? 200 : 330;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      const Data d = make_data(g, {{30, most}, {1, most + 1}, {5, g.block + 2}, {0, 7}, {17, 17}}, dtype, seed++);
      const Buffer ids = select_ids(d), tokens = random_tokens(d, 150);
      const std::pair<AttendSupport, Tensor> supports[] = {
          {AttendSupport::blocks(), ids.tensor()},
          {AttendSupport::full(), {}},
          {AttendSupport::sliding(g.block + 9, 5), {}},
          {AttendSupport::tokens(150), tokens.tensor()},
      };
      for (const auto& [support, lists] : supports) {
        const Output want = run_ref(d, support, lists);
        testing::for_each_isa([&] {
          const std::string what = std::string(cpu_isa_name(cpu_isa())) + " " + dtype_name(dtype) + " support " +
                                   std::to_string(static_cast<int>(support.kind)) + " head_dim " + std::to_string(g.head_dim);
          const Output packed = run_attend(d, d.packed(), support, lists);
          expect_close(d, packed, want, kFp32, what);
          EXPECT_TRUE(same_bits(packed, run_attend(d, d.paged(), support, lists))) << what << ": layout shows (T24)";
          if (dtype == DType::kBF16 && cpu_isa() == CpuIsa::kAvx512Bf16) {
            const Output coarse = run_attend(d, d.packed(), support, lists, MsaCompute::kBF16);
            expect_close(d, coarse, want, kBf16, what + " bf16 products");
            EXPECT_TRUE(same_bits(coarse, run_attend(d, d.paged(), support, lists, MsaCompute::kBF16))) << what;
          }
        });
      }
    }
  }
}

TEST_F(Attend, mixed_types_of_queries_cache_and_output) {
  const Data d = make_data(small(), {{30, 130}, {2, 77}}, DType::kBF16, 1);
  const Buffer ids = select_ids(d);
  const Output want = run_ref(d, AttendSupport::blocks(), ids.tensor());
  Data e = d;
  e.q = Buffer(DType::kF32, d.q.tensor().shape());
  for (int64_t i = 0; i < e.q.tensor().numel(); ++i) e.q.set(i, d.q.get(i));
  testing::for_each_isa([&] {
    expect_close(e, run_attend(e, e.packed(), AttendSupport::blocks(), ids.tensor(), MsaCompute::kBF16), want, kFp32,
                 "fp32 queries on a bf16 cache");
    // Rounding to bf16 changes a value by 2^-8 of itself at most.
    expect_close(d, run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor(), MsaCompute::kF32, DType::kBF16), want,
                 {0x1p-8, 0x1p-8, 1e-4}, "bf16 output");
  });
}

TEST_F(Attend, T01_up_to_topk_blocks_equals_full_attention_in_bits) {
  const Data d = make_data(msa_geometry_m3(), {{300, 300}, {1, 2048}, {3, 129}}, DType::kBF16, 2);
  const Buffer ids = select_ids(d);
  const Output full = run_attend(d, d.packed(), AttendSupport::full(), {});
  const Output sparse = run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor());
  expect_close(d, sparse, full, kFp32, "T01");
  // Blocks and tiles are the same keys in the same order, and eight of either make a span.
  EXPECT_EQ(0, std::memcmp(sparse.o.tensor().data(), full.o.tensor().data(), sparse.o.tensor().bytes()));
}

TEST_F(Attend, T03_T28_lengths_around_borders) {
  MsaGeometry g = msa_geometry_m3();
  g.groups = 1;
  g.heads_per_group = 4;
  const std::vector<Lengths> lengths = {{1, 1},    {1, 127},  {1, 128},  {1, 129},  {1, 255},  {1, 2047},
                                        {1, 2048}, {1, 2049}, {4, 2178}, {16, 400}, {1, 32769}};
  const Data d = make_data(g, lengths, DType::kBF16, 3);
  const Buffer ids = select_ids(d);
  for (const AttendSupport& support : {AttendSupport::blocks(), AttendSupport::full(), AttendSupport::sliding(2000, 48)}) {
    const Output want = run_ref(d, support, ids.tensor());
    testing::for_each_isa([&] {
      expect_close(d, run_attend(d, d.paged(), support, ids.tensor()), want, kFp32, cpu_isa_name(cpu_isa()));
      expect_close(d, run_attend(d, d.paged(), support, ids.tensor(), MsaCompute::kBF16), want, kBf16, cpu_isa_name(cpu_isa()));
    });
  }
}

TEST_F(Attend, T04_first_token_of_a_block_sees_itself_in_it) {
  const Data d = make_data(small(1), {{1, 33}}, DType::kF32, 4);  // topk 1: the own block alone, one visible token
  const Buffer ids = select_ids(d);
  const Output out = run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor());
  for (int h = 0; h < 4; ++h) {
    for (int c = 0; c < 32; ++c) EXPECT_FLOAT_EQ(out.o.get(h * 32 + c), d.v.get((32 * 2 + h / 2) * 32 + c));
  }
}

TEST_F(Attend, T18_prefill_beyond_topk_blocks_is_sparse) {
  const Data d = make_data(small(), {{200, 200}}, DType::kF32, 5);
  const Buffer ids = select_ids(d);
  const Output sparse = run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor());
  const Output full = run_attend(d, d.packed(), AttendSupport::full(), {});
  expect_close(d, sparse, run_ref(d, AttendSupport::blocks(), ids.tensor()), kFp32, "T18");
  for (int64_t t = 64; t < 200; ++t) EXPECT_NE(sparse.lse[t * 4], full.lse[t * 4]) << "row " << t << " is dense";
}

TEST_F(Attend, T21_T22_T23_what_is_not_visible_has_no_effect) {
  // Pages: NaN tails and garbage table entries come from fill_pages. Packed: NaN in the future and in neighbours.
  const std::vector<Lengths> lengths = {{50, 50}, {20, 75}, {3, 130}};
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const Data d = make_data(small(), lengths, dtype, 6);
    const Buffer ids = select_ids(d), tokens = random_tokens(d, 40);
    for (int64_t poisoned : {30, 50, 124}) {  // a packed key row
      Data e = d;
      for (int c = 0; c < 2 * 32; ++c) {
        e.k.set(poisoned * 64 + c, kNan);
        e.v.set(poisoned * 64 + c, c % 2 == 0 ? kNan : kInf);
      }
      e.fill_pages();
      const std::pair<AttendSupport, Tensor> supports[] = {{AttendSupport::blocks(), ids.tensor()},
                                                           {AttendSupport::full(), {}},
                                                           {AttendSupport::sliding(20, 3), {}},
                                                           {AttendSupport::tokens(40), tokens.tensor()}};
      testing::for_each_isa([&] {
        for (const auto& [support, lists] : supports) {
          const Output clean = run_attend(d, d.packed(), support, lists, MsaCompute::kBF16);
          const Output got = run_attend(e, e.packed(), support, lists, MsaCompute::kBF16);
          const Output paged = run_attend(e, e.paged(), support, lists, MsaCompute::kBF16);
          const Output want = run_ref(e, support, lists);  // NaN exactly where the row sees the key
          int num_clean = 0;
          for (int64_t i = 0; i < d.T() * 4 * 32; ++i) {
            if (std::isnan(want.o.get(i / 32 * 32))) continue;
            ++num_clean;
            ASSERT_EQ(got.o.get(i), clean.o.get(i)) << "key " << poisoned << " reaches row " << i / 128 << ", support "
                                                    << static_cast<int>(support.kind) << " " << cpu_isa_name(cpu_isa());
            ASSERT_EQ(paged.o.get(i), clean.o.get(i)) << "paged, key " << poisoned << " row " << i / 128;
          }
          EXPECT_GT(num_clean, 0);
        }
      });
    }
  }
}

TEST_F(Attend, T13_T27_T37_neither_chunks_nor_threads_nor_neighbours_show) {
  const Data d = make_data(small(20), {{400, 2300}, {33, 60}, {17, 300}}, DType::kBF16, 7);
  const Buffer ids = select_ids(d);  // three spans of blocks, three of tiles
  for (const AttendSupport& support : {AttendSupport::blocks(), AttendSupport::full(), AttendSupport::sliding(50, 3)}) {
    const bool blocks = support.kind == AttendSupport::Kind::kBlocks;
    const Output whole = run_attend(d, d.packed(), support, blocks ? ids.tensor() : Tensor());
    for (int threads : {1, 3, 8}) {
      set_num_threads(threads);
      EXPECT_TRUE(same_bits(whole, run_attend(d, d.packed(), support, blocks ? ids.tensor() : Tensor()))) << threads;
      for (int32_t chunk : {1, 2, 15, 16, 17, 128, 399}) {  // the last rows of the first sequence alone
        Data e = make_data(d.g, {{chunk, 2300}}, DType::kBF16, 8);
        std::memcpy(e.k.tensor().data(), d.k.tensor().data(), e.k.tensor().bytes());
        std::memcpy(e.v.tensor().data(), d.v.tensor().data(), e.v.tensor().bytes());
        std::memcpy(e.q.tensor().data(), d.q.tensor().rows(400 - chunk, 400).data(), e.q.tensor().bytes());
        Buffer part_ids(DType::kI32, {2, chunk, 20});
        for (int r = 0; r < 2; ++r) {
          std::copy_n(ids.tensor().ptr<int32_t>() + (r * d.T() + 400 - chunk) * 20, chunk * 20,
                      part_ids.tensor().ptr<int32_t>() + r * chunk * 20);
        }
        const Output part = run_attend(e, e.packed(), support, blocks ? part_ids.tensor() : Tensor());
        const float* same = static_cast<const float*>(whole.o.tensor().data()) + (400 - chunk) * 128;
        EXPECT_EQ(0, std::memcmp(part.o.tensor().data(), same, part.o.tensor().bytes())) << "chunk " << chunk;
      }
    }
  }
}

TEST_F(Attend, T25_T26_T35_unused_slots_empty_lists_and_empty_batches) {
  const Data d = make_data(small(), {{2, 0}, {1, 130}, {4, 0}, {0, 50}, {2, 40}}, DType::kF32, 9);
  const Buffer ids = select_ids(d), tokens = random_tokens(d, 300);
  for (const auto& [support, lists] : {std::pair{AttendSupport::blocks(), ids.tensor()},
                                       std::pair{AttendSupport::full(), Tensor()},
                                       std::pair{AttendSupport::sliding(8, 2), Tensor()},
                                       std::pair{AttendSupport::tokens(300), tokens.tensor()}}) {
    const Output out = run_attend(d, d.paged(), support, lists);
    for (int64_t t : {0, 1, 3, 4, 5, 6}) {
      for (int h = 0; h < 4; ++h) {
        EXPECT_EQ(out.lse[t * 4 + h], -kInf) << "row " << t;
        for (int c = 0; c < 32; ++c) EXPECT_EQ(out.o.get((t * 4 + h) * 32 + c), 0.0f) << "row " << t;
      }
    }
    expect_close(d, out, run_ref(d, support, lists), kFp32, "live rows");
  }
  Buffer no_ids(DType::kI32, {2, d.T(), 4});
  no_ids.fill_ints(-1);
  const Output nothing = run_attend(d, d.packed(), AttendSupport::blocks(), no_ids.tensor());
  for (float lse : nothing.lse) EXPECT_EQ(lse, -kInf);
  for (float x : nothing.rows()) EXPECT_EQ(x, 0.0f);
  const Data none = make_data(small(), {}, DType::kF32, 10);
  run_attend(none, none.packed(), AttendSupport::full(), {});
}

TEST_F(Attend, T34_every_head_uses_its_own_group) {
  for (int G : {1, 2, 8, 16}) {
    const MsaGeometry g{.groups = 3, .heads_per_group = G, .head_dim = 16, .index_dim = 16, .block = 16, .topk = 2};
    Data d = make_data(g, {{20, 20}}, DType::kF32, 11);
    for (int64_t s = 0; s < 20; ++s) {
      for (int r = 0; r < 3; ++r) {
        for (int c = 0; c < 16; ++c) d.v.set((s * 3 + r) * 16 + c, static_cast<float>(r + 1));
      }
    }
    const Buffer ids = select_ids(d);
    const Output out = run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor());
    for (int h = 0; h < 3 * G; ++h) EXPECT_NEAR(out.o.get((19 * 3 * G + h) * 16), h / G + 1, 1e-5) << "head " << h;
    expect_close(d, out, run_ref(d, AttendSupport::blocks(), ids.tensor()), kFp32, "T34");
  }
}

TEST_F(Attend, T36_huge_logits_stay_exact_and_the_lse_is_natural) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (float factor : {1e4f, -1e3f, 1e2f}) {
      Data d = make_data(small(), {{150, 150}, {1, 200}, {20, 300}}, dtype, 12);
      for (int64_t i = 0; i < d.T() * 128; ++i) d.q.set(i, d.q.get(i) * factor);  // logits of about 1e4
      for (int64_t i = 0; i < 64; ++i) d.k.set(70 * 64 + i, d.k.get(60 * 64 + i));  // equal logits, both weighted 1/2
      const Output want = run_ref(d, AttendSupport::full(), {});
      testing::for_each_isa([&] {
        expect_close(d, run_attend(d, d.packed(), AttendSupport::full(), {}), want, kFp32, "T36");
        expect_close(d, run_attend(d, d.packed(), AttendSupport::full(), {}, MsaCompute::kBF16), want, kBf16, "T36 bf16");
      });
    }
  }
  Data flat = make_data(small(), {{1, 100}}, DType::kF32, 13);
  flat.q.fill(0.0f);
  EXPECT_NEAR(run_attend(flat, flat.packed(), AttendSupport::full(), {}).lse[0], std::log(100.0), 1e-6);
}

TEST_F(Attend, any_order_of_a_list_is_accepted) {
  const Data d = make_data(small(6), {{300, 300}, {2, 200}}, DType::kF32, 14);
  Buffer ids(DType::kI32, {2, d.T(), 6});
  index_select_ref(d.g, d.packed(), {.order = SelectOrder::kScore}, d.qi.tensor(), d.ki.tensor(), ids.tensor(), {});
  expect_close(d, run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor()),
               run_ref(d, AttendSupport::blocks(), ids.tensor()), kFp32, "score order");
}

TEST_F(Attend, T33_pages_beyond_two_billion_elements) {
  const MsaGeometry g = msa_geometry_m3();
  const int64_t num_pages = 33000;  // 2.16e9 elements a lane; pages that nobody touches cost no memory
  Arena arena("T33", 3 * (num_pages * 4 * 128 * 128 * 2 + 4096));
  const Tensor k = arena.alloc("k", DType::kBF16, {num_pages, 4, 128, 128});
  const Tensor v = arena.alloc("v", DType::kBF16, {num_pages, 4, 128, 128});
  const Tensor x = arena.alloc("x", DType::kBF16, {num_pages, 128, 128});
  const Data d = make_data(g, {{2, 300}}, DType::kBF16, 33);
  const int64_t pages[] = {num_pages - 1, num_pages - 3, 0};
  Data far = d;
  for (int i = 0; i < 3; ++i) {
    const int64_t near = d.page_table[i];
    std::memcpy(k[pages[i]].data(), d.k_pages.tensor()[near].data(), k[0].bytes());
    std::memcpy(v[pages[i]].data(), d.v_pages.tensor()[near].data(), v[0].bytes());
    std::memcpy(x[pages[i]].data(), d.x_pages.tensor()[near].data(), x[0].bytes());
    far.page_table[i] = static_cast<int32_t>(pages[i]);
  }
  const Output want = run_attend(d, d.paged(), AttendSupport::full(), {});
  const Output got = collect(far, DType::kF32, [&](const Tensor& o, const Tensor& lse) {
    const AttendPlan plan = attend_plan(g, far.paged(), {.support = AttendSupport::full(), .compute = MsaCompute::kF32});
    attend(plan, far.paged(), d.q.tensor(), k, v, {}, o, lse, Workspace(plan.workspace_bytes).get());
  });
  EXPECT_TRUE(same_bits(got, want));
}

TEST_F(Attend, T38_block_chosen_by_very_many_queries) {
  // One head, blocks of 16 keys: every row of 2^15 selects block 0 beside its own block.
  const MsaGeometry g{.groups = 1, .heads_per_group = 1, .head_dim = 16, .index_dim = 1, .block = 16, .topk = 2, .local = 1, .init = 1};
  const Data d = make_data(g, {{1 << 15, 1 << 15}}, DType::kBF16, 38);
  Buffer ids(DType::kI32, {1, d.T(), 2});
  for (int32_t t = 0; t < d.T(); ++t) {
    ids.tensor().ptr<int32_t>()[t * 2] = 0;
    ids.tensor().ptr<int32_t>()[t * 2 + 1] = t < 16 ? -1 : t / 16;
  }
  expect_close(d, run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor()),
               run_ref(d, AttendSupport::blocks(), ids.tensor()), kFp32, "T38");
}

TEST_F(Attend, lists_that_reach_into_the_future_are_refused) {
  const Data d = make_data(small(), {{20, 100}}, DType::kF32, 15);
  Buffer ids = select_ids(d);
  ids.tensor().ptr<int32_t>()[5 * 4 + 3] = 7;
  EXPECT_THROW(run_attend(d, d.packed(), AttendSupport::blocks(), ids.tensor()), Error);
  EXPECT_THROW(attend_plan(d.g, d.packed(), {.support = AttendSupport::sliding(0, 0)}), Error);
}

}  // namespace
}  // namespace m3
