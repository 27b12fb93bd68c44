#include "train/parameters.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>
#include <tuple>

#include "base/threads.h"
#include "ops/adamw/adamw.h"

namespace m3::train {
namespace {

// Tensors start on multiples of 64 elements: 256 bytes of f32. The zeros between them stay zeros
// under AdamW.
constexpr int64_t kAlign = 64;

int64_t padded(int64_t numel) {
  return (numel + kAlign - 1) / kAlign * kAlign;
}

bool is_matrix(const TensorEntry& entry) {
  switch (entry.kind) {
    case TensorKind::kNorm:
    case TensorKind::kLayerNorm:
    case TensorKind::kBias:
    case TensorKind::kRouterBias:
      return false;
    default:
      return true;
  }
}

float decay_of(const TensorEntry& entry, const OptimizerConfig& optimizer) {
  if (!is_matrix(entry)) return 0;
  if (entry.kind == TensorKind::kEmbedding) return static_cast<float>(optimizer.embedding_decay);
  if (entry.kind == TensorKind::kHead) return static_cast<float>(optimizer.head_decay);
  return static_cast<float>(optimizer.groups[static_cast<int>(group_of(entry))].weight_decay);
}

// Flat memory of one kind, handed out in order.
class Flat {
 public:
  Flat(Arena& arena, const char* name, DType dtype, int64_t numel) {
    arena = Arena(name, numel * dtype_bytes(dtype) + Arena::kAlignment);
    all_ = arena.alloc(name, dtype, {numel});
  }
  Tensor take(int64_t numel, Shape shape) {
    const Tensor view = all_.rows(used_, used_ + numel).reshape(shape);
    used_ += padded(numel);
    return view;
  }
  int64_t used() const { return used_; }
  Tensor flat(int64_t begin, int64_t end) const { return all_.rows(begin, end); }

 private:
  Tensor all_;
  int64_t used_ = 0;
};

}  // namespace

Group group_of(const TensorEntry& entry) {
  if (entry.is_vision()) return Group::kVision;
  return entry.name.find(".self_attn.index_") != std::string::npos ? Group::kIndexer : Group::kText;
}

Parameters::Parameters(const ModelConfig& config, const OptimizerConfig& optimizer, DType compute,
                       const GroupFlags& trained)
    : config_(config), trained_(trained) {
  M3_CHECK(compute == DType::kF32 || compute == DType::kBF16,
           "training computes in f32 or bf16, not in {}", dtype_name(compute));
  for (TensorEntry& entry : tensor_table(config)) {
    Parameter parameter;
    parameter.group = group_of(entry);
    parameter.is_router_bias = entry.kind == TensorKind::kRouterBias;
    parameter.entry = std::move(entry);
    parameters_.push_back(std::move(parameter));
  }
  const auto has_copy = [&](const Parameter& p) {
    return compute == DType::kBF16 && p.entry.dtype == DType::kBF16;
  };
  const auto kind = [&](const Parameter& p) {
    return std::tuple(p.is_router_bias, p.group, decay_of(p.entry, optimizer), has_copy(p));
  };
  std::stable_sort(parameters_.begin(), parameters_.end(),
                   [&](const Parameter& a, const Parameter& b) { return kind(a) < kind(b); });

  int64_t total = 0, total_copies = 0, total_moments = 0;
  const auto has_moments = [&](const Parameter& p) {
    return !p.is_router_bias && has_state(p.group);
  };
  for (const Parameter& p : parameters_) {
    const int64_t numel = padded(p.entry.shape.numel());
    total += numel;
    if (has_copy(p)) total_copies += numel;
    if (has_moments(p)) total_moments += numel;
  }
  Flat masters(masters_arena_, "masters", DType::kF32, total),
      grads(gradients_arena_, "gradients", DType::kF32, total);
  Flat copies(copies_arena_, "bf16 weights", DType::kBF16, total_copies);
  Flat moments(moments_arena_, "moments", optimizer.moments,
               2 * total_moments);  // m of a segment, then its v

  for (size_t begin = 0; begin < parameters_.size();) {
    size_t end = begin;
    while (end < parameters_.size() && kind(parameters_[end]) == kind(parameters_[begin])) ++end;
    const int64_t at = masters.used(), copy_at = copies.used(), m_at = moments.used();
    for (size_t i = begin; i < end; ++i) {
      Parameter& p = parameters_[i];
      const int64_t numel = p.entry.shape.numel();
      p.master = masters.take(numel, p.entry.shape);
      p.gradient = grads.take(numel, p.entry.shape);
      if (has_copy(p)) p.copy = copies.take(numel, p.entry.shape);
      if (has_moments(p)) p.m = moments.take(numel, p.entry.shape);
    }
    const int64_t v_at = moments.used();
    for (size_t i = begin; i < end; ++i) {
      Parameter& p = parameters_[i];
      if (has_moments(p)) p.v = moments.take(p.entry.shape.numel(), p.entry.shape);
    }
    if (!parameters_[begin].is_router_bias) {
      const Parameter& first = parameters_[begin];
      Segment segment;
      segment.group = first.group;
      segment.weight_decay = decay_of(first.entry, optimizer);
      segment.master = masters.flat(at, masters.used());
      segment.gradient = grads.flat(at, grads.used());
      if (has_copy(first)) segment.copy = copies.flat(copy_at, copies.used());
      if (has_moments(first)) {
        segment.m = moments.flat(m_at, v_at);
        segment.v = moments.flat(v_at, moments.used());
        segments_.push_back(segment);
      }
      all_segments_.push_back(segment);
    }
    begin = end;
  }

  flat_gradients_ = grads.flat(0, grads.used());

  for (size_t i = 0; i < parameters_.size(); ++i) index_.emplace(parameters_[i].entry.name, i);
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string& name, Weight& weight) {
    const Parameter& p = find(name);
    weight = Weight(p.copy.defined() ? p.copy : p.master);
  };
  visitor.tensor = [&](const std::string& name, Tensor& tensor) {
    const Parameter& p = find(name);
    tensor = p.copy.defined() ? p.copy : p.master;
  };
  visit_parameters(config_, weights_, visitor);
  gradients_ = gradient_views(flat_gradients_);
}

