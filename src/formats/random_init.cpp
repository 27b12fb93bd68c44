#include "formats/random_init.h"

#include <algorithm>

#include "base/bf16.h"
#include "base/check.h"
#include "base/rng.h"
#include "base/threads.h"
#include "formats/checkpoint.h"

namespace m3 {

uint64_t name_stream(std::string_view name) {  // FNV-1a, 64 bits
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return hash;
}

float normal_at(uint64_t seed, uint64_t stream, int64_t index) {
  constexpr uint64_t kWordsPerNormal = 4;  // Philox::normal draws two 64-bit uniforms
  return static_cast<float>(Philox(seed, stream, static_cast<uint64_t>(index) * kWordsPerNormal).normal());
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
    const uint64_t stream = name_stream(tensor.name);
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(std * normal_at(seed, stream, begin + static_cast<int64_t>(i)));
    }
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
