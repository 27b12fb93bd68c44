// Fused norm, rotation and cache write on the GPU against qknorm_rope_ref (fp64) and rope_angles
// (CPU).
#include <gtest/gtest.h>

#include "ops/cache_append/norm_rope_append.h"
#include "ops/common/paged_case.h"
#include "ops/qknorm_rope/qknorm_rope.h"

namespace m3 {
namespace {

#define M3_NEEDS_GPU() \
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason()

constexpr int kHeads = 64, kGroups = 4, kDim = 128, kPairs = 32;
constexpr double kTheta = 5e6;

struct Joint {  // one projection output [T, 77 vectors of 128]
  static constexpr int kQ = 0, kK = 64, kV = 68, kQi = 72, kKi = 76, kVectors = 77;
  Mirror x, weights;  // weights: q, k, qi, ki
  explicit Joint(int64_t tokens, uint64_t seed)
      : x(DType::kBF16, {tokens, kVectors, kDim}, true), weights(DType::kBF16, {4, kDim}, true) {
    const ValueSource source(seed);
    for (int64_t i = 0; i < x.host().numel(); ++i)
      x.ptr<bf16>()[i] = bf16(source.normal(1, i) * (1 + i / kDim % 5));
    for (int64_t i = 0; i < weights.host().numel(); ++i)
      weights.ptr<bf16>()[i] = bf16(0.3f * source.normal(2, i));
    x.upload(), weights.upload();
  }
  const bf16* device(int vector) const { return x.device_ptr<bf16>() + vector * kDim; }
};

// The reference for vectors [first, first + count) of every token, norm weight `weight` (or none).
std::vector<float> expected(Joint& joint, Mirror& cos, Mirror& sin, int first, int count,
                            int weight) {
  const int64_t T = joint.x.host().dim(0);
  std::vector<bf16> in(T * count * kDim);
  for (int64_t t = 0; t < T; ++t) {
    std::copy_n(joint.x.ptr<bf16>() + (t * Joint::kVectors + first) * kDim, count * kDim,
                in.data() + t * count * kDim);
  }
  std::vector<float> out(in.size());
  const Shape shape = {T, count, kDim};
  qknorm_rope_ref(Tensor(in.data(), DType::kBF16, shape),
                  Tensor(joint.weights.ptr<bf16>() + weight * kDim, DType::kBF16, {kDim}),
                  cos.host(), sin.host(), 1e-6f, Tensor(out.data(), DType::kF32, shape));
  return out;
}

// fp32 arithmetic and one rounding to bf16: half a unit of 2^-8, and a little for the fp32 part.
void expect_close(const bf16* got, const float* want, const std::string& what) {
  for (int i = 0; i < kDim; ++i) {
    ASSERT_NEAR(to_float(got[i]), want[i], std::abs(want[i]) * 0x1.04p-8 + 1e-5)
        << what << " dim " << i;
  }
}

TEST(NormRopeAppendCuda, PagesAndQueriesMatchReference) {
  M3_NEEDS_GPU();
  PagedSpec spec;
  spec.lens = {1, 128, 129, 1000, 0, 5000, 300}, spec.q_lens = {1, 3, 2, 200, 1, 16, 300};
  spec.seed = 77;
  PagedCase c(spec);
  const int64_t T = c.num_queries();
  Joint joint(T, 78);
  Mirror cos(DType::kF32, {T, kPairs}, true), sin(DType::kF32, {T, kPairs}, true);
  rope_angles_paged({.cu_q = c.cu_q().device_ptr<int32_t>(),
                     .seq_lens = c.seq_lens().device_ptr<int32_t>(),
                     .num_seqs = c.num_seqs(),
                     .num_queries = T,
                     .theta = kTheta,
                     .pairs = kPairs,
                     .cos_TM = cos.device_ptr<float>(),
                     .sin_TM = sin.device_ptr<float>()},
                    {});
  cos.download(), sin.download();

  Mirror q(DType::kBF16, {T, kHeads, kDim}, true), qi(DType::kBF16, {T, kGroups, kDim}, true);
  q.fill_bytes(0xff), qi.fill_bytes(0xff), q.upload(), qi.upload();
  const std::vector<bf16> k_before(c.k().ptr<bf16>(), c.k().ptr<bf16>() + c.k().host().numel());
  const std::vector<bf16> x_before(c.x().ptr<bf16>(), c.x().ptr<bf16>() + c.x().host().numel());
  const int64_t stride = Joint::kVectors * kDim;
  norm_rope_append({.q_THD = joint.device(Joint::kQ),
                    .k_TRD = joint.device(Joint::kK),
                    .v_TRD = joint.device(Joint::kV),
                    .qi_TRX = joint.device(Joint::kQi),
                    .ki_TX = joint.device(Joint::kKi),
                    .q_token_stride = stride,
                    .k_token_stride = stride,
                    .v_token_stride = stride,
                    .qi_token_stride = stride,
                    .ki_token_stride = stride,
                    .w_q = joint.weights.device_ptr<bf16>(),
                    .w_k = joint.weights.device_ptr<bf16>() + kDim,
                    .w_qi = joint.weights.device_ptr<bf16>() + 2 * kDim,
                    .w_ki = joint.weights.device_ptr<bf16>() + 3 * kDim,
                    .cos_TM = cos.device_ptr<float>(),
                    .sin_TM = sin.device_ptr<float>(),
                    .pairs = kPairs,
                    .q_out_THD = q.device_ptr<bf16>(),
                    .qi_out_TRX = qi.device_ptr<bf16>(),
                    .k_PRBD = c.k().device_ptr<bf16>(),
                    .v_PRBD = c.v().device_ptr<bf16>(),
                    .x_PBX = c.x().device_ptr<bf16>(),
                    .cu_q = c.cu_q().device_ptr<int32_t>(),
                    .seq_lens = c.seq_lens().device_ptr<int32_t>(),
                    .page_table = c.page_table().device_ptr<int32_t>(),
                    .page_stride = c.page_stride(),
                    .num_seqs = c.num_seqs(),
                    .heads = kHeads,
                    .groups = kGroups,
                    .num_queries = T},
                   false, {});
  for (Mirror* m : {&q, &qi, &c.k(), &c.v(), &c.x()}) m->download();

  const std::vector<float> want_q = expected(joint, cos, sin, Joint::kQ, kHeads, 0),
                           want_k = expected(joint, cos, sin, Joint::kK, kGroups, 1),
                           want_qi = expected(joint, cos, sin, Joint::kQi, kGroups, 2),
                           want_ki = expected(joint, cos, sin, Joint::kKi, 1, 3);
  std::vector<char> written_k(k_before.size(), 0), written_x(x_before.size(), 0);
  for (int64_t t = 0; t < T; ++t) {
    const auto [n, position] = c.row(t);
    const std::string at = fmt::format("token {} sequence {} position {}", t, n, position);
    for (int h = 0; h < kHeads; ++h) {
      expect_close(q.ptr<bf16>() + (t * kHeads + h) * kDim, want_q.data() + (t * kHeads + h) * kDim,
                   at + " q");
    }
    for (int r = 0; r < kGroups; ++r) {
      expect_close(qi.ptr<bf16>() + (t * kGroups + r) * kDim,
                   want_qi.data() + (t * kGroups + r) * kDim, at + " qi");
    }
    if (position < 0) continue;
    const int64_t page = c.page_table().ptr<int32_t>()[n * c.page_stride() + position / 128],
                  slot = position % 128;
    for (int r = 0; r < kGroups; ++r) {
      const int64_t to = ((page * kGroups + r) * 128 + slot) * kDim;
      expect_close(c.k().ptr<bf16>() + to, want_k.data() + (t * kGroups + r) * kDim, at + " k");
      const bf16* v = joint.x.ptr<bf16>() + (t * Joint::kVectors + Joint::kV + r) * kDim;
      ASSERT_EQ(0, std::memcmp(c.v().ptr<bf16>() + to, v, kDim * 2)) << at << " v";
      std::fill_n(written_k.begin() + to, kDim, 1);
    }
    const int64_t to = (page * 128 + slot) * kDim;
    expect_close(c.x().ptr<bf16>() + to, want_ki.data() + t * kDim, at + " ki");
    std::fill_n(written_x.begin() + to, kDim, 1);
  }
  for (size_t i = 0; i < k_before.size(); ++i) {
    if (!written_k[i]) {
      ASSERT_EQ(c.k().ptr<bf16>()[i].bits, k_before[i].bits) << "k element " << i << " changed";
    }
  }
  for (size_t i = 0; i < x_before.size(); ++i) {
    if (!written_x[i]) {
      ASSERT_EQ(c.x().ptr<bf16>()[i].bits, x_before[i].bits) << "x element " << i << " changed";
    }
  }
}

TEST(NormRopeAppendCuda, AnglesEqualTheCpuRule) {
  M3_NEEDS_GPU();
  PagedSpec spec;
  spec.lens = {16, 4096, 1048570, 0}, spec.q_lens = {16, 16, 16, 1};
  std::vector<int32_t> cu = {0, 16, 32, 48, 49}, pos;
  for (int n = 0; n < 4; ++n) {
    for (int i = 0; i < spec.q_lens[n]; ++i)
      pos.push_back(std::max(0, spec.lens[n] - spec.q_lens[n] + i));
  }
  const int64_t T = 49;
  Mirror cu_q(DType::kI32, {5}, true), lens(DType::kI32, {4}, true);
  std::copy(cu.begin(), cu.end(), cu_q.ptr<int32_t>());
  std::copy(spec.lens.begin(), spec.lens.end(), lens.ptr<int32_t>());
  cu_q.upload(), lens.upload();
  Mirror cos(DType::kF32, {T, kPairs}, true), sin(DType::kF32, {T, kPairs}, true);
  Mirror cos_cpu(DType::kF32, {T, kPairs}, false), sin_cpu(DType::kF32, {T, kPairs}, false);
  rope_angles_paged({.cu_q = cu_q.device_ptr<int32_t>(),
                     .seq_lens = lens.device_ptr<int32_t>(),
                     .num_seqs = 4,
                     .num_queries = T,
                     .theta = kTheta,
                     .pairs = kPairs,
                     .cos_TM = cos.device_ptr<float>(),
                     .sin_TM = sin.device_ptr<float>()},
                    {});
  cos.download(), sin.download();
  rope_angles(Tensor(pos.data(), DType::kI32, {T}), kTheta, cos_cpu.host(), sin_cpu.host());
  // Both round an accurate sine once: at most the last bit differs.
  for (int64_t i = 0; i < T * kPairs; ++i) {
    ASSERT_NEAR(cos.ptr<float>()[i], cos_cpu.ptr<float>()[i], 0x1p-24)
        << "token " << i / kPairs << " pair " << i % kPairs;
    ASSERT_NEAR(sin.ptr<float>()[i], sin_cpu.ptr<float>()[i], 0x1p-24)
        << "token " << i / kPairs << " pair " << i % kPairs;
  }
}

}  // namespace
}  // namespace m3
