// Decode step of one layer on one GPU: index scores, choice of blocks, attention. Cold cache: every
// step reads another layer's cache, and at least 256 MB lie between two uses of a layer. All steps
// of a round are one CUDA graph; time = graph time / steps; median, p10 and p90 over the rounds.
// Prints one JSON line per case and variant.
//   msa_decode [--rounds 20] [--only 1x131072,64x131072x8] [--sweep] [--full] [--int8]
//   --only: batch x context [x query tokens]; --sweep: also other tunings and the two kernels
//   alone;
//   --full: attention over all keys instead; --int8: also 8-bit index keys with rescoring
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/rng.h"
#include "ops/attend/attend_decode.h"
#include "ops/index_select/index_decode8.h"
#include "ops/index_select/index_select_decode.h"
#include "tensor/cuda_check.h"

namespace m3 {
namespace {

constexpr double kIndexBytesPerToken = 256, kAttendBytesPerRow = 4.0 * 16 * 65536,
                 kPeakBytes = 4.5e12;

// Unit normals by Box-Muller over a hash of the position.
__global__ void fill_normal(__nv_bfloat16* out, int64_t n, uint64_t seed) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n / 2; i += stride) {
    uint64_t x = seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(i);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x ^= x >> 31;
    const float u = (static_cast<float>(x >> 40) + 0.5f) * 0x1p-24f;
    const float angle = static_cast<float>(x & 0xffffff) * 0x1p-24f * 6.2831853f;
    const float radius = sqrtf(-2.0f * __logf(u));
    reinterpret_cast<__nv_bfloat162*>(out)[i] =
        __floats2bfloat162_rn(radius * __cosf(angle), radius * __sinf(angle));
  }
}

struct Layer {
  IndexKeys8 keys8;
  __nv_bfloat16 *x = nullptr, *k = nullptr, *v = nullptr, *q = nullptr, *qi = nullptr, *o = nullptr;
};

template <typename T>
T* allocate(int64_t count) {
  void* data = nullptr;
  M3_CUDA_CHECK(cudaMalloc(&data, std::max<int64_t>(16, count * sizeof(T))));
  return static_cast<T*>(data);
}
__nv_bfloat16* random_values(int64_t count, uint64_t seed) {
  auto* data = allocate<__nv_bfloat16>(count);
  fill_normal<<<1024, 256>>>(data, count, seed);
  return data;
}

struct Case {
  int batch = 1, context = 0, queries = 1;
  std::string name() const { return fmt::format("b{}-{}-q{}", batch, context, queries); }
};

