// What share of rows a coarse first pass over the index keys settles, on the index vectors of a trained model
// beside random ones (msa.md §12). One program because the two must be counted by the same rule.
//
//   bench_index8_shares --model models/m3-nano --text docs/spec/msa.md [--tokens 8192] [--topk 4] [--rows 2000]
//
// The model reads the text as one document; its sparse layers' index queries and keys, rounded to bf16, are one
// data set each. The random ones have the same number of rows: `normal` (unit normals), `correlated` (queries
// AR(1) along the sequence, rho 0.99, keys normal). First passes:
//   int8, int4  codes of queries (a scale per row) and keys (a scale per page), exact integer sums
//   summary     per page and channel the smallest and largest key: sum of max(q lo, q hi)
// Reported per first pass, over rows with more blocks than they may take (one forced local block):
//   approx      ids of the best K - 1 blocks by its own scores: share of the bf16 ids found, rows equal
//   rescored C  rows whose bf16 choice lies within the best C by its own scores
//   certified C rows that the bound proves with C candidates, those of the largest upper bounds; both among the rows
//               with more than C history blocks, absent if there are none
//   needed      candidates that a certificate needs: median, 99 % of rows, largest
// Prints JSON lines.
#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/rng.h"
#include "base/threads.h"
#include "train/batch.h"

namespace m3 {
namespace {

constexpr int kBlock = 128;

// Index vectors of one sequence: queries of R groups, one key a token. bf16 values.
struct Vectors {
  std::string name;
  int64_t T = 0, R = 1, X = 128;
  std::vector<bf16> qi_TRX, ki_TX;
};

std::vector<bf16> rounded(const Tensor& tensor) {
  std::vector<bf16> out(static_cast<size_t>(tensor.numel()));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = tensor.dtype() == DType::kBF16 ? tensor.ptr<bf16>()[i] : bf16(tensor.ptr<float>()[i]);
  return out;
}

std::vector<Vectors> model_vectors(const std::string& folder, const std::string& text, int64_t T) {
  const Checkpoint checkpoint = Checkpoint::open(folder);
  const ModelConfig& config = checkpoint.config();
  M3_CHECK(config.text.block_size == kBlock, "{}: blocks of {}, want {}", folder, config.text.block_size, kBlock);
  train::BatchDocument document;
  document.sample.ids = Tokenizer::load(folder).encode(read_file(text));
  M3_CHECK(document.sample.num_tokens() >= T, "{}: {} tokens, want at least {}", text,
           document.sample.num_tokens(), T);
  document.sample.ids.resize(static_cast<size_t>(T));
  document.sample.weights.assign(static_cast<size_t>(T), 0.0f);
  const std::vector<train::BatchDocument> documents = {document};
  const train::PackedDocuments pack(config, documents, {0});
  Arena arena("gradients (untouched)", parameter_bytes(config, DType::kF32));
  TrainableModel model(config, weights_of(checkpoint), alloc_parameters(config, DType::kF32, arena), {},
                       {pack.num_tokens(), pack.num_patches()});
  std::vector<Vectors> out;
  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    if (!config.text.is_sparse[layer.index]) return;
    out.push_back({fmt::format("layer {}", layer.index), T, config.text.num_kv_heads, config.text.index_dim,
                   rounded(layer.attention->qi_TRX), rounded(layer.attention->ki_TX)});
  };
  model.forward_only(pack.micro_batch(), &trace);
  return out;
}

Vectors random_vectors(const char* name, int64_t T, int64_t R, int64_t X, float rho) {
  Vectors v{name, T, R, X, std::vector<bf16>(static_cast<size_t>(T * R * X)),
            std::vector<bf16>(static_cast<size_t>(T * X))};
  Philox rng(1);
  for (bf16& key : v.ki_TX) key = bf16(static_cast<float>(rng.normal()));
  std::vector<float> query(static_cast<size_t>(R * X));
  for (float& x : query) x = static_cast<float>(rng.normal());
  const float fresh = std::sqrt(1 - rho * rho);
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < R * X; ++i) {
      v.qi_TRX[static_cast<size_t>(t * R * X + i)] = bf16(query[i]);
      query[i] = rho * query[i] + fresh * static_cast<float>(rng.normal());
    }
  }
  return v;
}

// Of one row, by block: scores of a first pass, and upper bounds of the exact ones.
struct Scores {
  std::vector<float> coarse, upper;
};

// The complete blocks of a sequence, and what the first passes keep of them.
class Pages {
 public:
  struct Codes {
    int levels = 0;           // codes are -levels .. levels
    std::vector<float> code;  // whole numbers
    std::vector<float> scale, error, norm;  // of a page, as in index_keys8.h
  };

