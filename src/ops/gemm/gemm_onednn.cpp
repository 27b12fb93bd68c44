#include "ops/gemm/gemm_onednn.h"

#ifdef M3_HAVE_ONEDNN

#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <tuple>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "base/cpu_features.h"
#include "base/threads.h"

namespace m3 {
namespace {

using dnnl::memory;

memory::data_type data_type(GemmType type) {
  return type == GemmType::kF32 ? memory::data_type::f32 : memory::data_type::bf16;
}

bool suits(const GemmProblem& p) {
  if (p.m < 64 || p.n == 0 || p.k == 0 || p.a_rows != nullptr || p.b_rows != nullptr ||
      p.a_type != p.b_type)
    return false;
  return p.a_type == GemmType::kF32 ||
         (p.a_type == GemmType::kBf16 && cpu_isa() >= CpuIsa::kAvx512Bf16);
}

// oneDNN multiplies [m, k] by [k, n]: our b is stored as its transpose.
struct Shapes {
  memory::desc a, b, c, bias;
};
Shapes shapes_of(const GemmProblem& p) {
  using Strides = memory::dims;
  const auto desc = [](int64_t rows, int64_t cols, GemmType type, const Strides& strides) {
    return memory::desc({rows, cols}, data_type(type), strides);
  };
  return {desc(p.m, p.k, p.a_type, p.a_transposed ? Strides{1, p.m} : Strides{p.k, 1}),
          desc(p.k, p.n, p.b_type, p.b_transposed ? Strides{p.n, 1} : Strides{1, p.k}),
          desc(p.m, p.n, p.c_type, {p.n, 1}), desc(1, p.n, p.bias_type, {p.n, 1})};
}

dnnl::engine& engine() {
  static dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
  return cpu;
}

// oneDNN starts as many threads as OpenMP's setting of the calling thread says, and a thread that the program starts has
// the machine's number there, not ours.
int adopt_num_threads() {
  const int count = num_threads();
#ifdef _OPENMP
  if (omp_get_max_threads() != count) omp_set_num_threads(count);
#endif
  return count;
}

// Making a primitive costs far more than a small product; one is kept for each shape and number of threads.
dnnl::matmul cached_matmul(const GemmProblem& p, const Shapes& shapes) {
  using Key = std::tuple<int64_t, int64_t, int64_t, GemmType, GemmType, GemmType, int, int>;
  static std::mutex mutex;  // guards cache
  static std::map<Key, dnnl::matmul> cache;
  constexpr size_t kMostShapes = 512;
  const bool has_bias = p.bias != nullptr;
  const Key key = {p.m,
                   p.n,
                   p.k,
                   p.a_type,
                   p.c_type,
                   p.bias_type,
                   p.a_transposed + 2 * p.b_transposed + 4 * p.accumulate + 8 * has_bias,
                   adopt_num_threads()};
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second;
  if (cache.size() >= kMostShapes) cache.clear();
  dnnl::primitive_attr attributes;
  if (p.accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.0f);
    attributes.set_post_ops(add);
  }
  const auto desc = has_bias ? dnnl::matmul::desc(shapes.a, shapes.b, shapes.bias, shapes.c)
                             : dnnl::matmul::desc(shapes.a, shapes.b, shapes.c);
  return cache.emplace(key, dnnl::matmul({desc, attributes, engine()})).first->second;
}

}  // namespace

bool onednn_gemm(const GemmProblem& p) {
  if (!suits(p)) return false;
  const Shapes shapes = shapes_of(p);
  const dnnl::matmul matmul = cached_matmul(p, shapes);
  const auto view = [](const memory::desc& desc, const void* data) {
    return memory(desc, engine(), const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments = {{DNNL_ARG_SRC, view(shapes.a, p.a)},
                                               {DNNL_ARG_WEIGHTS, view(shapes.b, p.b)},
                                               {DNNL_ARG_DST, view(shapes.c, p.c)}};
  if (p.bias != nullptr) arguments.emplace(DNNL_ARG_BIAS, view(shapes.bias, p.bias));
  dnnl::stream stream(engine());
  matmul.execute(stream, arguments);
  stream.wait();
  return true;
}

}  // namespace m3

#else

namespace m3 {

bool onednn_gemm(const GemmProblem&) {
  return false;
}

}  // namespace m3

#endif
