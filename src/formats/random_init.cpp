#include "formats/random_init.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "base/bf16.h"
#include "base/check.h"
#include "base/rng.h"
#include "base/threads.h"
#include "formats/checkpoint.h"

namespace m3 {

namespace {

uint64_t fnv1a(std::string_view text) {  // 64 bits
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

// Normals 2 * pair and 2 * pair + 1 from one Philox block: both results of Box-Muller.
std::array<float, 2> normal_pair(const Philox& stream, uint64_t pair) {
  const auto w = stream.block(pair);
  const auto uniform = [](uint32_t low, uint32_t high) {  // [0, 1), 53 bits
    return static_cast<double>((uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
  };
  const double radius = std::sqrt(-2.0 * std::log(1.0 - uniform(w[0], w[1])));
  const double angle = 2.0 * std::numbers::pi * uniform(w[2], w[3]);
  return {static_cast<float>(radius * std::cos(angle)), static_cast<float>(radius * std::sin(angle))};
}

}  // namespace

void fill_normal(uint64_t seed, std::string_view name, int64_t begin, std::span<float> values) {
  const Philox stream(seed, fnv1a(name));
  const uint64_t first = static_cast<uint64_t>(begin), end = first + values.size();
  for (uint64_t pair = first / 2; pair * 2 < end; ++pair) {
    const std::array<float, 2> two = normal_pair(stream, pair);
    for (uint64_t i = std::max(pair * 2, first); i < std::min(pair * 2 + 2, end); ++i) values[i - first] = two[i & 1];
  }
}

InitScheme init_normal(uint64_t seed, double std) {
  return [seed, std](const TensorEntry& tensor, int64_t begin, std::span<float> values) {
    switch (tensor.kind) {
      case TensorKind::kNorm:
      case TensorKind::kBias:
      case TensorKind::kRouterBias: std::fill(values.begin(), values.end(), 0.0f); return;
      case TensorKind::kLayerNorm: std::fill(values.begin(), values.end(), 1.0f); return;
      default: break;
    }
    fill_normal(seed, tensor.name, begin, values);
    for (float& value : values) value *= static_cast<float>(std);
  };
}

void write_random_checkpoint(const std::string& config_json, const std::string& config_name,
                             const std::filesystem::path& folder, const InitScheme& scheme,
                             const std::vector<std::filesystem::path>& extra_files, Progress::Mode progress_mode) {
  const ModelConfig config = parse_model_config(config_json, config_name);
  M3_CHECK(config.quantization == Quantization::kNone,
           "{}: quantization_config is present, but a random checkpoint is written in bf16; remove it", config_name);
  const std::vector<TensorEntry> table = tensor_table(config);
  CheckpointWriter writer(folder, config_json, table);
  for (const auto& file : extra_files) writer.copy_file(file);
  Progress progress("writing", total_bytes(table), "bytes", progress_mode);

  constexpr int64_t kPiece = 1 << 20;  // elements in memory at once
  std::vector<float> values(kPiece);
  std::vector<bf16> rounded(kPiece);
  int64_t done = 0;
  for (const TensorEntry& tensor : writer.order()) {
    const int64_t numel = tensor.shape.numel();
    for (int64_t begin = 0; begin < numel; begin += kPiece) {
      const int64_t count = std::min(kPiece, numel - begin);
      parallel_for(count, [&](int64_t first, int64_t last) {
        scheme(tensor, begin + first, {values.data() + first, static_cast<size_t>(last - first)});
        for (int64_t i = first; i < last; ++i) rounded[i] = bf16(values[i]);
      });
      const bool wide = tensor.dtype == DType::kF32;
      const std::span<const std::byte> bytes = wide ? std::as_bytes(std::span(values.data(), count))
                                                    : std::as_bytes(std::span(rounded.data(), count));
      writer.write(tensor.name, bytes);
      done += static_cast<int64_t>(bytes.size());
      progress.update(done);
    }
  }
  progress.finish();
  writer.finish();
}

}  // namespace m3
