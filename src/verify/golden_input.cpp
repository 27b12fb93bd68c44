#include "verify/golden_input.h"

#include <nlohmann/json.hpp>

#include "base/bf16.h"
#include "verify/rule.h"

namespace m3::verify {

std::vector<float> golden_input(const nlohmann::ordered_json& spec, const Shape& shape, DType dtype,
                                const SafetensorsFile* tensors) {
  M3_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "golden inputs are f32 or bf16, not {}", dtype_name(dtype));
  if (spec.contains("tensor")) {
    const std::string name = "in." + spec.at("tensor").get<std::string>();
    M3_CHECK(tensors != nullptr, "golden input {} is stored, but the case has no safetensors file", name);
    const Tensor tensor = tensors->get(name);
    M3_CHECK(tensor.shape() == shape && tensor.dtype() == dtype, "{}: {} is {} {}, the case wants {} {}",
             tensors->path().string(), name, dtype_name(tensor.dtype()), tensor.shape().str(), dtype_name(dtype),
             shape.str());
    return to_f32(tensor);
  }
  const std::string rule = spec.value("rule", "");
  M3_CHECK(rule == "normal" || rule == "integers", "golden input {} has no known rule", spec.dump());
  const bool normal = rule == "normal";
  const uint64_t seed = spec.at("seed");
  const double std = normal ? spec.at("std").get<double>() : 0;
  const int64_t low = normal ? 0 : spec.at("low").get<int64_t>(), high = normal ? 0 : spec.at("high").get<int64_t>();
  std::vector<float> values(static_cast<size_t>(shape.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    const float x = normal ? rule_normal(seed, i, std) : static_cast<float>(rule_integer(seed, i, low, high));
    values[i] = dtype == DType::kBF16 ? to_float(bf16(x)) : x;
  }
  return values;
}

std::vector<int32_t> golden_ids(const nlohmann::ordered_json& spec) {
  if (spec.is_array()) return spec.get<std::vector<int32_t>>();
  M3_CHECK(spec.value("rule", "") == "integers", "golden ids {} are neither a list nor a rule 'integers'", spec.dump());
  std::vector<int32_t> ids(spec.at("count").get<size_t>());
  for (size_t i = 0; i < ids.size(); ++i) {
    ids[i] = static_cast<int32_t>(rule_integer(spec.at("seed"), i, spec.at("low"), spec.at("high")));
  }
  return ids;
}

std::vector<float> to_f32(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.numel()));
  const auto widen = [&](const auto* from) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(from[i]);
  };
  switch (tensor.dtype()) {
    case DType::kF32: widen(tensor.ptr<float>()); break;
    case DType::kBF16: widen(tensor.ptr<bf16>()); break;
    case DType::kF64: widen(tensor.ptr<double>()); break;
    case DType::kI32: widen(tensor.ptr<int32_t>()); break;
    default: M3_FAIL("cannot widen {} to f32", dtype_name(tensor.dtype()));
  }
  return values;
}

}  // namespace m3::verify
