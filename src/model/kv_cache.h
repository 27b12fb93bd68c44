// The cache of one model: pages of one block of positions. One page id addresses the keys, values and
// index keys of that block in every layer, so copying, trimming or sharing a page moves all of them
// (msa.md §6). Which pages are free is the caller's business (engine/page_cache.h).
//
// Lanes are laid out layer by layer, [P, R, B, D] and [P, B, X]; on the CPU memory that no page was
// written to costs nothing.
#pragma once
#include <vector>

#include "formats/config.h"
#include "tensor/arena.h"
#include "tensor/device.h"

namespace m3 {

struct KvLayer {
  Tensor k_PRBD, v_PRBD;
  Tensor x_PBX;  // absent where the layer has no index branch in use
};

class KvCache {
 public:
  // `with_index`: false where the attention in use never reads index keys (full, window).
  KvCache(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index = true, Device device = {});

  int64_t num_pages() const { return num_pages_; }
  int page_tokens() const { return page_tokens_; }
  const KvLayer& layer(int index) const { return layers_[index]; }
  int64_t page_bytes() const { return num_pages_ > 0 ? arena_.used_bytes() / num_pages_ : 0; }

  // All lanes of one page, for copy on write.
  void copy_page(int32_t from, int32_t to, Stream stream = {});

  static int64_t bytes(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index = true);

 private:
  int64_t num_pages_;
  int page_tokens_;
  Arena arena_;
  std::vector<KvLayer> layers_;
};

}  // namespace m3
