// Decode attention on the GPU against attend_ref (fp64) with the same ids, tolerances of msa.md
// §14.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include "ops/attend/attend.h"
#include "ops/attend/attend_decode.h"
#include "ops/common/paged_case.h"
#include "ops/index_select/index_select_decode.h"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

enum class Lists {
  kChosen,
  kGiven,
  kAll
};  // by the kernel from scores, by index_decode_choose, all keys

struct Buffers {
  Mirror scores, ids, o, lse, partial;
};

Buffers make_buffers(PagedCase& c, int splits) {
  const MsaGeometry& g = c.spec().geometry;
  Buffers b;
  b.scores = Mirror(DType::kF32,
                    {c.num_queries(), g.groups, index_decode_score_stride(c.max_blocks())}, true);
  b.ids = Mirror(DType::kI32, {g.groups, c.num_queries(), g.topk}, true);
  b.o = Mirror(DType::kBF16, {c.num_queries(), g.heads(), g.head_dim}, true);
  b.lse = Mirror(DType::kF32, {c.num_queries(), g.heads()}, true);
  b.partial =
      Mirror(DType::kU8, {attend_decode_workspace_bytes(g, c.num_queries(), splits) + 1}, true);
  for (Mirror* m : {&b.scores, &b.ids, &b.o, &b.lse, &b.partial}) m->fill_bytes(0xff), m->upload();
  return b;
}

void launch(PagedCase& c, Buffers& b, Lists lists, const AttendDecodeTuning& tuning,
            Stream stream = {}) {
  const MsaGeometry& g = c.spec().geometry;
  const int64_t stride = index_decode_score_stride(c.max_blocks());
  const MsaBatch batch = c.device_batch();
  if (lists != Lists::kAll) {
    index_decode_scores({.qi_TRX = c.qi().device_ptr<bf16>(),
                         .x_PBX = c.x().device_ptr<bf16>(),
                         .cu_q = batch.cu_q,
                         .seq_lens = batch.seq_lens,
                         .page_table = batch.page_table,
                         .page_stride = batch.max_pages,
                         .num_seqs = batch.num_seqs,
                         .groups = g.groups,
                         .topk = g.topk,
                         .scores_TRM = b.scores.device_ptr<float>(),
                         .score_stride = stride},
                        c.max_q_len(), {}, stream);
  }
  if (lists == Lists::kGiven) {
    index_decode_choose({.scores_TRM = b.scores.device_ptr<float>(),
                         .score_stride = stride,
                         .cu_q = batch.cu_q,
                         .seq_lens = batch.seq_lens,
                         .num_seqs = batch.num_seqs,
                         .groups = g.groups,
                         .topk = g.topk,
                         .num_queries = c.num_queries(),
                         .ids_RTK = b.ids.device_ptr<int32_t>()},
                        c.max_blocks(), true, stream);
  }
  AttendDecodeParams params = {
      .q_THD = c.q().device_ptr<bf16>(),
      .k_PRBD = c.k().device_ptr<bf16>(),
      .v_PRBD = c.v().device_ptr<bf16>(),
      .num_pages = c.num_pages(),
      .o_THD = b.o.device_ptr<bf16>(),
      .lse_TH = b.lse.device_ptr<float>(),
      .cu_q = batch.cu_q,
      .seq_lens = batch.seq_lens,
      .page_table = batch.page_table,
      .page_stride = batch.max_pages,
      .num_seqs = batch.num_seqs,
      .groups = g.groups,
      .heads_per_group = g.heads_per_group,
      .topk = g.topk,
      .num_queries = c.num_queries(),
      .scale_log2 = static_cast<float>(g.logit_scale() * 1.4426950408889634),
      .partial = b.partial.device_ptr<float>()};
  if (lists == Lists::kChosen)
    params.scores_TRM = b.scores.device_ptr<float>(), params.score_stride = stride;
  if (lists != Lists::kAll) params.ids_RTK = b.ids.device_ptr<int32_t>();
  attend_decode(params, c.max_q_len(), tuning, stream);
}

void download(Buffers& b) {
  for (Mirror* m : {&b.ids, &b.o, &b.lse}) m->download();
}

