#include "verify/msa_case.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tensor/device.h"
#include "verify/golden_input.h"

namespace m3::verify {
namespace {

constexpr int64_t kArenaBytes = int64_t{2} << 30;  // the largest case needs a few hundred MB

Shape input_shape(const MsaCase& c, const std::string& name) {
  const MsaGeometry& g = c.geometry;
  const int64_t T = c.num_queries(), S = c.num_keys();
  if (name == "q" || name == "dO") return {T, g.heads(), g.head_dim};
  if (name == "k" || name == "v") return {S, g.groups, g.head_dim};
  if (name == "qi") return {T, g.groups, g.index_dim};
  if (name == "ki" || name == "kx") return {S, g.index_dim};
  if (name == "qx") return {T, c.dsa_heads, g.index_dim};
  if (name == "wx") return {T, c.dsa_heads};
  M3_FAIL("{}: input '{}' is unknown", c.name, name);
}

}  // namespace

std::vector<float> MsaCase::expected(const std::string& output) const { return to_f32(file->get("out." + output)); }

std::vector<int32_t> MsaCase::expected_ints(const std::string& output) const {
  const Tensor tensor = file->get("out." + output);
  return {tensor.ptr<int32_t>(), tensor.ptr<int32_t>() + tensor.numel()};
}

std::vector<int32_t> MsaCase::stored_rows() const {
  if (expects("rows")) return expected_ints("rows");
  std::vector<int32_t> rows(num_queries());
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

MsaCase load_msa_case(const std::filesystem::path& file, const nlohmann::ordered_json& document) {
  MsaCase c;
  c.name = document.at("name");
  c.file = std::make_unique<SafetensorsFile>(std::filesystem::path(file).replace_extension(".safetensors"));
  const auto& g = document.at("geometry");
  c.geometry = {.groups = g.at("groups"), .heads_per_group = g.at("heads_per_group"), .head_dim = g.at("head_dim"),
                .index_dim = g.at("index_dim"), .block = g.at("block"), .topk = g.at("topk"), .local = g.at("local"),
                .init = g.at("init"), .scale = g.at("scale"), .scale_x = g.at("scale_x")};
  c.dsa_heads = g.value("dsa_heads", 0);
  c.dtype = document.at("dtype") == "bf16" ? DType::kBF16 : DType::kF32;
  c.cu_q = document.at("cu_q").get<std::vector<int32_t>>();
  c.cu_k = document.at("cu_k").get<std::vector<int32_t>>();

  const auto& run = document.at("run");
  c.mode = run.at("mode");
  if (c.mode == "msa") {
    c.support = AttendSupport::blocks();
  } else if (c.mode == "full") {
    c.support = AttendSupport::full();
  } else if (c.mode == "window") {
    c.support = AttendSupport::sliding(run.at("window"), run.value("sink", 0));
  } else if (c.mode == "dsa") {
    c.support = AttendSupport::tokens(run.at("budget"));
  } else {
    M3_FAIL("{}: mode '{}' is unknown, want msa, full, window or dsa", c.name, c.mode);
  }
  c.has_selection = c.expects("ids");
  c.backward = run.value("backward", false);
  c.kl = run.value("kl", "");
  c.kl_weight = run.value("kl_weight", 0.0);
  c.key_row_stride = document.value("key_row_stride", 1);
  for (const auto& [name, spec] : document.at("inputs").items()) {
    c.inputs[name] = golden_input(spec, input_shape(c, name), c.dtype, c.file.get());
  }
  return c;
}

MsaMemory::MsaMemory(Device device)
    : device_(device), arena_("golden", kArenaBytes, device), staging_("golden staging", kArenaBytes) {}

Tensor MsaMemory::upload(const std::vector<float>& values, DType dtype, Shape shape) {
  const Tensor host = staging_.alloc("staging", dtype, shape), tensor = arena_.alloc("input", dtype, shape);
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kBF16) {
      host.ptr<bf16>()[i] = bf16(values[i]);
    } else {
      host.ptr<float>()[i] = values[i];
    }
  }
  copy(host, tensor);
  return tensor;
}

Tensor MsaMemory::upload(const std::vector<int32_t>& values, Shape shape) {
  const Tensor tensor = arena_.alloc("input", DType::kI32, shape);
  copy(Tensor(const_cast<int32_t*>(values.data()), DType::kI32, shape), tensor);
  synchronize({}, device_);
  return tensor;
}

Tensor MsaMemory::poisoned(DType dtype, Shape shape) {
  const Tensor host = staging_.alloc("staging", dtype, shape), tensor = arena_.alloc("output", dtype, shape);
  std::memset(host.data(), 0xff, host.bytes());
  copy(host, tensor);
  return tensor;
}

void* MsaMemory::workspace(int64_t bytes) { return arena_.alloc_bytes("workspace", std::max<int64_t>(bytes, 1)); }

std::vector<float> MsaMemory::download(const Tensor& tensor) {
  const Tensor host = staging_.alloc("staging", tensor.dtype(), tensor.shape());
  copy(tensor, host);
  synchronize({}, device_);
  return to_f32(host);
}

std::vector<int32_t> MsaMemory::download_ints(const Tensor& tensor) {
  std::vector<int32_t> values(tensor.numel());
  copy(tensor, Tensor(values.data(), DType::kI32, tensor.shape()));
  synchronize({}, device_);
  return values;
}

RowErrors row_errors(const std::vector<float>& got, const std::vector<float>& want, int64_t width) {
  M3_CHECK(got.size() == want.size(), "{} values, want {}", got.size(), want.size());
  const int64_t rows = static_cast<int64_t>(want.size()) / width;
  double square = 0;
  for (float x : want) square += double{x} * x;
  const double floor = rows > 0 ? 0.1 * std::sqrt(square / rows) : 0;
  RowErrors errors;
  for (int64_t row = 0; row < rows; ++row) {
    double miss = 0, norm = 0;
    for (int64_t i = row * width; i < (row + 1) * width; ++i) {
      miss += (double{got[i]} - want[i]) * (double{got[i]} - want[i]);
      norm += double{want[i]} * want[i];
    }
    double error = miss == 0 ? 0 : std::sqrt(miss) / std::max({std::sqrt(norm), floor, 1e-300});
    if (std::isnan(error)) error = std::numeric_limits<double>::infinity();
    errors.mean += error / rows;
    errors.max = std::max(errors.max, error);
  }
  return errors;
}

double worst_ratio(const std::vector<float>& got, const std::vector<float>& want, double absolute, double relative) {
  M3_CHECK(got.size() == want.size(), "{} values, want {}", got.size(), want.size());
  double worst = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    const double ratio = std::abs(double{got[i]} - want[i]) / (absolute + relative * std::abs(double{want[i]}));
    worst = std::isnan(ratio) ? std::numeric_limits<double>::infinity() : std::max(worst, ratio);
  }
  return worst;
}

std::vector<float> pick_rows(const std::vector<float>& values, const std::vector<int32_t>& rows, int64_t width) {
  std::vector<float> picked;
  picked.reserve(rows.size() * width);
  for (int32_t row : rows) picked.insert(picked.end(), values.begin() + row * width, values.begin() + (row + 1) * width);
  return picked;
}

}  // namespace m3::verify