  explicit Pages(const Vectors& v) : X_(v.X) {
    const int64_t pages = v.T / kBlock;
    for (int64_t i = 0; i < pages * kBlock * X_; ++i) keys_.push_back(to_float(v.ki_TX[i]));
    low_.assign(static_cast<size_t>(pages * X_), INFINITY);
    high_.assign(low_.size(), -INFINITY);
    for (size_t i = 0; i < keys_.size(); ++i) {
      const size_t at = i / (kBlock * X_) * X_ + i % X_;
      low_[at] = std::min(low_[at], keys_[i]);
      high_[at] = std::max(high_[at], keys_[i]);
    }
    for (Codes* c : {&int8, &int4}) {
      c->levels = c == &int8 ? 127 : 7;
      for (int64_t page = 0; page < pages; ++page) add_page(*c, page);
    }
  }

  std::vector<float> exact(const float* query, int64_t blocks) const {
    std::vector<float> best;
    for (int64_t page = 0; page < blocks; ++page) best.push_back(largest_dot(query, keys_, page));
    return best;
  }
  // The bound of index_prefill8.h.
  Scores coded(const Codes& c, const float* query, int64_t blocks) const {
    std::vector<float> code(static_cast<size_t>(X_));
    const float scale = codes_of(query, X_, c.levels, code.data());
    const auto [norm, error] = norm_and_error(query, code.data(), scale);
    Scores s;
    for (int64_t page = 0; page < blocks; ++page) {
      s.coarse.push_back(scale * c.scale[page] * largest_dot(code.data(), c.code, page));
      s.upper.push_back(s.coarse.back() + norm * c.error[page] +
                        error * (c.norm[page] + c.error[page]) + 0x1p-13f * norm * c.norm[page]);
    }
    return s;
  }
  Scores summary(const float* query, int64_t blocks) const {
    const float norm = norm_and_error(query, query, 1).first;
    Scores s;
    for (int64_t page = 0; page < blocks; ++page) {
      float sum = 0;
      for (int64_t i = 0; i < X_; ++i)
        sum += std::max(query[i] * low_[page * X_ + i], query[i] * high_[page * X_ + i]);
      s.coarse.push_back(sum);
      s.upper.push_back(sum + 0x1p-13f * norm * int8.norm[page]);
    }
    return s;
  }

  Codes int8, int4;

 private:
  float largest_dot(const float* query, const std::vector<float>& keys, int64_t page) const {
    float best = -INFINITY;
    for (int j = 0; j < kBlock; ++j) {
      const float* key = &keys[(page * kBlock + j) * X_];
      float sum[16] = {};
      for (int64_t i = 0; i < X_; i += 16)
        for (int lane = 0; lane < 16; ++lane) sum[lane] += query[i + lane] * key[i + lane];
      best = std::max(best, std::accumulate(sum, sum + 16, 0.0f));
    }
    return best;
  }
  // Codes of n values with one scale; returns it.
  static float codes_of(const float* x, int64_t n, int levels, float* code) {
    float largest = 0;
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, std::abs(x[i]));
    const float scale = largest / static_cast<float>(levels);
    for (int64_t i = 0; i < n; ++i) code[i] = scale > 0 ? std::nearbyint(x[i] / scale) : 0.0f;
    return scale;
  }
  std::pair<float, float> norm_and_error(const float* x, const float* code, float scale) const {
    double norm2 = 0, error2 = 0;
    for (int64_t i = 0; i < X_; ++i) {
      norm2 += double{x[i]} * x[i];
      error2 += std::pow(double{scale} * code[i] - x[i], 2);
    }
    return {static_cast<float>(std::sqrt(norm2)), static_cast<float>(std::sqrt(error2))};
  }
  void add_page(Codes& c, int64_t page) const {
    const float* rows = &keys_[page * kBlock * X_];
    std::vector<float> code(static_cast<size_t>(kBlock * X_));
    c.scale.push_back(codes_of(rows, kBlock * X_, c.levels, code.data()));
    c.norm.push_back(0);
    c.error.push_back(0);
    for (int64_t i = 0; i < kBlock * X_; i += X_) {
      const auto [norm, error] = norm_and_error(rows + i, &code[i], c.scale.back());
      c.norm.back() = std::max(c.norm.back(), norm);
      c.error.back() = std::max(c.error.back(), error);
    }
    c.code.insert(c.code.end(), code.begin(), code.end());
  }

  int64_t X_;
  std::vector<float> keys_, low_, high_;
};

// What a first pass would do for one row.
struct Outcome {
  int64_t blocks = 0;     // history blocks
  int64_t found = 0;      // of the K - 1 blocks of the exact choice, by its own best K - 1
  int64_t rescored = 0;   // candidates that hold the exact choice
  int64_t certified = 0;  // candidates that prove it
};

std::vector<int64_t> best_first(const std::vector<float>& score) {
  std::vector<int64_t> order(score.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score[a] > score[b]; });
  return order;
}

