// Tensor: a plain contiguous row-major view. It does not own memory (an Arena or a file map does), is
// cheap to copy, and a const Tensor does not make its elements const. A default Tensor is "absent".
#pragma once
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "tensor/dtype.h"

namespace m3 {

enum class DeviceKind : uint8_t { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  bool operator==(const Device&) const = default;
  bool is_cpu() const { return kind == DeviceKind::kCpu; }
  std::string str() const;
};

class Shape {
 public:
  static constexpr int kMaxRank = 6;
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[axis]; }
  int64_t numel() const;
  bool operator==(const Shape& other) const;
  std::string str() const;  // "[3, 128]"

  void push_back(int64_t dim);
  Shape without_first() const;

 private:
  std::array<int64_t, kMaxRank> dims_ = {};
  int rank_ = 0;
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(void* data, DType dtype, Shape shape, Device device = {})
      : data_(data), dtype_(dtype), shape_(shape), device_(device) {}

  bool defined() const { return data_ != nullptr; }
  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  int rank() const { return shape_.rank(); }
  int64_t dim(int axis) const { return shape_[axis]; }
  int64_t numel() const { return shape_.numel(); }
  int64_t bytes() const { return numel() * dtype_bytes(dtype_); }
  Device device() const { return device_; }

  void* data() const { return data_; }
  // The elements as T; throws if the tensor holds another type or lies on a GPU.
  template <typename T> T* ptr() const {
    M3_CHECK(dtype_ == DTypeOf<T>::value, "tensor {} holds {}, asked for {}", shape_.str(),
             dtype_name(dtype_), dtype_name(DTypeOf<T>::value));
    M3_CHECK(device_.is_cpu(), "tensor {} lies on {}, asked for a host pointer", shape_.str(), device_.str());
    return static_cast<T*>(data_);
  }

  Tensor reshape(Shape shape) const;                    // same number of elements
  Tensor rows(int64_t begin, int64_t end) const;        // [begin, end) of axis 0
  Tensor operator[](int64_t index) const;               // axis 0 removed

 private:
  void* data_ = nullptr;
  DType dtype_ = DType::kF32;
  Shape shape_;
  Device device_;
};

}  // namespace m3
