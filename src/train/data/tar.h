// tar archives in the POSIX ustar form (IEEE 1003.1-1988), as WebDataset reads them: regular files only,
// names up to 100 bytes. Every member is a 512-byte header and its bytes, padded to 512.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "train/data/document.h"

namespace m3::data {

inline constexpr int64_t kTarBlock = 512;

std::string tar_header(std::string_view name, uint64_t size);  // one block
inline int64_t tar_padding(uint64_t size) { return static_cast<int64_t>((kTarBlock - size % kTarBlock) % kTarBlock); }
inline std::string tar_end() { return std::string(2 * kTarBlock, '\0'); }

// The members of a piece of an archive that begins and ends at member borders. Throws Error naming the
// byte (counted from `offset`) for a damaged header, a name or type that we do not write, a cut member.
std::vector<Member> read_tar(std::string_view piece, uint64_t offset);

}  // namespace m3::data
