// SHA-256 (FIPS 180-4): hashes of files in manifests, and items to splits. About 250 MB/s.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace m3 {

class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text);
  // Of everything so far; the object is not to be used afterwards.
  std::array<uint8_t, 32> digest();
  std::string hex();

 private:
  void block(const uint8_t* data);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> held_ = {};
  uint64_t num_bytes_ = 0;
};

std::string sha256_hex(std::string_view text);
std::string sha256_file(const std::filesystem::path& path);
// The first eight bytes as a big-endian number: a uniform 64-bit hash.
uint64_t sha256_u64(std::string_view text);

}  // namespace m3