// Rows with ids, against the reference over these ids; limits for O: mean 4e-3, largest 8e-3.
void check(PagedCase& c, Buffers& b, Lists lists) {
  const MsaGeometry& g = c.spec().geometry;
  std::vector<float> o(c.num_queries() * g.heads() * g.head_dim), lse(c.num_queries() * g.heads());
  Tensor o_THD(o.data(), DType::kF32, {c.num_queries(), g.heads(), g.head_dim});
  Tensor lse_TH(lse.data(), DType::kF32, {c.num_queries(), g.heads()});
  const AttendSupport support =
      lists == Lists::kAll ? AttendSupport::full() : AttendSupport::blocks();
  attend_ref(g, c.host_batch(), support, c.q().host(), c.k().host(), c.v().host(),
             lists == Lists::kAll ? Tensor() : b.ids.host(), o_THD, lse_TH);
  const int64_t rows = c.num_queries() * g.heads();
  double square = 0;
  for (float x : o) square += double{x} * x;
  const double floor = 0.1 * std::sqrt(square / std::max<int64_t>(1, rows));
  double sum = 0;
  int64_t counted = 0;
  for (int64_t row = 0; row < rows; ++row) {
    const bf16* mine = b.o.ptr<bf16>() + row * g.head_dim;
    double difference = 0, length = 0;
    for (int i = 0; i < g.head_dim; ++i) {
      const double d = to_float(mine[i]) - double{o[row * g.head_dim + i]};
      difference += d * d, length += double{o[row * g.head_dim + i]} * o[row * g.head_dim + i];
    }
    if (lse[row] == -std::numeric_limits<float>::infinity()) {
      ASSERT_EQ(b.lse.ptr<float>()[row], lse[row]) << c.spec().str() << " row " << row;
      for (int i = 0; i < g.head_dim; ++i)
        ASSERT_EQ(mine[i].bits, 0) << c.spec().str() << " row " << row;
      continue;
    }
    const double error = std::sqrt(difference) / std::max(std::sqrt(length), floor);
    ASSERT_LE(error, 8e-3) << c.spec().str() << " token " << row / g.heads() << " head "
                           << row % g.heads();
    ASSERT_NEAR(b.lse.ptr<float>()[row], lse[row], 5e-4 + std::abs(lse[row]) * 0x1p-21)
        << c.spec().str() << " row " << row;
    sum += error, ++counted;
  }
  ASSERT_LE(sum, 4e-3 * static_cast<double>(counted)) << c.spec().str();
}

bool same_bits(Buffers& a, Buffers& b) {
  return std::memcmp(a.o.ptr<char>(), b.o.ptr<char>(), a.o.host().bytes()) == 0 &&
         std::memcmp(a.lse.ptr<char>(), b.lse.ptr<char>(), a.lse.host().bytes()) == 0 &&
         std::memcmp(a.ids.ptr<char>(), b.ids.ptr<char>(), a.ids.host().bytes()) == 0;
}

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

PagedSpec spec_of(std::vector<int> lens, std::vector<int> q_lens, PagedData data, uint64_t seed) {
  PagedSpec spec;
  spec.lens = std::move(lens), spec.q_lens = std::move(q_lens);
  spec.data = data, spec.seed = seed, spec.page_seed = seed + 99;
  return spec;
}

class AttendDecodeCluster : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Cuda, AttendDecodeCluster, testing::Values(1, 2, 4, 8, 16));

TEST_P(AttendDecodeCluster, BorderLengthsInOneBatchMatchReference) {
  M3_NEEDS_GPU();
  PagedSpec spec =
      spec_of({1, 63, 64, 65, 127, 128, 129, 255, 2047, 2048, 2049, 2176, 2177, 4096, 0, 6001}, {},
              PagedData::kNormal, 31);
  spec.q_lens.assign(spec.lens.size(), 1);
  PagedCase c(spec);
  for (const Lists lists : {Lists::kChosen, Lists::kGiven, Lists::kAll}) {
    Buffers b = make_buffers(c, 1);
    launch(c, b, lists, {.cluster = GetParam()});
    download(b);
    SCOPED_TRACE(fmt::format("lists {}", static_cast<int>(lists)));
    check(c, b, lists);
    Buffers again = make_buffers(c, 1);
    launch(c, again, lists, {.cluster = GetParam()});
    download(again);
    ASSERT_TRUE(same_bits(b, again)) << "two runs differ";
  }
}

