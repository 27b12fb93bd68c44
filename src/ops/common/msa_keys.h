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

  struct Rows {
    const void* data;     // row of the block's first position
    int64_t stride;       // elements from one position to the next
  };
  Rows block_rows(int seq, int64_t block_id, int head) const {
    return {row(seq, block_id * block_, head), token_stride_};
  }
  // One position of a sequence.
  const void* row(int seq, int64_t position, int head) const {
    int64_t element;
    if (batch_.layout == KvLayout::kPaged) {
      const int64_t page = batch_.page_table[seq * batch_.max_pages + position / block_];
      element = page * page_stride_ + head * head_stride_ + position % block_ * token_stride_;
    } else {
      element = (batch_.k_begin(seq) + position) * token_stride_ + head * head_stride_;
    }
    return data_ + element * dtype_bytes(dtype_);
  }

 private:
  const MsaBatch& batch_;
  const char* data_;
  DType dtype_;
  int block_, dim_;
  int64_t token_stride_, head_stride_, page_stride_;
};

// Element `index` of a row, widened.
inline double load_element(const void* row, DType dtype, int64_t index) {
  return dtype == DType::kBF16 ? to_float(static_cast<const bf16*>(row)[index]) : static_cast<const float*>(row)[index];
}

// Tensor checks shared by the MSA operators: each throws and names the tensor.
void msa_check_tensor(const char* name, const Tensor& tensor, const Shape& want, Device device);
void msa_check_float(const char* name, const Tensor& tensor);  // f32 or bf16

}  // namespace m3
