// For tests: the losses of training in plain fp64 loops, written from the specifications (model.md
// §4-§8, msa.md §2-§5, §8, §16, training.md §3, §8) without any operator of the product. Slow; tiny
// models only.
#pragma once
#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "model/trainable_model.h"

namespace m3::testing {

using Vector = std::vector<double>;
using Matrix = std::vector<Vector>;  // rows

inline double dot_product(const Vector& a, const Vector& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

class ReferenceModel {
 public:
  ReferenceModel(const ModelConfig& config, const ModelWeights& weights) : config_(config) {
    for_each_parameter(config, weights, [&](const std::string& name, const Tensor& t) {
      Vector& values = parameters[name];
      for (int64_t i = 0; i < t.numel(); ++i) {
        values.push_back(t.dtype() == DType::kF32 ? t.ptr<float>()[i]
                                                  : static_cast<float>(t.ptr<bf16>()[i]));
      }
    });
  }

  std::map<std::string, Vector> parameters;

  struct Losses {
    double ce = 0, z = 0, kl = 0, balance = 0;  // sums as in TrainSums, kl over all layers
    // By layer: sums over rows of the mean square behind the layer, text and media rows apart; over
    // rows and heads of the attention's entropy; SwiGLU inputs beyond their limit, and all of them.
    struct Layer {
      double text_square = 0, media_square = 0, entropy = 0, clamped = 0, gates = 0;
    };
    std::map<int, Layer> layers;
  };
  Losses losses(const MicroBatch& batch, TrainStage stage) {
    Losses out;
    Matrix x = embedding(batch);
    for (int n = 0; n + 1 < static_cast<int>(batch.cu_seqlens.size()); ++n) {
      const int begin = batch.cu_seqlens[n], end = batch.cu_seqlens[n + 1];
      Matrix h(x.begin() + begin, x.begin() + end);
      for (int l = 0; l < text_.num_layers; ++l) {
        layer(l, stage, h, out);
        for (int t = begin; t < end; ++t) {
          const Vector& row = h[t - begin];
          (is_media(batch, t) ? out.layers[l].media_square : out.layers[l].text_square) +=
              dot_product(row, row) / row.size();
        }
      }
      for (int t = begin; t < end; ++t) {
        if (batch.targets_T[t] < 0) continue;
        const Vector logits = linear("language_model.lm_head.weight",
                                     gemma("language_model.model.norm.weight", h[t - begin]));
        const double logz = log_sum_exp(logits),
                     w = batch.target_weights_T.empty() ? 1 : batch.target_weights_T[t];
        out.ce += w * (logz - logits[batch.targets_T[t]]);
        out.z += w * logz * logz;
      }
    }
    return out;
  }

 private:
  static double log_sum_exp(const Vector& z) {
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (double v : z) sum += std::exp(v - top);
    return top + std::log(sum);
  }
  static bool is_media(const MicroBatch& batch, int32_t t) {
    return std::ranges::any_of(batch.media, [&](const TrainMedia& item) {
      return std::ranges::find(item.rows, t) != item.rows.end();
    });
  }
  static Vector part(const Vector& x, int64_t begin, int64_t count) {
    return {x.begin() + begin, x.begin() + begin + count};
  }
  static void add(const Vector& from, Vector& to) {
    for (size_t i = 0; i < to.size(); ++i) to[i] += from[i];
  }

  Vector linear(const std::string& weight, const Vector& x, const std::string& bias = "") const {
    const Vector& w = parameters.at(weight);
    Vector y = bias.empty() ? Vector(w.size() / x.size()) : parameters.at(bias);
    for (size_t o = 0; o < y.size(); ++o) {
      const double* row = w.data() + o * x.size();
      double sum = 0;
      for (size_t i = 0; i < x.size(); ++i) sum += row[i] * x[i];
      y[o] += sum;
    }
    return y;
  }
  Vector biased(const std::string& name, const Vector& x) const {
    return linear(name + ".weight", x, name + ".bias");
  }

  Vector gemma(const std::string& weight, Vector x) const {
    const double scale = 1 / std::sqrt(dot_product(x, x) / x.size() + text_.rms_norm_eps);
    const Vector& w = parameters.at(weight);
    for (size_t i = 0; i < x.size(); ++i) x[i] *= scale * (1 + w[i]);
    return x;
  }
  Vector layer_norm(const std::string& name, Vector x) const {
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / x.size();
    for (double& v : x) v -= mean;
    const double scale =
        1 / std::sqrt(dot_product(x, x) / x.size() + config_.vision->layer_norm_eps);
    const Vector &w = parameters.at(name + ".weight"), &b = parameters.at(name + ".bias");
    for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * scale * w[i] + b[i];
    return x;
  }
  static void rotate(Vector& x, const Vector& angles) {
    const size_t M = angles.size();
    for (size_t m = 0; m < M; ++m) {
      const double a = x[m], b = x[m + M], c = std::cos(angles[m]), s = std::sin(angles[m]);
      x[m] = a * c - b * s;
      x[m + M] = b * c + a * s;
    }
  }
  // One head: norm and rotation at position t.
  Vector head(const std::string& norm, const Vector& x, int64_t t) const {
    Vector y = gemma(norm, x);
    const int rotary = std::min<int>(text_.rotary_dim, static_cast<int>(x.size()));
    Vector angles;
    for (int m = 0; m < rotary / 2; ++m)
      angles.push_back(t * std::pow(text_.rope_theta, -2.0 * m / rotary));
    rotate(y, angles);
    return y;
  }

  Matrix embedding(const MicroBatch& batch) const {
    const int C = text_.hidden_size;
    Matrix x;
    for (int32_t id : batch.ids_T)
      x.push_back(
          part(parameters.at("language_model.model.embed_tokens.weight"), int64_t{id} * C, C));
    for (const TrainMedia& item : batch.media) {
      const Matrix features = vision(item);
      for (size_t i = 0; i < item.rows.size(); ++i) x[item.rows[i]] = features[i];
    }
    return x;
  }

  // ---- text layers

  void layer(int l, TrainStage stage, Matrix& x, Losses& out) const {
    const std::string prefix = "language_model.model.layers." + std::to_string(l) + ".";
    const std::string a = prefix + "self_attn.";
    const int H = text_.num_heads, R = text_.num_kv_heads, D = text_.head_dim, X = text_.index_dim,
              G = H / R;
    const bool sparse = text_.is_sparse[l] != 0, index = sparse && teaches_index(stage);
    const int64_t T = static_cast<int64_t>(x.size());
    std::vector<Matrix> q(T), k(T), v(T), qi(T);  // [T][head]
    Matrix ki(T);
    for (int64_t t = 0; t < T; ++t) {
      const Vector h = gemma(prefix + "input_layernorm.weight", x[t]);
      const auto heads = [&](const std::string& name, const std::string& norm, int count, int dim) {
        const Vector all = linear(a + name + "_proj.weight", h);
        Matrix rows;
        for (int i = 0; i < count; ++i) {
          const Vector one = part(all, int64_t{i} * dim, dim);
          rows.push_back(norm.empty() ? one : head(a + norm + ".weight", one, t));
        }
        return rows;
      };
      q[t] = heads("q", "q_norm", H, D);
      k[t] = heads("k", "k_norm", R, D);
      v[t] = heads("v", "", R, D);
      if (index) {
        qi[t] = heads("index_q", "index_q_norm", R, X);
        ki[t] = heads("index_k", "index_k_norm", 1, X)[0];
      }
    }
    for (int64_t t = 0; t < T; ++t) {
      Vector o;
      Matrix teachers;
      std::vector<std::vector<int64_t>> supports;
      for (int r = 0; r < R; ++r) {
        const std::vector<int64_t> keys = sparse ? support(stage, qi, ki, t, r) : range(0, t + 1);
        Vector teacher(keys.size());
        for (int g = 0; g < G; ++g) {
          Vector logits;
          for (int64_t j : keys)
            logits.push_back(dot_product(q[t][r * G + g], k[j][r]) / std::sqrt(D));
          const double lse = log_sum_exp(logits);
          Vector sum(D);
          for (size_t i = 0; i < keys.size(); ++i) {
            const double p = std::exp(logits[i] - lse);
            out.layers[l].entropy -= p * (logits[i] - lse);
            teacher[i] += p / G;
            for (int c = 0; c < D; ++c) sum[c] += p * v[keys[i]][r][c];
          }
          o.insert(o.end(), sum.begin(), sum.end());
        }
        teachers.push_back(teacher);
        supports.push_back(keys);
      }
      if (index)
        out.kl += stage == TrainStage::kDsa ? dsa_kl(teachers, qi[t], ki, supports[0])
                                            : msa_kl(teachers, qi[t], ki, supports);
      add(linear(a + "o_proj.weight", o), x[t]);
    }
    ffn(l, prefix, x, out);
  }

  static std::vector<int64_t> range(int64_t begin, int64_t end) {
    std::vector<int64_t> keys;
    for (int64_t j = begin; j < end; ++j) keys.push_back(j);
    return keys;
  }

  // Keys that row t of group r sees in a layer with an index branch.
  std::vector<int64_t> support(TrainStage stage, const std::vector<Matrix>& qi, const Matrix& ki,
                               int64_t t, int r) const {
    const int64_t B = text_.block_size, budget = text_.topk_blocks * B, own = t / B;
    std::vector<int64_t> keys;
    if (stage == TrainStage::kWarmup || stage == TrainStage::kFull) return range(0, t + 1);
    if (stage == TrainStage::kWindow) {
      const int64_t sink = text_.topk_blocks > 1 ? B : 0;
      for (int64_t j = 0; j <= t; ++j) {
        if (t - j < budget - sink || j < sink) keys.push_back(j);
      }
      return keys;
    }
    if (stage == TrainStage::kDsa) {
      std::vector<std::pair<double, int64_t>> order;  // best first
      for (int64_t j = 0; j <= t; ++j) order.push_back({-dsa_score(qi[t], ki[j]), j});
      std::sort(order.begin(), order.end());
      for (int64_t i = 0; i < std::min<int64_t>(budget, t + 1); ++i)
        keys.push_back(order[i].second);
      std::sort(keys.begin(), keys.end());
      return keys;
    }
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t b = 0; b <= own; ++b) {
      double best = -INFINITY;
      for (int64_t j = b * B; j < std::min((b + 1) * B, t + 1); ++j)
        best = std::max(best, dot_product(qi[t][r], ki[j]));
      if (b > own - text_.local_blocks || b < text_.init_blocks) best = INFINITY;
      order.push_back({-best, b});
    }
    std::sort(order.begin(), order.end());
    std::vector<int64_t> blocks;
    for (int64_t i = 0; i < std::min<int64_t>(text_.topk_blocks, own + 1); ++i)
      blocks.push_back(order[i].second);
    std::sort(blocks.begin(), blocks.end());
    for (int64_t b : blocks) {
      for (int64_t j = b * B; j < std::min((b + 1) * B, t + 1); ++j) keys.push_back(j);
    }
    return keys;
  }

  // The index heads with equal weights (attention_block.h).
  double dsa_score(const Matrix& qi, const Vector& ki) const {
    double sum = 0;
    for (const Vector& head : qi) sum += std::max(0.0, dot_product(head, ki));
    return sum / std::sqrt(static_cast<double>(qi.size() * ki.size()));
  }
  static double kl(const Vector& teacher, const Vector& logits) {
    const double lse = log_sum_exp(logits);
    double sum = 0;
    for (size_t i = 0; i < teacher.size(); ++i)
      sum += teacher[i] * (std::log(teacher[i]) - (logits[i] - lse));
    return sum;
  }
  double msa_kl(const Matrix& teachers, const Matrix& qi, const Matrix& ki,
                const std::vector<std::vector<int64_t>>& supports) const {
    double sum = 0;
    for (size_t r = 0; r < teachers.size(); ++r) {
      Vector logits;
      for (int64_t j : supports[r])
        logits.push_back(dot_product(qi[r], ki[j]) / std::sqrt(text_.index_dim));
      sum += kl(teachers[r], logits);
    }
    return sum;
  }
  double dsa_kl(const Matrix& teachers, const Matrix& qi, const Matrix& ki,
                const std::vector<int64_t>& keys) const {
    Vector teacher(keys.size()), logits;
    for (const Vector& one : teachers) {
      for (size_t i = 0; i < keys.size(); ++i) teacher[i] += one[i] / teachers.size();
    }
    for (int64_t j : keys) logits.push_back(dsa_score(qi, ki[j]));
    return kl(teacher, logits);
  }

  Vector expert(const std::string& gate, const std::string& up, const std::string& down,
                const Vector& h, Losses::Layer& seen) const {
    Vector g = linear(gate, h), u = linear(up, h);
    for (size_t i = 0; i < g.size(); ++i) {
      seen.clamped += (g[i] > text_.swiglu_limit) + (std::abs(u[i]) > text_.swiglu_limit);
      seen.gates += 2;
      const double gi = std::min<double>(g[i], text_.swiglu_limit);
      const double ui = std::clamp<double>(u[i], -text_.swiglu_limit, text_.swiglu_limit);
      g[i] = (ui + text_.swiglu_beta) * gi / (1 + std::exp(-text_.swiglu_alpha * gi));
    }
    return linear(down, g);
  }

  void ffn(int l, const std::string& prefix, Matrix& x, Losses& out) const {
    const std::string m = prefix + "block_sparse_moe.",
                      norm = prefix + "post_attention_layernorm.weight";
    if (text_.is_moe[l] == 0) {
      const std::string p = prefix + "mlp.";
      for (Vector& row : x)
        add(expert(p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight",
                   gemma(norm, row), out.layers[l]),
            row);
      return;
    }
    const int E = text_.num_experts, K = text_.num_experts_per_token;
    Vector frequency(E), share(E);
    for (Vector& row : x) {
      const Vector h = gemma(norm, row);
      Vector s = linear(m + "gate.weight", h);
      for (double& v : s) v = 1 / (1 + std::exp(-v));
      std::vector<std::pair<double, int>> order;
      for (int e = 0; e < E; ++e)
        order.push_back({-(s[e] + parameters.at(m + "e_score_correction_bias")[e]), e});
      std::sort(order.begin(), order.end());
      double total = 0;
      for (int i = 0; i < K; ++i) total += s[order[i].second];
      const std::string p = m + "shared_experts.";
      Vector y = expert(p + "gate_proj.weight", p + "up_proj.weight", p + "down_proj.weight", h,
                        out.layers[l]);
      for (int i = 0; i < K; ++i) {
        const int e = order[i].second;
        const std::string one = m + "experts." + std::to_string(e) + ".";
        const Vector part_of =
            expert(one + "w1.weight", one + "w3.weight", one + "w2.weight", h, out.layers[l]);
        for (size_t c = 0; c < y.size(); ++c)
          y[c] += text_.routed_scaling_factor * s[e] / total * part_of[c];
        frequency[e] += 1;
      }
      const double sum = std::accumulate(s.begin(), s.end(), 0.0);
      for (int e = 0; e < E; ++e) share[e] += s[e] / sum;
      add(y, row);
    }
    // n · Σ_e f_e P_e, f_e = E / (K n) · count, P_e = share / n.
    if (!x.empty())
      out.balance += dot_product(frequency, share) * E / (K * static_cast<double>(x.size()));
  }

  // ---- vision

  Matrix vision(const TrainMedia& item) const {
    const VisionConfig& v = *config_.vision;
    const std::string tower = "vision_tower.vision_model.";
    Matrix x;
    for (int64_t n = 0; n < item.grid.num_patches(); ++n) {
      const float* patch = item.patches_NP.ptr<float>() + n * v.patch_numel();
      x.push_back(
          layer_norm(tower + "pre_layrnorm", linear(tower + "embeddings.patch_embedding.weight",
                                                    Vector(patch, patch + v.patch_numel()))));
    }
    for (int64_t begin = 0; begin < item.grid.t; begin += v.segment_max_frames) {
      const int64_t frames = std::min<int64_t>(v.segment_max_frames, item.grid.t - begin),
                    area = item.grid.h * item.grid.w;
      segment({frames, item.grid.h, item.grid.w}, x, begin * area);
    }
    Matrix features;
    for (size_t n = 0; n < x.size(); n += v.merge_factor()) {
      Vector block;
      for (int i = 0; i < v.merge_factor(); ++i) {
        const Vector z = biased("multi_modal_projector.linear_2",
                                gelu(biased("multi_modal_projector.linear_1", x[n + i])));
        block.insert(block.end(), z.begin(), z.end());
      }
      features.push_back(
          biased("patch_merge_mlp.linear_2", gelu(biased("patch_merge_mlp.linear_1", block))));
    }
    return features;
  }

  static Vector gelu(Vector x) {
    for (double& v : x) v *= 0.5 * (1 + std::erf(v / std::sqrt(2.0)));
    return x;
  }

  // Rows [first, first + patches) of x through all layers. Patches lie in 2 x 2 blocks.
  void segment(const VisionGrid& grid, Matrix& x, int64_t first) const {
    const VisionConfig& v = *config_.vision;
    const int64_t N = grid.num_patches(), D = v.head_dim(), merge = v.spatial_merge_size;
    Matrix angles(N);
    const int64_t axis = 2 * (D / 3 / 2);
    for (int64_t n = 0; n < N; ++n) {
      const int64_t inside = n % (merge * merge), block = n / (merge * merge),
                    columns = grid.w / merge, rows = grid.h / merge;
      const int64_t position[] = {block / (rows * columns),
                                  block / columns % rows * merge + inside / merge,
                                  block % columns * merge + inside % merge};
      for (int64_t p : position) {
        for (int64_t m = 0; m < axis / 2; ++m)
          angles[n].push_back(p * std::pow(v.rope_theta, -2.0 * m / axis));
      }
    }
    for (int l = 0; l < v.num_layers; ++l) {
      const std::string p = "vision_tower.vision_model.encoder.layers." + std::to_string(l) + ".";
      std::vector<Matrix> q(N), k(N), values(N);
      for (int64_t n = 0; n < N; ++n) {
        const Vector h = layer_norm(p + "layer_norm1", x[first + n]);
        for (auto& [name, to] : {std::pair{"q_proj", &q}, {"k_proj", &k}, {"v_proj", &values}}) {
          const Vector all = biased(p + "self_attn." + name, h);
          for (int a = 0; a < v.num_heads; ++a) {
            Vector one = part(all, a * D, D);
            if (to != &values) rotate(one, angles[n]);
            (*to)[n].push_back(one);
          }
        }
      }
      for (int64_t n = 0; n < N; ++n) {
        Vector o;
        for (int a = 0; a < v.num_heads; ++a) {
          Vector logits, sum(D);
          for (int64_t j = 0; j < N; ++j)
            logits.push_back(dot_product(q[n][a], k[j][a]) / std::sqrt(static_cast<double>(D)));
          const double lse = log_sum_exp(logits);
          for (int64_t j = 0; j < N; ++j) {
            const double share = std::exp(logits[j] - lse);
            for (int64_t c = 0; c < D; ++c) sum[c] += share * values[j][a][c];
          }
          o.insert(o.end(), sum.begin(), sum.end());
        }
        add(biased(p + "self_attn.out_proj", o), x[first + n]);
      }
      for (int64_t n = 0; n < N; ++n) {
        add(biased(p + "mlp.fc2",
                   gelu(biased(p + "mlp.fc1", layer_norm(p + "layer_norm2", x[first + n])))),
            x[first + n]);
      }
    }
  }

  const ModelConfig config_;
  const TextConfig& text_ = config_.text;
};

}  // namespace m3::testing
