// Inputs of goldens (tests/golden/README.md, "Inputs by rule") as fp32 arrays, and stored results as fp32.
#pragma once
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "formats/safetensors.h"
#include "tensor/tensor.h"

namespace m3::verify {

// The elements, row-major, of an input of this shape described by `spec`:
//   {"rule": "normal", "seed", "std"} or {"rule": "integers", "seed", "low", "high"}, rounded to bf16 if
//   `dtype` is bf16, or {"tensor": NAME}, stored as in.NAME in `tensors` with that shape and dtype.
// `tensors` may be null if the case has no file. Throws if the spec is of another form.
std::vector<float> golden_input(const nlohmann::ordered_json& spec, const Shape& shape, DType dtype,
                                const SafetensorsFile* tensors);

// Token ids: a list of numbers or {"rule": "integers", "seed", "count", "low", "high"}.
std::vector<int32_t> golden_ids(const nlohmann::ordered_json& spec);

// The elements of a CPU tensor of type f32, bf16, f64 or i32 as fp32.
std::vector<float> to_f32(const Tensor& tensor);

}  // namespace m3::verify
