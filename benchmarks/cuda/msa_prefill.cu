// Prefill of one layer on one GPU, the whole operator from raw Q, K, V, index Q, index K to O and
// LSE: scores, selection, planning, attention, merge; also the stages alone and the dense operator.
// Cold cache: calls rotate over input sets that are at least 256 MB apart. One call = one CUDA
// graph; median, p10 and p90 over the rounds. Index queries are AR(1) along the sequence with the
// given rho (0: independent). Prints one JSON line per case and stage (hopper.md §9).
//   msa_prefill [--rounds 20] [--rho 0.99] [--only 32768,300+131072,dense:8192] [--paths
//   tile,hybrid,t2] [--index8 15,32,exact: also the selection with 8-bit keys, by candidates]
//   a case is new tokens[+cached tokens], several sequences joined by '/'
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "base/rng.h"
#include "ops/attend/attend_cuda.h"
#include "ops/attend/attend_sm90.h"
#include "ops/index_select/index_prefill8.h"
#include "ops/index_select/index_select_cuda.h"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

constexpr int kBlock = 128, kDim = 128, kGroups = 4, kHeads = 64, kTopk = 16;

__device__ float normal_at(uint64_t i, uint64_t seed) {
  uint64_t x = seed * 0x9E3779B97F4A7C15ull + i;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  x ^= x >> 31;
  const float u = (static_cast<float>(x >> 40) + 0.5f) * 0x1p-24f;
  return sqrtf(-2.0f * __logf(u)) *
         __cosf(static_cast<float>(x & 0xffffff) * 0x1p-24f * 6.2831853f);
}

__global__ void fill_normal(__nv_bfloat16* out, int64_t n, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) {
    out[i] = __float2bfloat16(normal_at(i, seed));
  }
}

// A thread per channel walks along the tokens: x[t] = rho x[t-1] + sqrt(1 - rho^2) noise.
__global__ void fill_correlated(__nv_bfloat16* out, int64_t tokens, int channels, float rho,
                                uint64_t seed) {
  const int c = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (c >= channels) return;
  const float fresh = sqrtf(1 - rho * rho);
  float x = normal_at(c, seed);
  for (int64_t t = 0; t < tokens; ++t) {
    out[t * channels + c] = __float2bfloat16(x);
    x = rho * x + fresh * normal_at((t + 1) * channels + c, seed);
  }
}

struct Sequence {
  int32_t q, cached;
};

struct Case {
  std::string name;
  std::vector<Sequence> sequences;
  bool dense = false;
};

Case parse_case(std::string text) {
  Case c{.name = text};
  if (text.rfind("dense:", 0) == 0) c.dense = true, text = text.substr(6);
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, '/');) {
    Sequence s = {0, 0};
    std::sscanf(part.c_str(), "%d+%d", &s.q, &s.cached);
    c.sequences.push_back(s);
  }
  return c;
}

