#include "train/init.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace m3::train {
namespace {

bool ends_with_any(const std::string& name, std::initializer_list<const char*> ends) {
  return std::any_of(ends.begin(), ends.end(),
                     [&](const char* end) { return name.ends_with(end); });
}

// Matrices that write to a residual stream.
bool is_output_matrix(const std::string& name) {
  return ends_with_any(
      name, {"self_attn.o_proj.weight", "mlp.down_proj.weight", "shared_experts.down_proj.weight",
             ".w2.weight", "self_attn.out_proj.weight", "mlp.fc2.weight"});
}

double fan_in_std(const TensorEntry& tensor, const InitConfig& init, const ModelConfig& config) {
  if (tensor.kind == TensorKind::kEmbedding) return init.embedding_std;
  if (tensor.kind == TensorKind::kHead) return init.head_std;
  double std = 1 / std::sqrt(static_cast<double>(tensor.shape.numel() / tensor.shape[0]));
  if (init.scale_residual && is_output_matrix(tensor.name)) {
    const int layers = tensor.is_vision() ? config.vision->num_layers : config.text.num_layers;
    std /= std::sqrt(2.0 * layers);
  }
  return std;
}

// The positional start of nano.md §2: one channel of the residual stream is the same for every
// token, and three frequencies of RoPE turn that constant into a key that a rotated query finds a
// fixed distance back.
class PositionalStart {
 public:
  PositionalStart(const TextConfig& text, double embedding_std) : text_(text) {
    M3_CHECK(text_.hidden_size > 1 && text_.heads_per_group() >= kHeads &&
                 text_.rotary_dim >= 2 * kFrequencies,
             "init.positional_start needs {} query heads in a group and rotary_dim >= {}; the "
             "model has {} and {}",
             kHeads, 2 * kFrequencies, text_.heads_per_group(), text_.rotary_dim);
    // The constant channel behind the norm of an embedding row: 3.784 for nano's 128 channels of
    // std 0.5.
    const double mean_square =
        (kConstant * kConstant + (text_.hidden_size - 1) * embedding_std * embedding_std) /
        text_.hidden_size;
    h0_ = kConstant / std::sqrt(mean_square);
  }

  void apply(const TensorEntry& tensor, int64_t begin, std::span<float> values) const {
    const auto each = [&](auto&& change) {
      const int64_t columns = tensor.shape.numel() / tensor.shape[0];
      for (size_t i = 0; i < values.size(); ++i) {
        const int64_t at = begin + static_cast<int64_t>(i);
        change(at / columns, at % columns, values[i]);
      }
    };
    const std::string layer0 = "language_model.model.layers.0.self_attn.";
    if (tensor.kind == TensorKind::kEmbedding) {
      each([](int64_t, int64_t column, float& value) {
        if (column == 0) value = kConstant;
      });
    } else if (tensor.name == "patch_merge_mlp.linear_2.weight") {
      each([](int64_t row, int64_t, float& value) {
        if (row == 0) value = 0;
      });
    } else if (tensor.name == "patch_merge_mlp.linear_2.bias") {
      each([](int64_t row, int64_t, float& value) {
        if (row == 0) value = kConstant;
      });
    } else if (tensor.name == layer0 + "k_proj.weight") {
      each([&](int64_t row, int64_t column, float& value) {
        const int m = frequency_of(row);
        if (m < kFrequencies)
          value = column == 0 && row < half() ? static_cast<float>(kKey / h0_) : 0;
      });
    } else if (tensor.name == layer0 + "q_proj.weight") {
      each([&](int64_t row, int64_t column, float& value) {
        const int64_t head = row / text_.head_dim;
        if (head < kHeads) value = column == 0 ? query(head + 1, row % text_.head_dim) : 0;
      });
    }
  }

 private:
  static constexpr int kHeads = 4, kFrequencies = 3;
  static constexpr float kConstant = 2.0f;
  static constexpr double kKey = 4.6, kQuery = 6.5;

  int64_t half() const { return text_.rotary_dim / 2; }
  // Which of the frequencies row `row` of a head belongs to (pairs m and m + half); else a large
  // number.
  int frequency_of(int64_t row) const {
    if (row < half()) return static_cast<int>(row);
    return row < 2 * half() ? static_cast<int>(row - half()) : kFrequencies;
  }
  float query(int64_t offset, int64_t row) const {
    const int m = frequency_of(row);
    if (m >= kFrequencies) return 0;
    const double angle = static_cast<double>(offset) *
                         std::pow(static_cast<double>(text_.rope_theta), -double(m) / half());
    return static_cast<float>((row < half() ? std::cos(angle) : -std::sin(angle)) * kQuery / h0_);
  }

  TextConfig text_;
  double h0_;
};

}  // namespace

InitScheme init_scheme(const InitConfig& init, const ModelConfig& config, uint64_t seed) {
  InitScheme base = init_normal(seed, init.std);
  const bool fan_in = init.scheme != InitConfig::Scheme::kNormal;
  if (fan_in) {
    const InitScheme unit = init_normal(seed, 1);  // vectors as they are, matrices of variance 1
    base = [init, config, unit](const TensorEntry& tensor, int64_t begin, std::span<float> values) {
      unit(tensor, begin, values);
      if (tensor.shape.rank() < 2) return;
      const float std = static_cast<float>(fan_in_std(tensor, init, config));
      for (float& value : values) value *= std;
    };
  }
  if (!init.positional_start) return base;
  const double embedding_std = fan_in ? init.embedding_std : init.std;
  const PositionalStart start(config.text, embedding_std);
  return [base, start](const TensorEntry& tensor, int64_t begin, std::span<float> values) {
    base(tensor, begin, values);
    start.apply(tensor, begin, values);
  };
}

}  // namespace m3::train
