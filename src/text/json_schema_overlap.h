// Whether two branches of oneOf can be told apart.
#pragma once
#include "text/json_value.h"

namespace m3 {

// true: no value satisfies both. Certain for branches of different types, and for objects that
// require one property with different constants; else false. References must have been followed.
bool schemas_are_disjoint(const JsonValue& a, const JsonValue& b);

}  // namespace m3
