// Copies of msa_test_data.h inputs on a GPU. Test code only.
#pragma once
#include <algorithm>
#include <vector>

#include "ops/common/msa_test_data.h"
#include "tensor/device.h"

namespace m3::msa_test {

inline constexpr Device kGpu{DeviceKind::kCuda, 0};

// A tensor in device memory that the object owns.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(DType dtype, Shape shape)
      : tensor_(device_malloc(std::max<int64_t>(256, shape.numel() * dtype_bytes(dtype)), kGpu), dtype, shape, kGpu) {}
  explicit DeviceTensor(const Tensor& host) : DeviceTensor(host.dtype(), host.shape()) { copy(host, tensor_); }
  template <typename T>
  explicit DeviceTensor(const std::vector<T>& values)
      : DeviceTensor(DTypeOf<T>::value, {static_cast<int64_t>(values.size())}) {
    copy(Tensor(const_cast<T*>(values.data()), DTypeOf<T>::value, tensor_.shape()), tensor_);
  }
  ~DeviceTensor() { if (tensor_.defined()) device_free(tensor_.data(), kGpu); }
  DeviceTensor(DeviceTensor&& other) noexcept : tensor_(std::exchange(other.tensor_, Tensor())) {}
  DeviceTensor& operator=(DeviceTensor&& other) noexcept {
    std::swap(tensor_, other.tensor_);
    return *this;
  }

  const Tensor& tensor() const { return tensor_; }
  template <typename T> T* ptr() const { return static_cast<T*>(tensor_.data()); }
  // Every byte 0xff: NaN as a float, -1 as an id.
  void poison() const {
    const std::vector<uint8_t> bytes(std::max<int64_t>(1, tensor_.bytes()), 0xff);
    const Shape shape{tensor_.bytes()};
    copy(Tensor(const_cast<uint8_t*>(bytes.data()), DType::kU8, shape), Tensor(tensor_.data(), DType::kU8, shape, kGpu));
    synchronize({}, kGpu);
  }
  template <typename T> std::vector<T> download() const {
    std::vector<T> values(tensor_.numel());
    copy(tensor_, Tensor(values.data(), tensor_.dtype(), tensor_.shape()));
    synchronize({}, kGpu);
    return values;
  }

 private:
  Tensor tensor_;
};

struct DeviceData {
  DeviceTensor cu_q, cu_k, seq_lens, page_table, q, k, v, qi, ki, k_pages, v_pages, x_pages;
  MsaBatch packed, paged;

  explicit DeviceData(const Data& d)
      : cu_q(d.cu_q), cu_k(d.cu_k), seq_lens(d.seq_lens), page_table(d.page_table), q(d.q.tensor()), k(d.k.tensor()),
        v(d.v.tensor()), qi(d.qi.tensor()), ki(d.ki.tensor()), k_pages(d.k_pages.tensor()),
        v_pages(d.v_pages.tensor()), x_pages(d.x_pages.tensor()), packed(d.packed()), paged(d.paged()) {
    for (MsaBatch* batch : {&packed, &paged}) {
      for (int n = 0; n < d.num_seqs(); ++n) {
        batch->max_q_len = std::max<int64_t>(batch->max_q_len, d.cu_q[n + 1] - d.cu_q[n]);
        batch->max_k_len = std::max<int64_t>(batch->max_k_len, d.seq_lens[n]);
      }
      batch->cu_q = cu_q.ptr<int32_t>();
    }
    packed.cu_k = cu_k.ptr<int32_t>();
    paged.seq_lens = seq_lens.ptr<int32_t>();
    paged.page_table = page_table.ptr<int32_t>();
    synchronize({}, kGpu);
  }
};

#define M3_SKIP_WITHOUT_GPU()                                                                     \
  do {                                                                                            \
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no GPU: " << cuda_unavailable_reason();         \
  } while (0)

}  // namespace m3::msa_test
