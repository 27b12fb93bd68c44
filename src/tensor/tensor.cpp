#include "tensor/tensor.h"

namespace m3 {

std::string Device::str() const { return is_cpu() ? "cpu" : fmt::format("cuda:{}", index); }

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t dim : dims) push_back(dim);
}

void Shape::push_back(int64_t dim) {
  M3_CHECK(rank_ < kMaxRank, "a shape has at most {} axes", kMaxRank);
  M3_CHECK(dim >= 0, "an axis has {} elements", dim);
  dims_[rank_++] = dim;
}

int64_t Shape::numel() const {
  int64_t count = 1;
  for (int axis = 0; axis < rank_; ++axis) {
    M3_CHECK(!__builtin_mul_overflow(count, dims_[axis], &count), "shape {} overflows 64 bits", str());
  }
  return count;
}

bool Shape::operator==(const Shape& other) const {
  if (rank_ != other.rank_) return false;
  for (int axis = 0; axis < rank_; ++axis) {
    if (dims_[axis] != other.dims_[axis]) return false;
  }
  return true;
}

std::string Shape::str() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) text += fmt::format("{}{}", axis ? ", " : "", dims_[axis]);
  return text + "]";
}

Shape Shape::without_first() const {
  M3_CHECK(rank_ > 0, "a scalar has no first axis");
  Shape shape;
  for (int axis = 1; axis < rank_; ++axis) shape.push_back(dims_[axis]);
  return shape;
}

Tensor Tensor::reshape(Shape shape) const {
  M3_CHECK(shape.numel() == numel(), "cannot view {} as {}", shape_.str(), shape.str());
  return Tensor(data_, dtype_, shape, device_);
}

Tensor Tensor::rows(int64_t begin, int64_t end) const {
  M3_CHECK(rank() > 0 && 0 <= begin && begin <= end && end <= dim(0), "rows [{}, {}) of {}", begin, end,
           shape_.str());
  Shape shape;
  shape.push_back(end - begin);
  int64_t row = 1;
  for (int axis = 1; axis < rank(); ++axis) {
    shape.push_back(dim(axis));
    row *= dim(axis);
  }
  return Tensor(static_cast<char*>(data_) + begin * row * dtype_bytes(dtype_), dtype_, shape, device_);
}

Tensor Tensor::operator[](int64_t index) const {
  const Tensor row = rows(index, index + 1);
  return Tensor(row.data(), dtype_, shape_.without_first(), device_);
}

}  // namespace m3
