#include "formats/safetensors.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "base/check.h"

namespace m3 {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's reference library
constexpr int64_t kHeaderAlignment = 64;           // of the data in files that we write

struct DTypeName {
  const char* name;
  DType dtype;
};
constexpr DTypeName kDTypeNames[] = {  // the first name of a type is the one that we write
    {"F64", DType::kF64}, {"F32", DType::kF32}, {"BF16", DType::kBF16},   {"I64", DType::kI64},
    {"I32", DType::kI32}, {"U8", DType::kU8},   {"F8_E4M3", DType::kE4M3}, {"F8_E8M0", DType::kU8},
};
constexpr const char* kKnownDTypes = "F64, F32, BF16, I64, I32, U8, F8_E4M3, F8_E8M0";

const DTypeName* find_dtype(std::string_view name) {
  for (const DTypeName& entry : kDTypeNames) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

const char* stored_name(DType dtype) {
  for (const DTypeName& entry : kDTypeNames) {
    if (dtype == entry.dtype) return entry.name;
  }
  return "?";
}

// Receives the header's JSON as events, so that no tree is built and a hostile header costs no more than its own
// size. Accepts exactly {name: {"dtype": s, "shape": [n...], "data_offsets": [n, n]}, "__metadata__": {s: s}}.
class HeaderEvents {
 public:
  using json = nlohmann::json;
  HeaderEvents(const std::string& file, SafetensorsHeader& header) : file_(file), header_(header) {}

  bool start_object(size_t) {
    switch (state_) {
      case State::kStart: state_ = State::kRoot; return true;
      case State::kTensorValue: state_ = State::kTensor; return true;
      case State::kMetadataValue: state_ = State::kMetadata; return true;
      default: unexpected("an object");
    }
  }
  bool key(std::string& key) {
    switch (state_) {
      case State::kRoot:
        M3_CHECK(names_.insert(key).second, "{}: header names {} twice", file_, quoted(key));
        if (key == "__metadata__") {
          state_ = State::kMetadataValue;
        } else {
          entry_ = {};
          entry_.name = key;
          has_dtype_ = has_shape_ = false;
          offsets_.clear();
          state_ = State::kTensorValue;
        }
        return true;
      case State::kTensor:
        if (key == "dtype" && !has_dtype_) {
          state_ = State::kDType;
        } else if (key == "shape" && !has_shape_) {
          state_ = State::kShapeValue;
        } else if (key == "data_offsets" && offsets_.empty()) {
          state_ = State::kOffsetsValue;
        } else {
          M3_FAIL("{}: tensor {} has an unknown or repeated field {} (want dtype, shape, data_offsets)", file_,
                  quoted(entry_.name), quoted(key));
        }
        return true;
      case State::kMetadata: metadata_key_ = key; return true;
      default: unexpected("a key");
    }
  }
  bool end_object() {
    switch (state_) {
      case State::kTensor: finish_tensor(); state_ = State::kRoot; return true;
      case State::kMetadata: state_ = State::kRoot; return true;
      case State::kRoot: state_ = State::kEnd; return true;
      default: unexpected("the end of an object");
    }
  }
  bool start_array(size_t) {
    switch (state_) {
      case State::kShapeValue: has_shape_ = true; state_ = State::kShape; return true;
      case State::kOffsetsValue: state_ = State::kOffsets; return true;
      default: unexpected("an array");
    }
  }
  bool end_array() {
    if (state_ == State::kOffsets) {
      M3_CHECK(offsets_.size() == 2, "{}: tensor {} has {} data_offsets (want begin and end)", file_,
               quoted(entry_.name), offsets_.size());
    }
    state_ = State::kTensor;
    return true;
  }
  bool number_unsigned(uint64_t value) {
    if (state_ == State::kShape) {
      M3_CHECK(entry_.shape.rank() < Shape::kMaxRank, "{}: tensor {} has more than {} axes", file_,
               quoted(entry_.name), Shape::kMaxRank);
      M3_CHECK(value <= uint64_t{1} << 48, "{}: tensor {} has an axis of {} elements (limit 2^48)", file_,
               quoted(entry_.name), value);
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (state_ == State::kOffsets) {
      M3_CHECK(offsets_.size() < 2, "{}: tensor {} has more than two data_offsets", file_, quoted(entry_.name));
      offsets_.push_back(value);
    } else {
      unexpected("a number");
    }
    return true;
  }
  bool string(std::string& value) {
    if (state_ == State::kDType) {
      const DTypeName* dtype = find_dtype(value);
      M3_CHECK(dtype != nullptr, "{}: tensor {} has element type {}; supported are {}", file_,
               quoted(entry_.name), quoted(value), kKnownDTypes);
      entry_.stored_dtype = dtype->name;
      entry_.dtype = dtype->dtype;
      has_dtype_ = true;
      state_ = State::kTensor;
    } else if (state_ == State::kMetadata) {
      header_.metadata[metadata_key_] = value;
    } else {
      unexpected("a string");
    }
    return true;
  }
  bool null() { unexpected("null"); }
  bool boolean(bool) { unexpected("true or false"); }
  bool number_integer(int64_t value) { unexpected(fmt::format("the negative number {}", value)); }
  bool number_float(double, const std::string& text) { unexpected("the number " + quoted(text)); }
  bool binary(json::binary_t&) { unexpected("binary data"); }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    M3_FAIL("{}: header is not JSON at byte {}: {}", file_, position, error.what());
  }

  // Names and strings from a file may be long or hold control characters; messages must stay readable.
  static std::string quoted(std::string_view text) {
    constexpr size_t kShown = 120;
    std::string shown = "'";
    for (char c : text.substr(0, kShown)) shown += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    return shown + (text.size() > kShown ? "...'" : "'");
  }

 private:
  enum class State {
    kStart, kRoot, kEnd, kMetadataValue, kMetadata,
    kTensorValue, kTensor, kDType, kShapeValue, kShape, kOffsetsValue, kOffsets
  };

  [[noreturn]] void unexpected(const std::string& what) {
    static constexpr const char* kWanted[] = {
        "an object", "a tensor name", "nothing", "an object for __metadata__", "text in __metadata__",
        "an object for the tensor", "dtype, shape or data_offsets", "text for dtype", "an array for shape",
        "axis lengths", "an array for data_offsets", "byte offsets"};
    M3_FAIL("{}: header holds {} where {} belongs{}", file_, what, kWanted[static_cast<int>(state_)],
            entry_.name.empty() ? "" : " (at tensor " + quoted(entry_.name) + ")");
  }

  void finish_tensor() {
    const std::string name = quoted(entry_.name);
    M3_CHECK(has_dtype_, "{}: tensor {} has no dtype", file_, name);
    M3_CHECK(has_shape_, "{}: tensor {} has no shape", file_, name);
    M3_CHECK(offsets_.size() == 2, "{}: tensor {} has no data_offsets", file_, name);
    entry_.begin = offsets_[0];
    entry_.end = offsets_[1];
    M3_CHECK(entry_.begin <= entry_.end, "{}: tensor {} has data_offsets [{}, {}], the end before the begin",
             file_, name, entry_.begin, entry_.end);
    uint64_t bytes = static_cast<uint64_t>(dtype_bytes(entry_.dtype));
    for (int axis = 0; axis < entry_.shape.rank(); ++axis) {
      M3_CHECK(!__builtin_mul_overflow(bytes, static_cast<uint64_t>(entry_.shape[axis]), &bytes),
               "{}: tensor {} of shape {} overflows 64 bits", file_, name, entry_.shape.str());
    }
    M3_CHECK(entry_.end - entry_.begin == bytes,
             "{}: tensor {} has {} bytes by data_offsets [{}, {}], but {} {} needs {}", file_, name,
             entry_.end - entry_.begin, entry_.begin, entry_.end, entry_.stored_dtype, entry_.shape.str(), bytes);
    header_.entries.push_back(std::move(entry_));
    entry_ = {};
  }

  const std::string& file_;
  SafetensorsHeader& header_;
  State state_ = State::kStart;
  SafetensorsEntry entry_;
  bool has_dtype_ = false, has_shape_ = false;
  std::vector<uint64_t> offsets_;
  std::string metadata_key_;
  std::unordered_set<std::string> names_;
};

// The tensors, in order, must cover the data exactly.
void check_layout(SafetensorsHeader& header, uint64_t data_bytes, const std::string& file) {
  auto& entries = header.entries;
  std::stable_sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  uint64_t at = 0;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry& entry : entries) {
    const std::string name = HeaderEvents::quoted(entry.name);
    M3_CHECK(entry.end <= data_bytes,
             "{}: tensor {} ends at byte {} of the data, but the file holds {} (cut short? copy or download it again)",
             file, name, entry.end, data_bytes);
    M3_CHECK(entry.begin >= at, "{}: tensor {} begins at byte {} of the data, inside tensor {} which ends at {}",
             file, name, entry.begin, HeaderEvents::quoted(previous ? previous->name : ""), at);
    M3_CHECK(entry.begin == at, "{}: bytes {} to {} of the data, before tensor {}, belong to no tensor", file, at,
             entry.begin, name);
    const uint64_t element = static_cast<uint64_t>(dtype_bytes(entry.dtype));
    M3_CHECK((header.data_begin + entry.begin) % element == 0,
             "{}: tensor {} ({}) lies at byte {} of the file, not a multiple of {}; write the file again with a "
             "current safetensors library", file, name, entry.stored_dtype, header.data_begin + entry.begin, element);
    at = entry.end;
    previous = &entry;
  }
  M3_CHECK(at == data_bytes, "{}: the last {} bytes belong to no tensor (data of {} bytes, tensors end at {})", file,
           data_bytes - at, data_bytes, at);
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> bytes, const std::string& file) {
  M3_CHECK(bytes.size() >= 8, "{}: {} bytes, too short for a safetensors file (header length takes 8)", file,
           bytes.size());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  M3_CHECK(header_bytes <= kMaxHeaderBytes, "{}: header length {} exceeds the limit of {}: not a safetensors file?",
           file, header_bytes, kMaxHeaderBytes);
  M3_CHECK(header_bytes <= bytes.size() - 8, "{}: header length {} but only {} bytes follow (cut short?)", file,
           header_bytes, bytes.size() - 8);
  SafetensorsHeader header;
  header.data_begin = 8 + header_bytes;
  const char* text = reinterpret_cast<const char*>(bytes.data()) + 8;
  M3_CHECK(header_bytes > 0 && text[0] == '{', "{}: header does not begin with '{{': not a safetensors file?", file);
  HeaderEvents events(file, header);
  nlohmann::json::sax_parse(text, text + header_bytes, &events);
  check_layout(header, bytes.size() - header.data_begin, file);
  return header;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : map_(path), header_(parse_safetensors_header(map_.bytes(), path.string())) {
  by_name_.reserve(header_.entries.size());
  for (const SafetensorsEntry& entry : header_.entries) by_name_.push_back(&entry);
  std::sort(by_name_.begin(), by_name_.end(), [](auto* a, auto* b) { return a->name < b->name; });
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto at = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                   [](const SafetensorsEntry* entry, std::string_view n) { return entry->name < n; });
  return at != by_name_.end() && (*at)->name == name ? *at : nullptr;
}

Tensor SafetensorsFile::tensor(const SafetensorsEntry& entry) const {
  const std::byte* data = map_.bytes().data() + header_.data_begin + entry.begin;
  return Tensor(const_cast<std::byte*>(data), entry.dtype, entry.shape);
}

Tensor SafetensorsFile::get(std::string_view name) const {
  const SafetensorsEntry* entry = find(name);
  M3_CHECK(entry != nullptr, "{}: no tensor '{}' among its {}", path().string(), name, entries().size());
  return tensor(*entry);
}

std::span<const std::byte> tensor_bytes(const Tensor& tensor) {
  M3_CHECK(tensor.device().is_cpu(), "tensor {} lies on {}; copy it to the CPU first", tensor.shape().str(),
           tensor.device().str());
  return {static_cast<const std::byte*>(tensor.data()), static_cast<size_t>(tensor.bytes())};
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path, std::vector<TensorSpec> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : file_(path), tensors_(std::move(tensors)) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t at = 0;
  for (const TensorSpec& tensor : tensors_) {
    M3_CHECK(at % dtype_bytes(tensor.dtype) == 0, "{}: tensor '{}' ({}) would lie at byte {}: put larger types first",
             path.string(), tensor.name, dtype_name(tensor.dtype), at);
    M3_CHECK(!header.contains(tensor.name), "{}: tensor '{}' given twice", path.string(), tensor.name);
    nlohmann::ordered_json shape = nlohmann::ordered_json::array();
    for (int axis = 0; axis < tensor.shape.rank(); ++axis) shape.push_back(tensor.shape[axis]);
    header[tensor.name] = {{"dtype", stored_name(tensor.dtype)},
                           {"shape", shape},
                           {"data_offsets", {at, at + tensor.bytes()}}};
    at += tensor.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 8 + kHeaderAlignment - 1) / kHeaderAlignment * kHeaderAlignment - 8, ' ');
  const uint64_t length = text.size();
  file_.write({reinterpret_cast<const char*>(&length), sizeof length});
  file_.write(text);
  skip_complete();
}