class Workload {
 public:
  Workload(const Case& c, bool full, bool int8) : case_(c), geometry_(msa_geometry_m3()) {
    blocks_ = (c.context + 127) / 128;
    pages_ = int64_t{c.batch} * blocks_;
    const double touched =
        full ? c.batch * double(c.context) * 2048
             : c.batch * (double(c.context) * kIndexBytesPerToken + kAttendBytesPerRow);
    const double held = double(pages_) * (32768 + 2 * 131072);
    num_layers_ = static_cast<int>(
        std::clamp(std::ceil(256e6 / touched), 1.0, std::max(1.0, std::floor(100e9 / held))));
    rows_ = int64_t{c.batch} * c.queries;
    for (int i = 0; i < num_layers_; ++i) {
      Layer layer;
      layer.x = random_values(pages_ * 128 * 128, 100 * i + 1);
      layer.k = random_values(pages_ * 4 * 128 * 128, 100 * i + 2);
      layer.v = random_values(pages_ * 4 * 128 * 128, 100 * i + 3);
      layer.q = random_values(rows_ * 64 * 128, 100 * i + 4);
      layer.qi = random_values(rows_ * 4 * 128, 100 * i + 5);
      layer.o = allocate<__nv_bfloat16>(rows_ * 64 * 128);
      if (int8) {
        layer.keys8 = {allocate<int8_t>(pages_ * 128 * 128), allocate<float>(pages_),
                       allocate<float>(pages_), allocate<float>(pages_)};
        index_keys8_convert(layer.x, 0, pages_, layer.keys8, {});
      }
      layers_.push_back(layer);
    }
    std::vector<int32_t> cu(c.batch + 1), lens(c.batch, c.context), table(pages_);
    for (int n = 0; n <= c.batch; ++n) cu[n] = n * c.queries;
    std::iota(table.begin(), table.end(), 0);
    Philox rng(1);
    for (int64_t i = pages_ - 1; i > 0; --i) std::swap(table[i], table[rng.below(i + 1)]);
    cu_q_ = upload(cu), seq_lens_ = upload(lens), page_table_ = upload(table);
    stride_ = index_decode_score_stride(blocks_);
    scores_ = allocate<float>(rows_ * 4 * stride_);
    ids_ = allocate<int32_t>(rows_ * 4 * 16);
    lse_ = allocate<float>(rows_ * 64);
    uncertified_ = allocate<int32_t>(c.batch);
    partial_ = allocate<uint8_t>(attend_decode_workspace_bytes(geometry_, rows_, 256));
    M3_CUDA_CHECK(cudaMemset(ids_, 0xff, rows_ * 4 * 16 * 4));
  }
  ~Workload() {
    for (Layer& l : layers_) {
      for (void* p : {(void*)l.x, (void*)l.k, (void*)l.v, (void*)l.q, (void*)l.qi, (void*)l.o,
                      (void*)l.keys8.codes_PBX, (void*)l.keys8.scale_P, (void*)l.keys8.error_P,
                      (void*)l.keys8.norm_P}) {
        cudaFree(p);
      }
    }
    for (void* p : {(void*)cu_q_, (void*)seq_lens_, (void*)page_table_, (void*)scores_, (void*)ids_,
                    (void*)lse_, (void*)partial_, (void*)uncertified_}) {
      cudaFree(p);
    }
  }