template <typename T>
T* allocate(int64_t count) {
  void* data = nullptr;
  M3_CUDA_CHECK(cudaMalloc(&data, std::max<int64_t>(256, count * static_cast<int64_t>(sizeof(T)))));
  return static_cast<T*>(data);
}
template <typename T>
T* upload(const std::vector<T>& values) {
  T* data = allocate<T>(static_cast<int64_t>(values.size()));
  M3_CUDA_CHECK(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return data;
}

// A selection with 8-bit keys: candidates, or "exact".
struct Mode8 {
  std::string name;
  int candidates;
  bool exact;
};

struct InputSet {
  __nv_bfloat16 *q, *k, *v, *qi, *x, *o;
  IndexKeys8 keys;
};

class Workload {
 public:
  Workload(const Case& c, float rho, bool with_8bit) : case_(c), rho_(rho), geometry_(msa_geometry_m3()) {
    std::vector<int32_t> cu{0}, lens;
    for (const Sequence& s : c.sequences) {
      cu.push_back(cu.back() + s.q);
      lens.push_back(s.q + s.cached);
      max_pages_ = std::max<int64_t>(max_pages_, (lens.back() + kBlock - 1) / kBlock);
      batch_.max_q_len = std::max<int64_t>(batch_.max_q_len, s.q);
      batch_.max_k_len = std::max<int64_t>(batch_.max_k_len, lens.back());
    }
    rows_ = cu.back();
    for (int32_t len : lens) pages_ += (len + kBlock - 1) / kBlock;
    std::vector<int32_t> order(pages_), table(lens.size() * max_pages_, -1);
    std::iota(order.begin(), order.end(), 0);
    Philox rng(1);
    for (int64_t i = pages_ - 1; i > 0; --i) std::swap(order[i], order[rng.below(i + 1)]);
    int64_t next = 0;
    for (size_t n = 0; n < lens.size(); ++n) {
      for (int64_t i = 0; i * kBlock < lens[n]; ++i) table[n * max_pages_ + i] = order[next++];
    }
    batch_.layout = KvLayout::kPaged;
    batch_.num_seqs = static_cast<int>(lens.size());
    batch_.num_queries = rows_;
    batch_.cu_q = upload(cu);
    batch_.seq_lens = upload(lens);
    batch_.page_table = upload(table);
    batch_.max_pages = max_pages_;

    const double bytes = double(rows_) * 2 * (2 * kHeads + kGroups) * kDim +
                         double(pages_) * kBlock * 2 * (2 * kGroups + 1) * kDim;
    const int sets = static_cast<int>(std::clamp(std::ceil(512e6 / bytes), 1.0, 8.0));
    for (int i = 0; i < sets; ++i) {
      InputSet s;
      s.q = random(rows_ * kHeads * kDim, 10 * i + 1);
      s.k = random(pages_ * kBlock * kGroups * kDim, 10 * i + 2);
      s.v = random(pages_ * kBlock * kGroups * kDim, 10 * i + 3);
      s.x = random(pages_ * kBlock * kDim, 10 * i + 4);
      s.qi = allocate<__nv_bfloat16>(rows_ * kGroups * kDim);
      fill_correlated<<<4, 128>>>(s.qi, rows_, kGroups * kDim, rho, 10 * i + 5);
      s.o = allocate<__nv_bfloat16>(rows_ * kHeads * kDim);
      if (with_8bit) {
        s.keys = {allocate<int8_t>(pages_ * kBlock * kDim), allocate<float>(pages_),
                  allocate<float>(pages_), allocate<float>(pages_)};
        index_keys8_convert(s.x, 0, pages_, s.keys, {});
      }
      sets_.push_back(s);
    }
    ids_ = allocate<int32_t>(rows_ * kGroups * kTopk);
    lse_ = allocate<float>(rows_ * kHeads);
    workspace_bytes_ = std::max(index_select_cuda_workspace_bytes(geometry_, batch_),
                                attend_cuda_workspace_bytes(geometry_, batch_, support()));
    if (with_8bit)  // 64 candidates need most
      workspace_bytes_ = std::max(workspace_bytes_, index_prefill8_workspace_bytes(
                                                        geometry_, batch_, pages_, 64));
    uncertified_ = allocate<int32_t>(1);
    workspace_ = allocate<uint8_t>(workspace_bytes_);
    M3_CUDA_CHECK(cudaDeviceSynchronize());
  }
  ~Workload() {
    for (InputSet& s : sets_) {
      for (void* p : {(void*)s.q, (void*)s.k, (void*)s.v, (void*)s.qi, (void*)s.x, (void*)s.o,
                      (void*)s.keys.codes_PBX, (void*)s.keys.scale_P, (void*)s.keys.error_P,
                      (void*)s.keys.norm_P})
        cudaFree(p);
    }
    for (void* p : {(void*)batch_.cu_q, (void*)batch_.seq_lens, (void*)batch_.page_table,
                    (void*)ids_, (void*)lse_, (void*)workspace_, (void*)uncertified_}) {
      cudaFree(p);
    }
  }
  Workload(const Workload&) = delete;

  int num_sets() const { return static_cast<int>(sets_.size()); }
  AttendSupport support() const {
    return case_.dense ? AttendSupport::full() : AttendSupport::blocks();
  }

  void index(int set, Stream stream) {
    const IndexSelectPath path =
        index_select_cuda_path(geometry_, batch_, {}, DType::kBF16, DType::kBF16);
    index_select_cuda({.geometry = geometry_,
                       .batch = batch_,
                       .qi_TRX = sets_[set].qi,
                       .ki = sets_[set].x,
                       .num_pages = pages_,
                       .ids_RTK = ids_,
                       .workspace = workspace_},
                      path, stream);
  }
  // The same with 8-bit keys: codes of the call's own pages, then the selection.
  void index8(int set, const Mode8& mode, Stream stream) {
    index_keys8_append(batch_, sets_[set].x, sets_[set].keys, stream);
    index_prefill8({.geometry = geometry_,
                    .batch = batch_,
                    .qi_TRX = sets_[set].qi,
                    .x_PBX = sets_[set].x,
                    .keys = sets_[set].keys,
                    .num_pages = pages_,
                    .candidates = mode.candidates,
                    .ids_RTK = ids_,
                    .uncertified = mode.exact ? uncertified_ : nullptr,
                    .workspace = workspace_},
                   stream);
  }
  // Share of the bf16 ids that the 8-bit selection finds, and of rows that agree entirely, on set 0.
  void report_agreement(const Mode8& mode) {
    const auto download = [&] {
      std::vector<int32_t> ids(rows_ * kGroups * kTopk);
      M3_CUDA_CHECK(cudaMemcpy(ids.data(), ids_, ids.size() * 4, cudaMemcpyDeviceToHost));
      return ids;
    };
    index(0, {});
    const std::vector<int32_t> want = download();
    int32_t uncertified = 0;
    index8(0, mode, {});
    const std::vector<int32_t> got = download();
    if (mode.exact)
      M3_CUDA_CHECK(cudaMemcpy(&uncertified, uncertified_, 4, cudaMemcpyDeviceToHost));
    int64_t found = 0, rows = 0;
    for (int64_t row = 0; row < rows_ * kGroups; ++row) {
      const auto mine = got.begin() + row * kTopk;
      int64_t here = 0;
      for (int i = 0; i < kTopk; ++i)
        here += std::find(mine, mine + kTopk, want[row * kTopk + i]) != mine + kTopk;
      found += here;
      rows += here == kTopk;
    }
    std::printf(
        "{\"case\": \"%s\", \"rho\": %.3f, \"index8\": \"%s\", \"ids_found\": %.6f, "
        "\"rows_equal\": %.6f, \"uncertified\": %d, \"rows\": %lld}\n",
        case_.name.c_str(), rho_, mode.name.c_str(), double(found) / double(rows_ * kGroups * kTopk),
        double(rows) / double(rows_ * kGroups), uncertified,
        static_cast<long long>(rows_ * kGroups));
    std::fflush(stdout);
  }
  // `threshold` above 0: the prefill kernels with that threshold, whatever the path.
  void attend(int set, AttendPath path, Stream stream, int threshold = 0) {
    const InputSet& s = sets_[set];
    const AttendCudaArgs args = {.geometry = geometry_,
                                 .batch = batch_,
                                 .support = support(),
                                 .q_THD = s.q,
                                 .k = s.k,
                                 .v = s.v,
                                 .num_pages = pages_,
                                 .lists = case_.dense ? nullptr : ids_,
                                 .o_THD = s.o,
                                 .lse_TH = lse_,
                                 .workspace = workspace_};
    if (threshold > 0) return attend_sm90(args, threshold, false, stream);
    attend_cuda(args, path, stream);
  }

  // Mean size of the union of the lists of 4 neighbouring queries of one group, over sampled tiles.
  double union_of_4() const {
    if (rows_ < 8) return 0;
    std::vector<int32_t> ids(rows_ * kGroups * kTopk);
    M3_CUDA_CHECK(cudaMemcpy(ids.data(), ids_, ids.size() * 4, cudaMemcpyDeviceToHost));
    const int64_t step = std::max<int64_t>(1, rows_ / 4 / 500);
    double sum = 0;
    int count = 0;
    for (int64_t tile = 0; tile < rows_ / 4; tile += step) {
      for (int r = 0; r < kGroups; ++r, ++count) {
        std::set<int32_t> seen;
        for (int64_t i = 0; i < 4 * kTopk; ++i)
          seen.insert(ids[(r * rows_ + tile * 4) * kTopk + i]);
        seen.erase(-1);
        sum += static_cast<double>(seen.size());
      }
    }
    return sum / count;
  }

  // Multiply-adds x 2 of exact visible pairs.
  double index_flop() const {
    double pairs = 0;
    for (const Sequence& s : case_.sequences) {
      for (int32_t i = 0; i < s.q; ++i)
        pairs += (s.cached + i) / kBlock >= kTopk ? double((s.cached + i) / kBlock) * kBlock : 0;
    }
    return 2.0 * kGroups * kDim * pairs;
  }
  double attend_flop() const {
    double pairs = 0;
    for (const Sequence& s : case_.sequences) {
      for (int32_t i = 0; i < s.q; ++i) {
        const int32_t p = s.cached + i,
                      blocks = case_.dense ? p / kBlock : std::min(p / kBlock, kTopk - 1);
        pairs += double(blocks) * kBlock + p % kBlock + 1;
      }
    }
    return 4.0 * kHeads * kDim * pairs;
  }

  double measure(const char* stage, int rounds, double flop,
                 const std::function<void(int, Stream)>& call) {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    M3_CUDA_CHECK(cudaStreamCreate(&stream));
    M3_CUDA_CHECK(cudaEventCreate(&begin));
    M3_CUDA_CHECK(cudaEventCreate(&end));
    std::vector<cudaGraphExec_t> graphs(sets_.size());
    for (int set = 0; set < num_sets(); ++set) {
      cudaGraph_t graph;
      M3_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      call(set, Stream{stream});
      M3_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
      M3_CUDA_CHECK(cudaGraphInstantiate(&graphs[set], graph, 0));
      cudaGraphDestroy(graph);
    }
    std::vector<float> ms;
    for (int round = -3; round < rounds; ++round) {
      M3_CUDA_CHECK(cudaEventRecord(begin, stream));
      M3_CUDA_CHECK(cudaGraphLaunch(graphs[(round + 3) % num_sets()], stream));
      M3_CUDA_CHECK(cudaEventRecord(end, stream));
      M3_CUDA_CHECK(cudaStreamSynchronize(stream));
      float elapsed = 0;
      M3_CUDA_CHECK(cudaEventElapsedTime(&elapsed, begin, end));
      if (round >= 0) ms.push_back(elapsed);
    }
    for (cudaGraphExec_t graph : graphs) cudaGraphExecDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
    std::sort(ms.begin(), ms.end());
    const auto at = [&](double share) {
      return ms[static_cast<size_t>(share * static_cast<double>(ms.size() - 1))];
    };
    std::printf(
        "{\"case\": \"%s\", \"rho\": %.3f, \"stage\": \"%s\", \"median_ms\": %.4f, \"p10_ms\": "
        "%.4f, "
        "\"p90_ms\": %.4f, \"tflops\": %.1f, \"ns_per_query_group\": %.2f, \"sets\": %d}\n",
        case_.name.c_str(), rho_, stage, at(0.5), at(0.1), at(0.9), flop / at(0.5) / 1e9,
        at(0.5) * 1e6 / (double(rows_) * kGroups), num_sets());
    std::fflush(stdout);
    return at(0.5);
  }

 private:
  static __nv_bfloat16* random(int64_t count, uint64_t seed) {
    auto* data = allocate<__nv_bfloat16>(count);
    fill_normal<<<2048, 256>>>(data, count, seed);
    return data;
  }
  Case case_;
  float rho_;
  MsaGeometry geometry_;
  MsaBatch batch_;
  int64_t rows_ = 0, pages_ = 0, max_pages_ = 1, workspace_bytes_ = 0;
  std::vector<InputSet> sets_;
  int32_t* ids_ = nullptr;
  float* lse_ = nullptr;
  uint8_t* workspace_ = nullptr;
  int32_t* uncertified_ = nullptr;
};

struct Variant {
  std::string name;
  AttendPath path;
  int threshold = 0;
};

// A path's name, or tN: the prefill kernels with threshold N.
Variant parse_variant(const std::string& name) {
  for (AttendPath path :
       {AttendPath::kGeneral, AttendPath::kTile, AttendPath::kHybrid, AttendPath::kRows,
        AttendPath::kSplit}) {
    if (name == attend_path_name(path)) return {name, path};
  }
  const int threshold = name[0] == 't' ? std::atoi(name.c_str() + 1) : 0;
  M3_CHECK(threshold >= 1 && threshold <= 5,
           "--paths: '{}' is unknown, want general, tile, hybrid, rows, split, t1 .. t5", name);
  return {name, AttendPath::kHybrid, threshold};
}

void run_case(const Case& c, float rho, int rounds, const std::vector<Variant>& variants,
              const std::vector<Mode8>& modes) {
  Workload w(c, rho, !modes.empty());
  if (c.dense) {
    for (const auto& [name, path, threshold] : variants) {
      if (path != AttendPath::kTile && path != AttendPath::kSplit) continue;
      w.measure(("dense " + name).c_str(), rounds, w.attend_flop(),
                [&](int set, Stream s) { w.attend(set, path, s); });
    }
    return;
  }
  w.measure("index", rounds, w.index_flop(), [&](int set, Stream s) { w.index(set, s); });
  std::printf("{\"case\": \"%s\", \"rho\": %.3f, \"union_of_4\": %.2f}\n", c.name.c_str(), rho,
              w.union_of_4());
  std::fflush(stdout);
  for (const auto& [name, path, threshold] : variants) {
    w.measure(("attend " + name).c_str(), rounds, w.attend_flop(),
              [&](int set, Stream s) { w.attend(set, path, s, threshold); });
    w.measure(("whole " + name).c_str(), rounds, w.index_flop() + w.attend_flop(),
              [&](int set, Stream s) {
                w.index(set, s);
                w.attend(set, path, s, threshold);
              });
  }
  for (const Mode8& mode : modes) {
    w.report_agreement(mode);
    w.measure(("index8 " + mode.name).c_str(), rounds, w.index_flop(),
              [&](int set, Stream s) { w.index8(set, mode, s); });
    w.measure(("whole8 " + mode.name + " " + variants[0].name).c_str(), rounds,
              w.index_flop() + w.attend_flop(), [&](int set, Stream s) {
                w.index8(set, mode, s);
                w.attend(set, variants[0].path, s, variants[0].threshold);
              });
  }
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::stringstream stream(text);
  for (std::string part; std::getline(stream, part, ',');) parts.push_back(part);
  return parts;
}

}  // namespace
}  // namespace m3