class AttendDecodeRandom : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Cuda, AttendDecodeRandom, testing::Range(0, 100, 5));

TEST_P(AttendDecodeRandom, BatchesMatchReference) {
  M3_NEEDS_GPU();
  for (uint64_t seed = GetParam(); seed < static_cast<uint64_t>(GetParam()) + 5; ++seed) {
    Philox rng(seed, 5);
    PagedSpec spec = spec_of(
        {}, {},
        std::array{PagedData::kNormal, PagedData::kPeaked, PagedData::kCorrelated}[seed % 3],
        seed + 1000);
    spec.geometry.groups = std::array{4, 4, 1, 2}[rng.below(4)];
    spec.geometry.heads_per_group = std::array{16, 16, 8, 4, 3}[rng.below(5)];
    spec.geometry.topk = std::array{16, 16, 4, 8, 32}[rng.below(5)];
    const int num = 1 + static_cast<int>(rng.below(5));
    const bool single = seed % 2 == 0;
    for (int n = 0; n < num; ++n) {
      const int queries = single ? 1 : static_cast<int>(rng.below(17));
      spec.q_lens.push_back(queries);
      spec.lens.push_back(rng.below(8) == 0 ? 0
                                            : queries + static_cast<int>(rng.below(std::array{
                                                            200, 2100, 6000}[rng.below(3)])));
    }
    PagedCase c(spec);
    const Lists lists = rng.below(4) == 0 ? Lists::kAll : single ? Lists::kChosen : Lists::kGiven;
    AttendDecodeTuning tuning = attend_decode_tuning(spec.geometry, num, c.max_q_len(),
                                                     c.max_blocks() * 128, lists == Lists::kAll);
    if (lists == Lists::kAll) tuning.splits = 1 + static_cast<int>(rng.below(5));
    if (rng.below(2) == 0) tuning.cluster = 1 << rng.below(5);
    Buffers b = make_buffers(c, tuning.splits);
    launch(c, b, lists, tuning);
    download(b);
    check(c, b, lists);
    if (HasFatalFailure()) return;
  }
}

TEST(AttendDecodeCuda, ChosenAndGivenListsGiveTheSameBits) {
  M3_NEEDS_GPU();
  PagedCase c(spec_of({5000, 2049, 777, 40000, 0}, {1, 1, 1, 1, 1}, PagedData::kNormal, 41));
  Buffers a = make_buffers(c, 1), b = make_buffers(c, 1);
  launch(c, a, Lists::kChosen, {.cluster = 4});
  launch(c, b, Lists::kGiven, {.cluster = 4});
  download(a), download(b);
  EXPECT_TRUE(same_bits(a, b));
}

TEST(AttendDecodeCuda, PhysicalPageOrderAndBatchCompositionChangeNoBits) {
  M3_NEEDS_GPU();
  PagedSpec spec = spec_of({5000, 2049, 777}, {1, 1, 1}, PagedData::kNormal, 42);
  PagedCase c(spec);
  spec.page_seed = 5;
  PagedCase moved(spec);
  Buffers a = make_buffers(c, 1), b = make_buffers(moved, 1);
  launch(c, a, Lists::kChosen, {.cluster = 8});
  launch(moved, b, Lists::kChosen, {.cluster = 8});
  download(a), download(b);
  EXPECT_TRUE(same_bits(a, b));
  spec.lens = {5000},
  spec.q_lens = {1};  // sequence 0 alone: contents depend on (seed, sequence, position)
  PagedCase alone(spec);
  Buffers s = make_buffers(alone, 1);
  launch(alone, s, Lists::kChosen, {.cluster = 8});
  download(s);
  EXPECT_EQ(0, std::memcmp(s.o.ptr<char>(), a.o.ptr<char>(), s.o.host().bytes()));
}

