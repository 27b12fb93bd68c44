// How long a forward pass keeps its intermediates.
#pragma once
#include <cstdint>

namespace m3 {

enum class Keep : uint8_t { kNothing, kForBackward };

}  // namespace m3