int main(int argc, char** argv) {
  using namespace m3;
  int rounds = 20;
  std::vector<float> rhos = {0.0f, 0.99f};
  std::vector<std::string> cases = {"8192",   "16384",      "32768",      "65536",
                                    "131072", "300+131072", "dense:8192", "dense:32768"};
  std::vector<std::string> paths = {"tile", "hybrid", "rows"};
  std::vector<Mode8> modes;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string arg = argv[i], value = argv[i + 1];
    if (arg == "--rounds") rounds = std::atoi(value.c_str());
    if (arg == "--rho") {
      rhos.clear();
      for (const std::string& part : split(value))
        rhos.push_back(std::strtof(part.c_str(), nullptr));
    }
    if (arg == "--only") cases = split(value);
    if (arg == "--paths") paths = split(value);
    if (arg == "--index8") {
      for (const std::string& part : split(value)) modes.push_back({part, part == "exact" ? 64 : std::atoi(part.c_str()), part == "exact"});
    }
  }
  try {
    cudaDeviceProp prop;
    M3_CUDA_CHECK(cudaGetDeviceProperties(&prop, 0));
    std::printf("{\"device\": \"%s\", \"sms\": %d}\n", prop.name, prop.multiProcessorCount);
    std::vector<Variant> variants;
    for (const std::string& name : paths) variants.push_back(parse_variant(name));
    for (const std::string& text : cases) {
      const Case c = parse_case(text);
      for (float rho : rhos) {
        run_case(c, rho, rounds, variants, modes);
        if (c.dense) break;
      }
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
