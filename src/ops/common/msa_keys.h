// Where the rows of a block of keys lie, in both layouts: what kernels and references need to walk
// blocks by their logical number. Host side.
#pragma once
#include <algorithm>
#include <cstdint>

#include "ops/common/msa_types.h"

namespace m3 {

// One lane of a cache (K, V or the index keys): packed [S, heads, dim] or paged [P, heads, B, dim].
// Index keys have one head, whose axis does not exist in the tensor.
class MsaKeys {
 public:
  // Throws if the tensor's shape, type or device do not fit; `name` is for the message.
  MsaKeys(const char* name, const MsaBatch& batch, const Tensor& tensor, int block, int heads, int dim);

  DType dtype() const { return dtype_; }
  int dim() const { return dim_; }

  // Position `position` of sequence `seq`, which must exist (position < k_len).
  const void* row(int seq, int64_t position, int head) const {
    int64_t element;
    if (batch_.layout == KvLayout::kPaged) {
      const int64_t page = batch_.page_table[seq * batch_.max_pages + position / block_];
      M3_CHECK(page >= 0 && page < num_pages_, "sequence {}: page {} of position {} lies outside the cache's {} pages",
               seq, page, position, num_pages_);
      element = page * page_stride_ + head * head_stride_ + position % block_ * token_stride_;
    } else {
      element = (batch_.k_begin(seq) + position) * token_stride_ + head * head_stride_;
    }
    return data_ + element * dtype_bytes(dtype_);
  }
  // `count` consecutive positions.
  void rows(int seq, int64_t begin, int count, int head, const void** out) const {
    const int64_t stride_bytes = token_stride_ * dtype_bytes(dtype_);
    for (int i = 0; i < count;) {
      const char* first = static_cast<const char*>(row(seq, begin + i, head));
      const int64_t run = batch_.layout == KvLayout::kPaged ? block_ - (begin + i) % block_ : count;
      for (int64_t end = std::min<int64_t>(count, i + run); i < end; ++i, first += stride_bytes) out[i] = first;
    }
  }

 private:
  const MsaBatch& batch_;
  const char* data_;
  DType dtype_;
  int block_, dim_;
  int64_t token_stride_, head_stride_, page_stride_, num_pages_;
};

// Element `index` of a row, widened.
inline double load_element(const void* row, DType dtype, int64_t index) {
  return dtype == DType::kBF16 ? to_float(static_cast<const bf16*>(row)[index]) : static_cast<const float*>(row)[index];
}

inline void load_row(const void* row, DType dtype, int count, double* out) {
  for (int c = 0; c < count; ++c) out[c] = load_element(row, dtype, c);
}

// Tensor checks shared by the MSA operators: each throws and names the tensor.
void msa_check_tensor(const char* name, const Tensor& tensor, const Shape& want, Device device);
void msa_check_float(const char* name, const Tensor& tensor);  // f32 or bf16

}  // namespace m3
