// Inputs for the tests of the MSA operators: random sequences, packed and in shuffled pages, with NaN in
// every byte that nobody may see. Test code only.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "base/rng.h"
#include "ops/common/msa_keys.h"

namespace m3::msa_test {

// Storage for one tensor of any type.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, Shape shape) : bytes_(shape.numel() * dtype_bytes(dtype) + 64), dtype_(dtype), shape_(shape) {}
  Tensor tensor() const { return {const_cast<char*>(bytes_.data()), dtype_, shape_}; }
  void set(int64_t i, float value) {
    if (dtype_ == DType::kBF16) {
      tensor().ptr<bf16>()[i] = bf16(value);
    } else {
      tensor().ptr<float>()[i] = value;
    }
  }
  float get(int64_t i) const { return static_cast<float>(load_element(bytes_.data(), dtype_, i)); }
  void fill(float value) {
    for (int64_t i = 0; i < shape_.numel(); ++i) set(i, value);
  }
  void fill_ints(int32_t value) { std::fill_n(tensor().ptr<int32_t>(), shape_.numel(), value); }

 private:
  std::vector<char> bytes_;
  DType dtype_ = DType::kF32;
  Shape shape_;
};

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

struct Lengths {
  int32_t q, k;
};

// A batch with its inputs. `packed` and `paged` describe the same sequences.
struct Data {
  MsaGeometry g;
  uint64_t seed;
  std::vector<int32_t> cu_q{0}, cu_k{0}, seq_lens, page_table;
  int64_t max_pages = 1, num_pages = 0;
  Buffer q, k, v, qi, ki;         // packed
  Buffer k_pages, v_pages, x_pages;

  int64_t T() const { return cu_q.back(); }
  int64_t S() const { return cu_k.back(); }
  int num_seqs() const { return static_cast<int>(seq_lens.size()); }
  MsaBatch packed() const {
    return {.num_seqs = num_seqs(), .num_queries = T(), .cu_q = cu_q.data(), .cu_k = cu_k.data()};
  }
  MsaBatch paged() const {
    return {.layout = KvLayout::kPaged, .num_seqs = num_seqs(), .num_queries = T(), .cu_q = cu_q.data(),
            .seq_lens = seq_lens.data(), .page_table = page_table.data(), .max_pages = max_pages};
  }

  // Copies the packed keys into pages in a random physical order; everything else in the pages is NaN
  // and unused table entries are garbage. Call again after changing k, v or ki.
  void fill_pages() {
    Philox rng(seed, 77);
    const int B = g.block;
    max_pages = 1;
    for (int32_t len : seq_lens) max_pages = std::max<int64_t>(max_pages, (len + B - 1) / B + 1);
    num_pages = 3;  // some pages belong to nobody
    for (int32_t len : seq_lens) num_pages += (len + B - 1) / B;
    std::vector<int32_t> order(num_pages);
    std::iota(order.begin(), order.end(), 0);
    for (int64_t i = num_pages - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    const DType dtype = k.tensor().dtype();
    k_pages = Buffer(dtype, {num_pages, g.groups, B, g.head_dim});
    v_pages = Buffer(dtype, {num_pages, g.groups, B, g.head_dim});
    x_pages = Buffer(ki.tensor().dtype(), {num_pages, B, g.index_dim});
    for (Buffer* lane : {&k_pages, &v_pages, &x_pages}) lane->fill(kNan);
    page_table.assign(num_seqs() * max_pages, -1);
    int next = 0;
    for (int n = 0; n < num_seqs(); ++n) {
      for (int64_t i = 0; i < max_pages; ++i) page_table[n * max_pages + i] = i % 2 == 0 ? -1 : 1 << 30;
      for (int32_t i = 0; i * B < seq_lens[n]; ++i) page_table[n * max_pages + i] = order[next++];
      for (int64_t j = 0; j < seq_lens[n]; ++j) {
        const int64_t s = cu_k[n] + j, page = page_table[n * max_pages + j / B], slot = j % B;
        for (int c = 0; c < g.index_dim; ++c) x_pages.set((page * B + slot) * g.index_dim + c, ki.get(s * g.index_dim + c));
        for (int r = 0; r < g.groups; ++r) {
          for (int c = 0; c < g.head_dim; ++c) {
            const int64_t to = ((page * g.groups + r) * B + slot) * g.head_dim + c;
            k_pages.set(to, k.get((s * g.groups + r) * g.head_dim + c));
            v_pages.set(to, v.get((s * g.groups + r) * g.head_dim + c));
          }
        }
      }
    }
  }
};

// One Philox block gives two normal numbers (Box-Muller): tests spend much of their time here.
inline void fill_normal(Buffer& buffer, uint64_t seed, uint64_t stream, double std = 1.0) {
  const Philox rng(seed, stream);
  const int64_t count = buffer.tensor().numel();
  for (int64_t i = 0; i < count; i += 2) {
    const auto words = rng.block(i);
    const float radius = static_cast<float>(std) * std::sqrt(-2.0f * std::log((words[0] + 1.0f) * 0x1p-32f));
    const float angle = 6.2831853f * (words[1] * 0x1p-32f);
    buffer.set(i, radius * std::cos(angle));
    if (i + 1 < count) buffer.set(i + 1, radius * std::sin(angle));
  }
}

// Unit-variance normal inputs. Sequences with k = 0 and q > 0 are unused slots.
inline Data make_data(const MsaGeometry& g, const std::vector<Lengths>& lengths, DType dtype, uint64_t seed,
                      double q_std = 1.0) {
  Data d{.g = g, .seed = seed};
  for (const Lengths& l : lengths) {
    d.cu_q.push_back(d.cu_q.back() + l.q);
    d.cu_k.push_back(d.cu_k.back() + l.k);
    d.seq_lens.push_back(l.k);
  }
  d.q = Buffer(dtype, {d.T(), g.heads(), g.head_dim});
  d.k = Buffer(dtype, {d.S(), g.groups, g.head_dim});
  d.v = Buffer(dtype, {d.S(), g.groups, g.head_dim});
  d.qi = Buffer(dtype, {d.T(), g.groups, g.index_dim});
  d.ki = Buffer(dtype, {d.S(), g.index_dim});
  fill_normal(d.q, seed, 0, q_std);
  fill_normal(d.k, seed, 1);
  fill_normal(d.v, seed, 2);
  fill_normal(d.qi, seed, 3);
  fill_normal(d.ki, seed, 4);
  d.fill_pages();
  return d;
}

// A workspace of exactly the planned size, filled with bytes that read as NaN.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) : data_(static_cast<char*>(std::aligned_alloc(256, (bytes + 511) / 256 * 256))) {
    std::fill_n(data_, (bytes + 511) / 256 * 256, static_cast<char>(0xff));
  }
  ~Workspace() { std::free(data_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* get() const { return data_; }

 private:
  char* data_;
};

}  // namespace m3::msa_test