  IndexDecodeParams scan(int layer) const {
    return {.qi_TRX = layers_[layer].qi,
            .x_PBX = layers_[layer].x,
            .cu_q = cu_q_,
            .seq_lens = seq_lens_,
            .page_table = page_table_,
            .page_stride = blocks_,
            .num_seqs = case_.batch,
            .groups = 4,
            .topk = 16,
            .scores_TRM = scores_,
            .score_stride = stride_};
  }
  void index(int layer, const IndexDecodeTuning& tuning, Stream stream) {
    index_decode_scores(scan(layer), case_.queries, tuning, stream);
  }
  void index8(int layer, const IndexDecodeTuning& tuning, Stream stream) {
    IndexDecodeParams params = scan(layer);
    params.x_PBX = layers_[layer].keys8.codes_PBX, params.scale_P = layers_[layer].keys8.scale_P;
    index_decode_scores8(params, case_.queries, tuning, stream);
  }
  // exact: certificates, and the second scan of sequences without one.
  void rescore(int layer, int candidates, Stream stream, bool exact = false) {
    if (exact)
      M3_CUDA_CHECK(cudaMemsetAsync(uncertified_, 0, case_.batch * 4,
                                    static_cast<cudaStream_t>(stream.handle)));
    const IndexRescoreParams params = {.scan = scan(layer),
                                       .keys = layers_[layer].keys8,
                                       .candidates = candidates,
                                       .num_queries = rows_,
                                       .ids_RTK = ids_,
                                       .uncertified_N = exact ? uncertified_ : nullptr};
    index_decode_rescore(params, blocks_, !exact, stream);
    if (exact) index_decode_exact(params, case_.queries, blocks_, stream);
  }
  // How the 8-bit choices of layer 0 compare with the bf16 one: share of equal ids, share of
  // certified rows.
  void report_agreement() {
    const auto ids = [&](const std::function<void()>& select) {
      select();
      std::vector<int32_t> values(rows_ * 4 * 16);
      M3_CUDA_CHECK(cudaDeviceSynchronize());
      M3_CUDA_CHECK(cudaMemcpy(values.data(), ids_, values.size() * 4, cudaMemcpyDeviceToHost));
      return values;
    };
    const std::vector<int32_t> want = ids([&] { index(0, {}, {}), choose({}); });
    const auto share = [&](const std::vector<int32_t>& got) {
      int64_t found = 0;
      for (size_t row = 0; row < got.size(); row += 16) {
        for (int i = 0; i < 16; ++i)
          found += std::count(want.begin() + row, want.begin() + row + 16, got[row + i]) > 0;
      }
      return static_cast<double>(found) / static_cast<double>(got.size());
    };
    const double approx = share(ids([&] { index8(0, {.stages = 6}, {}), choose({}); }));
    std::string lines;
    for (const int candidates : {24, 32, 64}) {
      const double rescored =
          share(ids([&] { index8(0, {.stages = 6}, {}), rescore(0, candidates, {}); }));
      const double exact =
          share(ids([&] { index8(0, {.stages = 6}, {}), rescore(0, candidates, {}, true); }));
      std::vector<int32_t> flags(case_.batch);
      M3_CUDA_CHECK(
          cudaMemcpy(flags.data(), uncertified_, flags.size() * 4, cudaMemcpyDeviceToHost));
      const int uncertified = std::accumulate(flags.begin(), flags.end(), 0);
      lines += fmt::format(
          ", \"rescore {} agrees\": {:.6f}, \"exact {} agrees\": {:.6f}, \"uncertified rows {}\": "
          "{}",
          candidates, rescored, candidates, exact, candidates, uncertified);
    }
    std::printf("{\"case\": \"%s\", \"rows\": %lld, \"approx agrees\": %.6f%s}\n",
                case_.name().c_str(), static_cast<long long>(rows_ * 4), approx, lines.c_str());
    std::fflush(stdout);
  }
  void choose(Stream stream) {
    index_decode_choose({.scores_TRM = scores_,
                         .score_stride = stride_,
                         .cu_q = cu_q_,
                         .seq_lens = seq_lens_,
                         .num_seqs = case_.batch,
                         .groups = 4,
                         .topk = 16,
                         .num_queries = rows_,
                         .ids_RTK = ids_},
                        blocks_, true, stream);
  }
  // own_choice: from the scores, where one query token allows it; else from the ids.
  void attend(int layer, bool full, const AttendDecodeTuning& tuning, Stream stream,
              bool own_choice = true) {
    AttendDecodeParams p = {
        .q_THD = layers_[layer].q,
        .k_PRBD = layers_[layer].k,
        .v_PRBD = layers_[layer].v,
        .num_pages = pages_,
        .o_THD = layers_[layer].o,
        .lse_TH = lse_,
        .cu_q = cu_q_,
        .seq_lens = seq_lens_,
        .page_table = page_table_,
        .page_stride = blocks_,
        .num_seqs = case_.batch,
        .groups = 4,
        .heads_per_group = 16,
        .topk = 16,
        .num_queries = rows_,
        .scale_log2 = static_cast<float>(geometry_.logit_scale() * 1.4426950408889634),
        .partial = reinterpret_cast<float*>(partial_)};
    if (!full) {
      p.ids_RTK = ids_;
      if (case_.queries == 1 && own_choice) p.scores_TRM = scores_, p.score_stride = stride_;
    }
    attend_decode(p, case_.queries, tuning, stream);
  }