// `flat` has the layout of flat_gradients_.
ModelWeights Parameters::gradient_views(const Tensor& flat) const {
  const auto view = [&](const std::string& name) {
    const Tensor& own = find(name).gradient;
    const int64_t at = own.ptr<float>() - flat_gradients_.ptr<float>();
    return flat.rows(at, at + own.numel()).reshape(own.shape());
  };
  ModelWeights views;
  ParameterVisitor visitor;
  visitor.matrix = [&](const std::string& name, Weight& weight) { weight = Weight(view(name)); };
  visitor.tensor = [&](const std::string& name, Tensor& tensor) { tensor = view(name); };
  visit_parameters(config_, views, visitor);
  return views;
}

GradientCopy Parameters::copy_of_gradients() const {
  GradientCopy copy;
  Flat memory(copy.arena, "gradients of a replica", DType::kF32, flat_gradients_.numel());
  copy.flat = memory.take(flat_gradients_.numel(), flat_gradients_.shape());
  std::memset(copy.flat.data(), 0, static_cast<size_t>(copy.flat.bytes()));
  copy.weights = gradient_views(copy.flat);
  return copy;
}

void Parameters::add_gradients(std::span<GradientCopy> copies) {
  float* sum = flat_gradients_.ptr<float>();
  constexpr int64_t kChunk = 4096;  // of the sum stays in the first cache
  const int64_t numel = flat_gradients_.numel();
  parallel_for((numel + kChunk - 1) / kChunk, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * kChunk, last = std::min(numel, first + kChunk);
      for (const GradientCopy& copy : copies) {
        float* part = copy.flat.ptr<float>();
        for (int64_t i = first; i < last; ++i) sum[i] += part[i];
        std::memset(part + first, 0, static_cast<size_t>(last - first) * sizeof(float));
      }
    }
  });
}

const Parameter& Parameters::find(std::string_view name) const {
  const auto found = index_.find(name);
  M3_CHECK(found != index_.end(), "the model has no parameter {}", name);
  return parameters_[found->second];
}

