// safetensors files: a little-endian u64 header length, a JSON header that maps each name to dtype,
// shape and data_offsets [begin, end) counted from the end of the header, then raw row-major data
// (model.md §3). Reading is by memory map: opening a file reads its header only.
//
// The reader is strict. It refuses, with a message that names the file, the tensor, what was found and
// what was expected: a length beyond the file or 100 MB, JSON that is not exactly of the form above,
// duplicate names, element types other than those below, more than six axes, offsets that disagree
// with shape x type, overlap, leave holes, do not start on a multiple of the element size, or do not
// end with the file.
//
//   in the file  F64  F32  BF16  I64  I32  U8  F8_E4M3  F8_E8M0
//   as DType     kF64 kF32 kBF16 kI64 kI32 kU8 kE4M3    kU8 (the raw exponent byte)
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "tensor/tensor.h"

namespace m3 {

struct SafetensorsEntry {
  std::string name;
  std::string stored_dtype;  // as in the file: "BF16", "F8_E8M0"
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0, end = 0;  // bytes, from the start of the data
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their data, which covers the file without holes
  std::map<std::string, std::string> metadata;  // the optional __metadata__
  uint64_t data_begin = 0;                // byte in the file where data starts
};

// Reads the header of a whole file lying in memory; `file` is its name for messages.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, const std::string& file);

// An open file. Tensors are views of a read-only map and live as long as this object; writing to one
// crashes. Their addresses are aligned to the element size, no more. Reading is thread-safe.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return map_.path(); }
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }

  const SafetensorsEntry* find(std::string_view name) const;  // nullptr if absent
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  Tensor tensor(const SafetensorsEntry& entry) const;
  Tensor get(std::string_view name) const;  // throws naming file and tensor if absent
  int64_t size_bytes() const { return static_cast<int64_t>(map_.bytes().size()); }
  void release() const { map_.release(); }  // resident pages go back to the page cache

 private:
  MappedFile map_;
  SafetensorsHeader header_;
  std::vector<const SafetensorsEntry*> by_name_;  // sorted
};

std::span<const std::byte> tensor_bytes(const Tensor& tensor);  // of a CPU tensor

// What a writer is going to write.
struct TensorSpec {
  std::string name;
  DType dtype = DType::kBF16;
  Shape shape;
  int64_t bytes() const { return shape.numel() * dtype_bytes(dtype); }
};

// Writes one file as a stream. The tensors are known at the start and their data arrives in that order, each in
// any number of pieces; the file appears under its name when finish() returns (base/file.h, AtomicFile). Put
// types with larger elements first, so that every tensor is aligned to its element size.
class SafetensorsWriter {
 public:
  SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                    const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

  // The next bytes of `name`, which must be the tensor whose turn it is.
  void write(std::string_view name, std::span<const std::byte> piece);
  void write(std::string_view name, const Tensor& tensor);  // a whole tensor; type and shape are checked
  bool complete() const { return current_ == tensors_.size(); }
  void finish();  // throws if data is missing

 private:
  void skip_complete();

  AtomicFile file_;
  std::vector<TensorSpec> tensors_;
  size_t current_ = 0;
  int64_t written_ = 0;  // bytes of the current tensor
};

// All at once, for small files. Tensors lie on the CPU. Orders them by element size.
void write_safetensors(const std::filesystem::path& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata = {{"format", "pt"}});

}  // namespace m3