  // Steps of one graph; each uses the next layer.
  void measure(const char* variant, int rounds, double bytes,
               const std::function<void(int, Stream)>& step) {
    const int steps = std::max(20, num_layers_);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    M3_CUDA_CHECK(cudaStreamCreate(&stream));
    M3_CUDA_CHECK(cudaEventCreate(&begin));
    M3_CUDA_CHECK(cudaEventCreate(&end));
    M3_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < steps; ++i) step(i % num_layers_, Stream{stream});
    M3_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    M3_CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> us;
    for (int round = -5; round < rounds; ++round) {
      M3_CUDA_CHECK(cudaEventRecord(begin, stream));
      M3_CUDA_CHECK(cudaGraphLaunch(exec, stream));
      M3_CUDA_CHECK(cudaEventRecord(end, stream));
      M3_CUDA_CHECK(cudaStreamSynchronize(stream));
      float ms = 0;
      M3_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
      if (round >= 0) us.push_back(ms * 1000 / static_cast<float>(steps));
    }
    std::sort(us.begin(), us.end());
    const auto at = [&](double share) {
      return us[static_cast<size_t>(share * static_cast<double>(us.size() - 1))];
    };
    std::printf(
        "{\"case\": \"%s\", \"batch\": %d, \"context\": %d, \"queries\": %d, \"variant\": \"%s\", "
        "\"median_us\": %.3f, \"p10_us\": %.3f, \"p90_us\": %.3f, \"steps\": %d, \"layers\": %d, "
        "\"bytes\": %.0f, \"share_of_4.5TB/s\": %.3f}\n",
        case_.name().c_str(), case_.batch, case_.context, case_.queries, variant, at(0.5), at(0.1),
        at(0.9), steps, num_layers_, bytes, bytes / kPeakBytes * 1e6 / at(0.5));
    std::fflush(stdout);
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    cudaStreamDestroy(stream);
  }

  double index_bytes() const {
    return blocks_ > 16 ? case_.batch * double(blocks_ - 1) * 32768 : 0;
  }
  double attend_bytes() const {
    return case_.batch * 4.0 * double(std::min<int64_t>(16, blocks_)) * 65536;
  }
  double full_bytes() const { return case_.batch * double(case_.context) * 2048; }

 private:
  static int32_t* upload(const std::vector<int32_t>& values) {
    int32_t* data = allocate<int32_t>(static_cast<int64_t>(values.size()));
    M3_CUDA_CHECK(cudaMemcpy(data, values.data(), values.size() * 4, cudaMemcpyHostToDevice));
    return data;
  }
  Case case_;
  MsaGeometry geometry_;
  int64_t blocks_ = 0, pages_ = 0, rows_ = 0, stride_ = 0;
  int num_layers_ = 1;
  std::vector<Layer> layers_;
  int32_t *cu_q_ = nullptr, *seq_lens_ = nullptr, *page_table_ = nullptr, *ids_ = nullptr,
          *uncertified_ = nullptr;
  float *scores_ = nullptr, *lse_ = nullptr;
  uint8_t* partial_ = nullptr;
};

