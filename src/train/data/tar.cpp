#include "train/data/tar.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace m3::data {
namespace {

struct Field {
  size_t at, length;
};
constexpr Field kName{0, 100}, kMode{100, 8}, kUid{108, 8}, kGid{116, 8}, kSize{124, 12}, kTime{136, 12}, kSum{148, 8},
    kType{156, 1}, kMagic{257, 8};

void put_octal(std::string& header, Field field, uint64_t value) {
  const std::string digits = fmt::format("{:0{}o}", value, field.length - 1);
  header.replace(field.at, field.length - 1, digits);
}

// Sum of the header's bytes, its own checksum field counted as blanks.
uint32_t header_sum(std::string_view header) {
  uint32_t sum = 0;
  for (size_t i = 0; i < kTarBlock; ++i) {
    sum += i >= kSum.at && i < kSum.at + kSum.length ? ' ' : static_cast<unsigned char>(header[i]);
  }
  return sum;
}

uint64_t read_octal(std::string_view header, Field field, uint64_t offset) {
  uint64_t value = 0;
  int num_digits = 0;
  for (char c : header.substr(field.at, field.length)) {
    if (c == '\0' || (c == ' ' && num_digits > 0)) break;
    M3_CHECK(c >= '0' && c <= '7', "tar: damaged number in the header at byte {}", offset);
    value = value * 8 + static_cast<uint64_t>(c - '0');
    ++num_digits;
  }
  M3_CHECK(num_digits > 0, "tar: empty number in the header at byte {}", offset);
  return value;
}

}  // namespace

std::string tar_header(std::string_view name, uint64_t size) {
  constexpr uint64_t kMaxSize = (uint64_t{1} << 33) - 1;  // 11 octal digits
  M3_CHECK(!name.empty() && name.size() <= kName.length, "tar: member name \"{}\" must have 1 to 100 bytes", name);
  M3_CHECK(size <= kMaxSize, "tar: member {} has {} bytes, at most {} fit", name, size, kMaxSize);
  std::string header(kTarBlock, '\0');
  header.replace(kName.at, name.size(), name);
  put_octal(header, kMode, 0644);
  put_octal(header, kUid, 0);
  put_octal(header, kGid, 0);
  put_octal(header, kSize, size);
  put_octal(header, kTime, 0);  // equal documents give equal shards
  header[kType.at] = '0';
  header.replace(kMagic.at, kMagic.length, std::string_view("ustar\00000", 8));
  header.replace(kSum.at, kSum.length, fmt::format("{:06o}", header_sum(header)) + std::string("\0 ", 2));
  return header;
}

std::vector<Member> read_tar(std::string_view piece, uint64_t offset) {
  std::vector<Member> members;
  for (uint64_t at = 0; at < piece.size();) {
    M3_CHECK(piece.size() - at >= kTarBlock, "tar: cut inside the header at byte {}", offset + at);
    const std::string_view header = piece.substr(at, kTarBlock);
    M3_CHECK(header.substr(kMagic.at, 5) == "ustar", "tar: no member header at byte {}", offset + at);
    M3_CHECK(read_octal(header, kSum, offset + at) == header_sum(header), "tar: damaged header (checksum) at byte {}", offset + at);
    M3_CHECK(header[kType.at] == '0', "tar: a member at byte {} is no regular file", offset + at);
    std::string_view name = header.substr(kName.at, kName.length);
    name = name.substr(0, name.find('\0'));
    const uint64_t size = read_octal(header, kSize, offset + at);
    at += kTarBlock;
    M3_CHECK(size <= piece.size() - at, "tar: member {} at byte {} is cut", name, offset + at);
    members.push_back({std::string(name), std::string(piece.substr(at, size))});
    at += std::min<uint64_t>(size + tar_padding(size), piece.size() - at);
  }
  return members;
}

}  // namespace m3::data