void Parameters::initialise(const InitScheme& scheme) {
  for (const Parameter& p : parameters_) {
    float* values = p.master.ptr<float>();
    parallel_for(p.master.numel(), [&](int64_t begin, int64_t end) {
      scheme(p.entry, begin, {values + begin, static_cast<size_t>(end - begin)});
    });
  }
  round_copies();
}

std::vector<const Parameter*> Parameters::load_weights(const Checkpoint& checkpoint) {
  std::set<std::string_view> stored_names;
  for (const TensorEntry& entry : checkpoint.table()) stored_names.insert(entry.name);
  std::vector<const Parameter*> missing;
  for (const Parameter& p : parameters_) {
    if (!stored_names.contains(p.entry.name)) {
      missing.push_back(&p);
      continue;
    }
    const StoredWeight& stored = checkpoint.weight(p.entry.name);
    M3_CHECK(!stored.is_mxfp8() && stored.data.shape() == p.entry.shape,
             "{}: {} is {} {}; training wants bf16 or f32 {}", checkpoint.folder().string(),
             p.entry.name, dtype_name(stored.data.dtype()), stored.data.shape().str(),
             p.entry.shape.str());
    float* to = p.master.ptr<float>();
    if (stored.data.dtype() == DType::kF32) {
      std::memcpy(to, stored.data.data(), static_cast<size_t>(stored.data.bytes()));
    } else {
      const bf16* from = stored.data.ptr<bf16>();
      for (int64_t i = 0; i < p.master.numel(); ++i) to[i] = to_float(from[i]);
    }
  }
  round_copies();
  return missing;
}

void Parameters::round_copies() {
  for (const Segment& segment : all_segments_) {
    if (!segment.copy.defined()) continue;
    const float* from = segment.master.ptr<float>();
    bf16* to = segment.copy.ptr<bf16>();
    parallel_for(segment.master.numel(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) to[i] = bf16(from[i]);
    });
  }
}

void Parameters::zero_gradients() {
  for (const Segment& segment : all_segments_) {
    std::memset(segment.gradient.data(), 0, static_cast<size_t>(segment.gradient.bytes()));
  }
}

double Parameters::gradient_sum_of_squares(Group group) const {
  double sum = 0;
  for (const Segment& segment : all_segments_) {
    if (segment.group == group) sum += grad_sum_of_squares(segment.gradient);
  }
  return sum;
}

GradientNorms Parameters::gradient_norms() const {
  GradientNorms out;
  out.layers.assign(static_cast<size_t>(config_.text.num_layers), 0.0);
  for (const Parameter& p : parameters_) {
    if (p.is_router_bias) continue;
    const double squares = grad_sum_of_squares(p.gradient);
    if (squares == 0 && has_state(p.group)) out.zeros.push_back(p.entry.name);
    if (p.entry.is_vision()) {
      (p.entry.name.starts_with("vision_tower.") ? out.tower : out.projector) += squares;
    } else if (p.group == Group::kText) {
      if (p.entry.layer >= 0) out.layers[p.entry.layer] += squares;
      if (p.entry.kind == TensorKind::kEmbedding) out.embedding += squares;
      if (p.entry.kind == TensorKind::kHead) out.head += squares;
      if (p.entry.kind == TensorKind::kRouter) out.routers += squares;
    }
  }
  for (double& layer : out.layers) layer = std::sqrt(layer);
  for (double* sum : {&out.embedding, &out.head, &out.routers, &out.tower, &out.projector})
    *sum = std::sqrt(*sum);
  return out;
}

int64_t Parameters::num_parameters() const {
  int64_t sum = 0;
  for (const Parameter& p : parameters_) sum += p.entry.shape.numel();
  return sum;
}

void Parameters::add_to_plan(MemoryPlan& plan) const {
  for (const Arena* arena : {&masters_arena_, &gradients_arena_, &copies_arena_, &moments_arena_}) {
    if (arena->used_bytes() > 0) plan.add(arena->name(), arena->used_bytes());
  }
}

}  // namespace m3::train