void run_case(const Case& c, int rounds, bool sweep, bool full, bool int8) {
  Workload w(c, full, int8);
  const MsaGeometry g = msa_geometry_m3();
  const AttendDecodeTuning best = attend_decode_tuning(g, c.batch, c.queries, c.context, full);
  if (full) {
    w.measure(fmt::format("full default s{}", best.splits).c_str(), rounds, w.full_bytes(),
              [&](int layer, Stream s) { w.attend(layer, true, best, s); });
    if (!sweep) return;
    for (const int cluster : {1, 4, 8}) {
      for (const int ctas : {132, 264, 528}) {
        AttendDecodeTuning t = best;
        t.cluster = cluster, t.splits = std::clamp(ctas / (c.batch * 4 * cluster), 1, 128);
        w.measure(fmt::format("full c{} s{}", t.cluster, t.splits).c_str(), rounds, w.full_bytes(),
                  [&](int layer, Stream s) { w.attend(layer, true, t, s); });
      }
    }
    return;
  }
  const auto whole = [&](const IndexDecodeTuning& ti, const AttendDecodeTuning& ta) {
    return [&w, &c, ti, ta](int layer, Stream s) {
      w.index(layer, ti, s);
      if (c.queries > 1) w.choose(s);
      w.attend(layer, false, ta, s);
    };
  };
  const double bytes = w.index_bytes() + w.attend_bytes();
  w.measure(fmt::format("default c{}", best.cluster).c_str(), rounds, bytes, whole({}, best));
  w.measure("dependent steps", rounds, bytes, whole({.dependent = true}, best));
  if (int8) {
    const double bytes8 = w.index_bytes() / 2 + w.attend_bytes();
    for (const bool dependent : {false, true}) {
      w.measure(fmt::format("int8 rescore 32{}", dependent ? " dependent steps" : "").c_str(),
                rounds, bytes8, [&](int layer, Stream s) {
                  w.index8(layer, {.stages = 6, .dependent = dependent}, s);
                  w.rescore(layer, 32, s);
                  w.attend(layer, false, best, s, false);
                });
    }
    for (const int candidates : {32, 64}) {
      w.measure(fmt::format("int8 exact {}", candidates).c_str(), rounds, bytes8,
                [&](int layer, Stream s) {
                  w.index8(layer, {.stages = 6}, s);
                  w.rescore(layer, candidates, s, true);
                  w.attend(layer, false, best, s, false);
                });
    }
    w.report_agreement();
    for (const bool dependent : {false, true}) {
      w.measure(fmt::format("int8 approx{}", dependent ? " dependent steps" : "").c_str(), rounds,
                bytes8, [&](int layer, Stream s) {
                  w.index8(layer, {.stages = 6, .dependent = dependent}, s);
                  if (c.queries > 1) w.choose(s);
                  w.attend(layer, false, best, s);
                });
    }
    w.measure("index only", rounds, w.index_bytes(),
              [&](int layer, Stream s) { w.index(layer, {}, s); });
    w.measure("int8 index only", rounds, w.index_bytes() / 2,
              [&](int layer, Stream s) { w.index8(layer, {.stages = 6}, s); });
  }
  if (!sweep) return;
  for (const int stages : {3, 4}) {
    w.measure(fmt::format("index only st{}", stages).c_str(), rounds, w.index_bytes(),
              [&](int layer, Stream s) { w.index(layer, {.stages = stages}, s); });
  }
  for (const int cluster : {1, 2, 4, 8, 16}) {
    AttendDecodeTuning t = best;
    t.cluster = cluster;
    w.measure(fmt::format("c{}", cluster).c_str(), rounds, bytes, whole({}, t));
    w.measure(fmt::format("c{} dependent steps", cluster).c_str(), rounds, bytes,
              whole({.dependent = true}, t));
  }
  w.measure("attend only", rounds, w.attend_bytes(), [&](int layer, Stream s) {
    AttendDecodeTuning alone = best;
    alone.dependent = false;
    w.attend(layer, false, alone, s);
  });
  AttendDecodeTuning serial = best;
  serial.dependent = false;
  w.measure("no dependent launch", rounds, bytes, whole({}, serial));
}

}  // namespace
}  // namespace m3

int main(int argc, char** argv) {
  using namespace m3;
  int rounds = 20;
  bool sweep = false, full = false, int8 = false;
  std::vector<Case> cases;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--rounds" && i + 1 < argc) rounds = std::atoi(argv[++i]);
    if (arg == "--sweep") sweep = true;
    if (arg == "--full") full = true;
    if (arg == "--int8") int8 = true;
    if (arg == "--only" && i + 1 < argc) {
      for (char* token = std::strtok(argv[++i], ","); token != nullptr;
           token = std::strtok(nullptr, ",")) {
        Case c;
        if (std::sscanf(token, "%dx%dx%d", &c.batch, &c.context, &c.queries) >= 2)
          cases.push_back(c);
      }
    }
  }
  const int k = 1024;
  if (cases.empty()) {
    cases = {{1, 8 * k},   {1, 32 * k},   {1, 128 * k},  {1, 1024 * k}, {8, 32 * k},
             {8, 128 * k}, {8, 1024 * k}, {32, 128 * k}, {64, 128 * k}, {128, 32 * k}};
  }
  try {
    cudaDeviceProp prop;
    M3_CUDA_CHECK(cudaGetDeviceProperties(&prop, 0));
    std::printf("{\"device\": \"%s\", \"sms\": %d}\n", prop.name, prop.multiProcessorCount);
    for (const Case& c : cases) run_case(c, rounds, sweep, full, int8);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  return 0;
}