void SafetensorsWriter::skip_complete() {
  while (current_ < tensors_.size() && written_ == tensors_[current_].bytes()) {
    ++current_;
    written_ = 0;
  }
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> piece) {
  if (piece.empty()) return;
  M3_CHECK(current_ < tensors_.size() && tensors_[current_].name == name, "writing '{}' but it is the turn of '{}'",
           name, current_ < tensors_.size() ? tensors_[current_].name : "no tensor");
  const TensorSpec& tensor = tensors_[current_];
  M3_CHECK(static_cast<int64_t>(piece.size()) <= tensor.bytes() - written_, "tensor '{}' has {} bytes, {} are left, {} given",
           name, tensor.bytes(), tensor.bytes() - written_, piece.size());
  file_.write({reinterpret_cast<const char*>(piece.data()), piece.size()});
  written_ += static_cast<int64_t>(piece.size());
  skip_complete();
}

void SafetensorsWriter::write(std::string_view name, const Tensor& tensor) {
  const TensorSpec* next = complete() ? nullptr : &tensors_[current_];
  M3_CHECK(tensor.bytes() == 0 || (next && next->name == name && next->dtype == tensor.dtype() && next->shape == tensor.shape()),
           "tensor '{}' {} {} given, but the file has {} next", name, dtype_name(tensor.dtype()), tensor.shape().str(),
           next ? fmt::format("'{}' {} {}", next->name, dtype_name(next->dtype), next->shape.str()) : "nothing");
  write(name, tensor_bytes(tensor));
}

void SafetensorsWriter::finish() {
  M3_CHECK(complete(), "tensor '{}' has {} of {} bytes: the file is not complete", tensors_[current_].name,
           written_, tensors_[current_].bytes());
  file_.commit();
}

void write_safetensors(const std::filesystem::path& path, const std::map<std::string, Tensor>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSpec> specs;
  for (const auto& [name, tensor] : tensors) specs.push_back({name, tensor.dtype(), tensor.shape()});
  std::stable_sort(specs.begin(), specs.end(), [](const TensorSpec& a, const TensorSpec& b) {
    return dtype_bytes(a.dtype) > dtype_bytes(b.dtype);
  });
  SafetensorsWriter writer(path, specs, metadata);
  for (const TensorSpec& spec : specs) writer.write(spec.name, tensors.at(spec.name));
  writer.finish();
}

}  // namespace m3