TEST(AttendDecodeCuda, ShortContextEqualsAllKeys) {
  M3_NEEDS_GPU();
  PagedCase c(spec_of({2048, 1500, 130}, {1, 1, 1}, PagedData::kNormal, 43));
  Buffers a = make_buffers(c, 1), b = make_buffers(c, 1);
  launch(c, a, Lists::kChosen, {.cluster = 4});
  launch(c, b, Lists::kAll, {.cluster = 4});
  download(a), download(b);
  EXPECT_EQ(0, std::memcmp(a.o.ptr<char>(), b.o.ptr<char>(), a.o.host().bytes()));
}

TEST(AttendDecodeCuda, HugeLogitsStayFinite) {
  M3_NEEDS_GPU();
  PagedSpec spec = spec_of({3000}, {1}, PagedData::kNormal, 44);
  PagedCase c(spec);
  for (int64_t i = 0; i < c.q().host().numel(); ++i)
    c.q().ptr<bf16>()[i] = bf16(3000.0f * to_float(c.q().ptr<bf16>()[i]));
  c.q().upload();
  Buffers b = make_buffers(c, 1);
  launch(c, b, Lists::kChosen, {.cluster = 2});
  download(b);
  for (int64_t i = 0; i < b.o.host().numel(); ++i)
    ASSERT_TRUE(std::isfinite(to_float(b.o.ptr<bf16>()[i])));
  for (int64_t i = 0; i < b.lse.host().numel(); ++i) ASSERT_GT(b.lse.ptr<float>()[i], 1e3f);
}

TEST(AttendDecodeCuda, GraphReplaysWithFewerLiveRequests) {
  M3_NEEDS_GPU();
  PagedSpec spec = spec_of({5000, 2049, 777, 9000}, {1, 1, 1, 1}, PagedData::kNormal, 45);
  PagedCase c(spec);
  Buffers full = make_buffers(c, 1), b = make_buffers(c, 1);
  launch(c, full, Lists::kChosen, {.cluster = 4});
  download(full);
  cudaStream_t stream;
  M3_CUDA_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  M3_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  launch(c, b, Lists::kChosen, {.cluster = 4}, Stream{stream});
  M3_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
  M3_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  M3_CUDA_CHECK(cudaGraphLaunch(exec, stream));
  M3_CUDA_CHECK(cudaStreamSynchronize(stream));
  download(b);
  EXPECT_TRUE(same_bits(full, b));
  // Two slots become unused: only device memory changes.
  c.seq_lens().ptr<int32_t>()[1] = c.seq_lens().ptr<int32_t>()[3] = 0;
  c.seq_lens().upload();
  M3_CUDA_CHECK(cudaGraphLaunch(exec, stream));
  M3_CUDA_CHECK(cudaStreamSynchronize(stream));
  download(b);
  const int row = 64 * 128;
  for (const int live : {0, 2}) {
    EXPECT_EQ(0,
              std::memcmp(b.o.ptr<bf16>() + live * row, full.o.ptr<bf16>() + live * row, row * 2))
        << live;
  }
  for (const int unused : {1, 3}) {
    for (int i = 0; i < row; ++i) ASSERT_EQ(b.o.ptr<bf16>()[unused * row + i].bits, 0);
    for (int h = 0; h < 64; ++h)
      ASSERT_EQ(b.lse.ptr<float>()[unused * 64 + h], -std::numeric_limits<float>::infinity());
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < 16; ++i) ASSERT_EQ(b.ids.ptr<int32_t>()[(r * 4 + unused) * 16 + i], -1);
    }
  }
  M3_CUDA_CHECK(cudaGraphExecDestroy(exec));
  M3_CUDA_CHECK(cudaGraphDestroy(graph));
  M3_CUDA_CHECK(cudaStreamDestroy(stream));
}

TEST(AttendDecodeCuda, UnsupportedGeometryIsNamed) {
  MsaGeometry g = msa_geometry_m3();
  EXPECT_EQ(attend_decode_supports(g, 16, 8192), "");
  g.head_dim = 64;
  EXPECT_NE(attend_decode_supports(g, 1, 8).find("head_dim 64"), std::string::npos);
  EXPECT_NE(attend_decode_supports(msa_geometry_m3(), 17, 8).find("17 query tokens"),
            std::string::npos);
}

}  // namespace
}  // namespace m3
