// Test support: a paged batch with random contents, on the host and on the GPU. Everything that a row
// must not see is NaN: unused pages, the tails of last pages, page table entries behind the end are
// garbage ids.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/rng.h"
#include "ops/common/msa_types.h"
#include "tensor/device.h"

namespace m3 {

// Owns host bytes and a copy of them on the GPU.
class Mirror {
 public:
  Mirror() = default;
  Mirror(DType dtype, Shape shape, bool on_device) : dtype_(dtype), shape_(shape) {
    host_.resize(std::max<int64_t>(1, shape.numel() * dtype_bytes(dtype)));
    if (on_device) device_ = device_malloc(static_cast<int64_t>(host_.size()), Device{DeviceKind::kCuda, 0});
  }
  ~Mirror() { release(); }
  Mirror(Mirror&& other) noexcept { *this = std::move(other); }
  Mirror& operator=(Mirror&& other) noexcept {
    if (this != &other) {
      release();
      host_ = std::move(other.host_), dtype_ = other.dtype_, shape_ = other.shape_;
      device_ = std::exchange(other.device_, nullptr);
    }
    return *this;
  }

  Tensor host() { return Tensor(host_.data(), dtype_, shape_); }
  Tensor device() { return Tensor(device_, dtype_, shape_, Device{DeviceKind::kCuda, 0}); }
  template <typename T> T* ptr() { return reinterpret_cast<T*>(host_.data()); }
  template <typename T> const T* device_ptr() const { return static_cast<const T*>(device_); }
  template <typename T> T* device_ptr() { return static_cast<T*>(device_); }
  void fill_bytes(int value) { std::fill(host_.begin(), host_.end(), static_cast<char>(value)); }
  void upload() { copy(host(), device()); }
  void download() {
    copy(device(), host());
    synchronize({}, Device{DeviceKind::kCuda, 0});
  }

 private:
  void release() {
    if (device_ != nullptr) device_free(device_, Device{DeviceKind::kCuda, 0});
    device_ = nullptr;
  }
  std::vector<char> host_;
  DType dtype_ = DType::kF32;
  Shape shape_;
  void* device_ = nullptr;
};

enum class PagedData {
  kNormal,      // unit variance
  kPeaked,      // queries 4 x louder
  kInteger,     // -1, 0, 1: exact sums, many ties
  kCorrelated,  // index keys share a direction, so scores differ little between blocks
  kBad,         // some index keys and index queries NaN or infinite
};

struct PagedSpec {
  MsaGeometry geometry = msa_geometry_m3();
  std::vector<int> lens, q_lens;  // lens count the new tokens; 0 with q_len > 0 is an unused slot
  PagedData data = PagedData::kNormal;
  uint64_t seed = 1;
  uint64_t page_seed = 1;  // another permutation of the physical pages, the same contents
  bool attention = true;   // fill q, k, v too

