// The cache of one model: pages of one block of positions. One page id addresses the keys, values and
// index keys of that block in every layer, so copying, trimming or sharing a page moves all of them
// (msa.md §6). Which pages are free is the caller's business (engine/page_cache.h).
//
// Lanes are laid out layer by layer, [P, R, B, D] and [P, B, X]; on the CPU memory that no page was
// written to costs nothing.
#pragma once
#include <span>
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
  int64_t page_bytes() const { return page_bytes_; }  // of all lanes

  // All lanes of one page, for copy on write.
  void copy_page(int32_t from, int32_t to, Stream stream = {});

  // All lanes of a page as page_bytes() bytes of host memory, in the order of kv_lanes.h, and back. Asynchronous on the
  // stream where the cache lies on a GPU.
  void read_page(int32_t page, std::span<std::byte> bytes, Stream stream = {}) const;
  void write_page(int32_t page, std::span<const std::byte> bytes, Stream stream = {});

  static int64_t bytes(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index = true);

 private:
  template <typename Visit>
  void for_each_lane(const Visit& visit) const;

  int64_t num_pages_;
  int page_tokens_;
  int64_t page_bytes_ = 0;
  Arena arena_;
  std::vector<KvLayer> layers_;
};

}  // namespace m3
