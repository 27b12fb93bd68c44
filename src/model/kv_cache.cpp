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
  for_each_lane([this](const Tensor& lane) { page_bytes_ += lane[0].bytes(); });
}

template <typename Visit>
void KvCache::for_each_lane(const Visit& visit) const {
  for (const KvLayer& layer : layers_) {
    for (const Tensor& lane : {layer.k_PRBD, layer.v_PRBD, layer.x_PBX}) {
      if (lane.defined()) visit(lane);
    }
  }
}

void KvCache::copy_page(int32_t from, int32_t to, Stream stream) {
  M3_CHECK(0 <= from && from < num_pages_ && 0 <= to && to < num_pages_, "pages {} -> {} of {}", from, to, num_pages_);
  for_each_lane([&](const Tensor& lane) { copy(lane[from], lane[to], stream); });
}

void KvCache::read_page(int32_t page, std::span<std::byte> bytes, Stream stream) const {
  M3_CHECK(0 <= page && page < num_pages_ && std::ssize(bytes) == page_bytes_, "page {} of {} to {} bytes, it has {}", page,
           num_pages_, bytes.size(), page_bytes_);
  std::byte* to = bytes.data();
  for_each_lane([&](const Tensor& lane) {
    copy(lane[page], {to, lane.dtype(), lane[page].shape()}, stream);
    to += lane[page].bytes();
  });
}

void KvCache::write_page(int32_t page, std::span<const std::byte> bytes, Stream stream) {
  M3_CHECK(0 <= page && page < num_pages_ && std::ssize(bytes) == page_bytes_, "page {} of {} from {} bytes, it has {}", page,
           num_pages_, bytes.size(), page_bytes_);
  auto* from = const_cast<std::byte*>(bytes.data());
  for_each_lane([&](const Tensor& lane) {
    copy({from, lane.dtype(), lane[page].shape()}, lane[page], stream);
    from += lane[page].bytes();
  });
}

int64_t KvCache::bytes(const TextConfig& config, int64_t num_pages, DType dtype, bool with_index) {
  Arena measuring = Arena::measuring("KV cache");
  carve(config, num_pages, dtype, with_index, measuring);
  return measuring.peak_bytes();
}

}  // namespace m3
