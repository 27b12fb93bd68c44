#include "ops/common/msa_keys.h"

namespace m3 {

void msa_check_tensor(const char* name, const Tensor& tensor, const Shape& want, Device device) {
  M3_CHECK(tensor.defined() || want.numel() == 0, "{} is absent, want {}", name, want.str());
  M3_CHECK(tensor.shape() == want, "{} must be {}, got {}", name, want.str(), tensor.shape().str());
  M3_CHECK(tensor.device() == device, "{} lies on {}, the plan was made for {}", name, tensor.device().str(),
           device.str());
}

void msa_check_float(const char* name, const Tensor& tensor) {
  M3_CHECK(tensor.dtype() == DType::kF32 || tensor.dtype() == DType::kBF16, "{} holds {}, want f32 or bf16", name,
           dtype_name(tensor.dtype()));
}

MsaKeys::MsaKeys(const char* name, const MsaBatch& batch, const Tensor& tensor, int block, int heads, int dim)
    : batch_(batch),
      data_(static_cast<const char*>(tensor.data())),
      dtype_(tensor.dtype()),
      block_(block),
      dim_(dim) {
  msa_check_float(name, tensor);
  const bool paged = batch.layout == KvLayout::kPaged, one_head = heads == 0;
  const int rank = (paged ? 3 : 2) + (one_head ? 0 : 1);
  M3_CHECK(tensor.rank() == rank, "{} must have {} axes ({}), got {}", name, rank, paged ? "paged" : "packed",
           tensor.shape().str());
  Shape want{tensor.dim(0)};
  if (!one_head) want.push_back(heads);
  if (paged) want.push_back(block);  // a page is a block: another page size is refused (msa.md §6)
  want.push_back(dim);
  M3_CHECK(tensor.shape() == want, "{} must be {}, got {}", name, want.str(), tensor.shape().str());
  if (!paged && batch.num_seqs > 0) {
    M3_CHECK(tensor.dim(0) == batch.cu_k[batch.num_seqs], "{} has {} rows, cu_k ends at {}", name, tensor.dim(0),
             batch.cu_k[batch.num_seqs]);
  }
  const int64_t num_heads = one_head ? 1 : heads;
  token_stride_ = paged ? dim : num_heads * dim;
  head_stride_ = paged ? int64_t{block} * dim : dim;
  page_stride_ = num_heads * block * dim;
  num_pages_ = paged ? tensor.dim(0) : 0;
}

}  // namespace m3