  std::string str() const {
    std::string text = fmt::format("seed {} data {} groups {} heads {} topk {} lens", seed, static_cast<int>(data),
                                   geometry.groups, geometry.heads_per_group, geometry.topk);
    for (size_t i = 0; i < lens.size(); ++i) text += fmt::format(" {}/{}", q_lens[i], lens[i]);
    return text;
  }
};

// Values from a table of unit normals; a hash of (seed, tensor, position) picks the entry, so contents
// do not depend on where a page lies.
class ValueSource {
 public:
  explicit ValueSource(uint64_t seed) : seed_(seed) {
    if (table().empty()) {
      Philox rng(20261130);
      table().resize(1 << 16);
      for (float& value : table()) value = static_cast<float>(rng.normal());
    }
  }
  float normal(uint64_t tensor, uint64_t index) const { return table()[hash(tensor, index) & 0xffff]; }
  uint64_t hash(uint64_t tensor, uint64_t index) const {
    uint64_t x = seed_ * 0x9E3779B97F4A7C15ull + tensor * 0xD1B54A32D192ED03ull + index;  // splitmix64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

 private:
  static std::vector<float>& table() {
    static std::vector<float> values;
    return values;
  }
  uint64_t seed_;
};

class PagedCase {
 public:
  explicit PagedCase(const PagedSpec& spec, bool on_device = true) : spec_(spec) {
    const MsaGeometry& g = spec.geometry;
    const int num = static_cast<int>(spec.lens.size());
    cu_q_ = Mirror(DType::kI32, {num + 1}, on_device);
    seq_lens_ = Mirror(DType::kI32, {std::max(1, num)}, on_device);
    int64_t pages = 0;
    for (int n = 0; n < num; ++n) {
      cu_q_.ptr<int32_t>()[n] = n == 0 ? 0 : cu_q_.ptr<int32_t>()[n - 1] + spec.q_lens[n - 1];
      seq_lens_.ptr<int32_t>()[n] = spec.lens[n];
      const int64_t own = (spec.lens[n] + g.block - 1) / g.block;
      pages += own;
      max_pages_ = std::max(max_pages_, own);
      max_q_len_ = std::max<int64_t>(max_q_len_, spec.q_lens[n]);
    }
    cu_q_.ptr<int32_t>()[num] = num == 0 ? 0 : cu_q_.ptr<int32_t>()[num - 1] + spec.q_lens[num - 1];
    num_queries_ = cu_q_.ptr<int32_t>()[num];
    num_pages_ = pages + 3;  // some that nobody owns
    page_table_ = Mirror(DType::kI32, {std::max(1, num), max_pages_ + 1}, on_device);
    place_pages();
    fill();
    if (on_device) {
      for (Mirror* m : {&cu_q_, &seq_lens_, &page_table_, &qi_, &x_, &q_, &k_, &v_}) m->upload();
    }
  }

  const PagedSpec& spec() const { return spec_; }
  int num_seqs() const { return static_cast<int>(spec_.lens.size()); }
  int64_t num_queries() const { return num_queries_; }
  int64_t num_pages() const { return num_pages_; }
  int64_t max_blocks() const { return max_pages_; }
  int64_t max_q_len() const { return std::max<int64_t>(1, max_q_len_); }
  int64_t page_stride() const { return max_pages_ + 1; }
  Mirror& qi() { return qi_; }
  Mirror& x() { return x_; }
  Mirror& q() { return q_; }
  Mirror& k() { return k_; }
  Mirror& v() { return v_; }
  Mirror& cu_q() { return cu_q_; }
  Mirror& seq_lens() { return seq_lens_; }
  Mirror& page_table() { return page_table_; }

  MsaBatch host_batch() { return batch(cu_q_.ptr<int32_t>(), seq_lens_.ptr<int32_t>(), page_table_.ptr<int32_t>()); }
  MsaBatch device_batch() {
    return batch(cu_q_.device_ptr<int32_t>(), seq_lens_.device_ptr<int32_t>(), page_table_.device_ptr<int32_t>());
  }
  // Sequence and position of query row t.
  std::pair<int, int64_t> row(int64_t t) {
    const int32_t* begin = cu_q_.ptr<int32_t>();
    const int n = static_cast<int>(std::upper_bound(begin, begin + num_seqs() + 1, t) - begin) - 1;
    return {n, seq_lens_.ptr<int32_t>()[n] - (begin[n + 1] - t)};
  }

 private:
  MsaBatch batch(const int32_t* cu_q, const int32_t* seq_lens, const int32_t* page_table) {
    MsaBatch b;
    b.layout = KvLayout::kPaged;
    b.num_seqs = num_seqs(), b.num_queries = num_queries_;
    b.cu_q = cu_q, b.seq_lens = seq_lens, b.page_table = page_table;
    b.max_pages = page_stride();
    b.max_q_len = max_q_len(), b.max_k_len = max_pages_ * spec_.geometry.block;
    return b;
  }