Outcome outcome_of(const std::vector<float>& exact, const Scores& s, int64_t K) {
  const int64_t blocks = static_cast<int64_t>(exact.size());
  const std::vector<int64_t> by_exact = best_first(exact), by_coarse = best_first(s.coarse);
  std::vector<char> chosen(exact.size(), 0);
  for (int64_t i = 0; i < K - 1; ++i) chosen[by_exact[i]] = 1;
  const float last = exact[by_exact[K - 2]];
  Outcome o;
  o.blocks = blocks;
  for (int64_t i = 0; i < blocks; ++i) {
    if (!chosen[by_coarse[i]]) continue;
    o.rescored = i + 1;
    o.found += i < K - 1;
  }
  for (int64_t b = 0; b < blocks; ++b) {
    M3_CHECK(s.upper[b] >= exact[b], "block {}: score {} above its bound {}", b, exact[b], s.upper[b]);
    o.certified += s.upper[b] >= last;
  }
  o.certified = std::min(o.certified + 1, blocks);  // the last candidate's bound is below; or all are candidates
  return o;
}

void report(const Vectors& v, const std::vector<int64_t>& topks, int64_t max_rows) {
  const Pages pages(v);
  for (const int64_t K : topks) {
    const int64_t first = K * kBlock;  // the first position with more than K blocks
    const int64_t rows = std::min(max_rows, (v.T - first) * v.R);
    if (rows <= 0) continue;
    std::vector<std::array<Outcome, 3>> outcomes(static_cast<size_t>(rows));
    parallel_for_dynamic(rows, [&](int64_t i) {
      const int64_t row = first * v.R + (2 * i + 1) * (v.T - first) * v.R / (2 * rows);
      std::vector<float> query;
      for (int64_t c = 0; c < v.X; ++c) query.push_back(to_float(v.qi_TRX[row * v.X + c]));
      const int64_t blocks = row / v.R / kBlock;
      const std::vector<float> exact = pages.exact(query.data(), blocks);
      outcomes[i] = {outcome_of(exact, pages.coded(pages.int8, query.data(), blocks), K),
                     outcome_of(exact, pages.coded(pages.int4, query.data(), blocks), K),
                     outcome_of(exact, pages.summary(query.data(), blocks), K)};
    });
    static const char* const kPasses[] = {"int8", "int4", "summary"};
    for (int pass = 0; pass < 3; ++pass) {
      std::vector<int64_t> certified;
      int64_t found = 0, equal = 0;
      for (const auto& of_row : outcomes) {
        found += of_row[pass].found;
        equal += of_row[pass].found == K - 1;
        certified.push_back(of_row[pass].certified);
      }
      std::string shares;
      for (const int64_t candidates : {8, 16, 24, 32, 64}) {
        int64_t longer = 0, rescored = 0, proved = 0;
        for (const auto& of_row : outcomes) {
          if (of_row[pass].blocks <= candidates) continue;
          ++longer;
          rescored += of_row[pass].rescored <= candidates;
          proved += of_row[pass].certified <= candidates;
        }
        if (candidates < K - 1 || longer == 0) continue;
        shares += fmt::format("\"rescored_{0}\": {1:.4f}, \"certified_{0}\": {2:.4f}, ", candidates,
                              double(rescored) / double(longer), double(proved) / double(longer));
      }
      std::sort(certified.begin(), certified.end());
      fmt::print("{{\"vectors\": \"{}\", \"tokens\": {}, \"topk\": {}, \"rows\": {}, \"first_pass\": \"{}\", "
                 "\"ids_found\": {:.4f}, \"rows_equal\": {:.4f}, {}\"needed_median\": {}, \"needed_99\": {}, "
                 "\"needed_max\": {}}}\n",
                 v.name, v.T, K, rows, kPasses[pass], static_cast<double>(found) / static_cast<double>(rows * (K - 1)),
                 static_cast<double>(equal) / static_cast<double>(rows), shares, certified[rows / 2],
                 certified[rows * 99 / 100], certified.back());
      std::fflush(stdout);
    }
  }
}

}  // namespace
}  // namespace m3

int main(int argc, char** argv) {
  using namespace m3;
  std::string model = "models/m3-nano", text = "docs/spec/msa.md";
  int64_t tokens = 8192, rows = 2000;
  std::vector<int64_t> topks = {4, 16};
  try {
    for (int i = 1; i + 1 < argc; i += 2) {
      const std::string arg = argv[i], value = argv[i + 1];
      if (arg == "--model") model = value;
      else if (arg == "--text") text = value;
      else if (arg == "--tokens") tokens = std::atoll(value.c_str());
      else if (arg == "--rows") rows = std::atoll(value.c_str());
      else if (arg == "--topk") topks = {std::atoll(value.c_str())};
      else M3_FAIL("unknown option {}: want --model, --text, --tokens, --rows or --topk", arg);
    }
    const std::vector<Vectors> trained = model_vectors(model, text, tokens);
    for (const Vectors& v : trained) report(v, topks, rows);
    M3_CHECK(!trained.empty(), "{}: no sparse layer", model);
    const int64_t R = trained[0].R, X = trained[0].X;
    report(random_vectors("normal", tokens, R, X, 0.0f), topks, rows);
    report(random_vectors("correlated", tokens, R, X, 0.99f), topks, rows);
  } catch (const std::exception& e) {
    fmt::print(stderr, "{}\n", e.what());
    return 1;
  }
  return 0;
}
