#include "model/kv_cache.h"

namespace m3 {

namespace {

std::vector<KvLayer> carve(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index, Arena& arena) {
  std::vector<KvLayer> layers(config.num_layers);
  for (int i = 0; i < config.num_layers; ++i) {
    KvLayer& layer = layers[i];
    const Shape kv = {num_pages, config.num_kv_heads, config.block_size, config.head_dim};
    layer.k_PRBD = arena.alloc("keys", dtype, kv);
    layer.v_PRBD = arena.alloc("values", dtype, kv);
    if (config.is_sparse[i] && with_index) {
      layer.x_PBX = arena.alloc("index keys", dtype, {num_pages, config.block_size, config.index_dim});
    }
  }
  return layers;
}

}  // namespace

KvCache::KvCache(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index, Device device)
    : num_pages_(num_pages), page_tokens_(config.block_size) {
  M3_CHECK(num_pages > 0, "a cache needs at least one page, got {}", num_pages);
  arena_ = Arena("KV cache", bytes(config, num_pages, dtype, with_index), device);
  layers_ = carve(config, num_pages, dtype, with_index, arena_);
}

void KvCache::copy_page(int32_t from, int32_t to, Stream stream) {
  M3_CHECK(0 <= from && from < num_pages_ && 0 <= to && to < num_pages_, "pages {} -> {} of {}", from, to, num_pages_);
  for (const KvLayer& layer : layers_) {
    for (const Tensor& lane : {layer.k_PRBD, layer.v_PRBD, layer.x_PBX}) {
      if (lane.defined()) copy(lane[from], lane[to], stream);
    }
  }
}

int64_t KvCache::bytes(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index) {
  Arena measuring = Arena::measuring("KV cache");
  carve(config, num_pages, dtype, with_index, measuring);
  return measuring.peak_bytes();
}

}  // namespace m3
