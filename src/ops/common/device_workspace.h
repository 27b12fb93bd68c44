// Cuts a caller's workspace into arrays. A null begin only counts: the end is then the size.
#pragma once
#include <cstdint>
#include <type_traits>

namespace m3 {

// Bytes of an array together with the gap behind it: arrays begin at multiples of 256 bytes, as
// tensor copies and 16-byte accesses want.
constexpr int64_t workspace_array_bytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// `pointer` gets `count` elements (bytes, if it is a void*) at `at`, which moves behind them.
template <typename T>
void workspace_take(char*& at, T*& pointer, int64_t count) {
  int64_t bytes = count;
  if constexpr (!std::is_void_v<T>) bytes *= static_cast<int64_t>(sizeof(T));
  pointer = reinterpret_cast<T*>(at);
  at += workspace_array_bytes(bytes);
}

}  // namespace m3