  void place_pages() {
    std::vector<int32_t> order(num_pages_);
    std::iota(order.begin(), order.end(), 0);
    Philox rng(spec_.page_seed, 7);
    for (int64_t i = num_pages_ - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    int64_t next = 0;
    for (int n = 0; n < num_seqs(); ++n) {
      const int64_t own = (spec_.lens[n] + spec_.geometry.block - 1) / spec_.geometry.block;
      for (int64_t b = 0; b < page_stride(); ++b) {
        page_table_.ptr<int32_t>()[n * page_stride() + b] = b < own ? order[next++] : 0x7ffffff0;
      }
    }
  }

  float key_value(const ValueSource& source, uint64_t tensor, int n, int64_t position, int64_t index) const {
    const float value = source.normal(tensor + 16 * (n + 1), static_cast<uint64_t>(position * 1024 + index));
    return spec_.data == PagedData::kInteger ? std::round(std::clamp(value, -1.0f, 1.0f)) : value;
  }

  void fill() {
    const MsaGeometry& g = spec_.geometry;
    const ValueSource source(spec_.seed);
    const bool on_device = page_table_.device_ptr<int32_t>() != nullptr;
    const bf16 nan(std::numeric_limits<float>::quiet_NaN());
    qi_ = Mirror(DType::kBF16, {num_queries_, g.groups, g.index_dim}, on_device);
    q_ = Mirror(DType::kBF16, {num_queries_, g.heads(), g.head_dim}, on_device);
    x_ = Mirror(DType::kBF16, {num_pages_, g.block, g.index_dim}, on_device);
    const int64_t kv_pages = spec_.attention ? num_pages_ : 1;
    k_ = Mirror(DType::kBF16, {kv_pages, g.groups, g.block, g.head_dim}, on_device);
    v_ = Mirror(DType::kBF16, {kv_pages, g.groups, g.block, g.head_dim}, on_device);
    for (Mirror* m : {&x_, &k_, &v_}) std::fill_n(m->ptr<bf16>(), m->host().numel(), nan);

    const float loud = spec_.data == PagedData::kPeaked ? 4.0f : 1.0f;
    for (int64_t i = 0; i < qi_.host().numel(); ++i) qi_.ptr<bf16>()[i] = bf16(key_value(source, 1, -1, i, 0));
    for (int64_t i = 0; i < q_.host().numel(); ++i) q_.ptr<bf16>()[i] = bf16(loud * key_value(source, 2, -1, i, 0));
    for (int n = 0; n < num_seqs(); ++n) {
      for (int64_t j = 0; j < spec_.lens[n]; ++j) {
        const int64_t page = page_table_.ptr<int32_t>()[n * page_stride() + j / g.block], slot = j % g.block;
        bf16* x = x_.ptr<bf16>() + (page * g.block + slot) * g.index_dim;
        for (int c = 0; c < g.index_dim; ++c) {
          float value = key_value(source, 3, n, j, c);
          if (spec_.data == PagedData::kCorrelated) value = 0.05f * value + source.normal(4, c);
          x[c] = bf16(value);
        }
        if (spec_.data == PagedData::kBad) {
          const uint64_t dice = source.hash(5 + n, j) % 64;
          if (dice == 0) x[dice % g.index_dim] = nan;
          if (dice == 1) x[3] = bf16(std::numeric_limits<float>::infinity());
          if (dice == 2) x[5] = bf16(-std::numeric_limits<float>::infinity());
          if (j / g.block == 1) x[0] = nan;  // a whole block
        }
        if (!spec_.attention) continue;
        for (int r = 0; r < g.groups; ++r) {
          for (int c = 0; c < g.head_dim; ++c) {
            const int64_t at = ((page * g.groups + r) * g.block + slot) * g.head_dim + c;
            k_.ptr<bf16>()[at] = bf16(key_value(source, 8, n, j, r * g.head_dim + c));
            v_.ptr<bf16>()[at] = bf16(key_value(source, 9, n, j, r * g.head_dim + c));
          }
        }
      }
    }
    if (spec_.data == PagedData::kBad) {
      for (int64_t t = 0; t < num_queries_; ++t) {
        if (source.hash(6, t) % 3 == 0) qi_.ptr<bf16>()[(t * g.groups + t % g.groups) * g.index_dim] = nan;
      }
    }
  }

  PagedSpec spec_;
  int64_t num_queries_ = 0, num_pages_ = 0, max_pages_ = 0, max_q_len_ = 0;
  Mirror cu_q_, seq_lens_, page_table_, qi_, x_, q_, k_, v_;
};

}  // namespace m3
