// For the tests of this folder: temporary folders, a tiny checkpoint to break, and checks of messages.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "formats/safetensors.h"

namespace m3 {

// A folder of its own for each test, removed at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    static int count = 0;
    path_ = std::filesystem::temp_directory_path() / fmt::format("m3_formats_{}_{}", ::getpid(), count++);
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

inline std::filesystem::path golden_model(const std::string& name) {
  return std::filesystem::path(M3_SOURCE_DIR) / "tests/golden/models" / name;
}

// `action` must throw Error whose message holds every one of these texts.
inline void expect_error(const std::function<void()>& action, const std::vector<std::string>& texts) {
  try {
    action();
  } catch (const Error& error) {
    for (const std::string& text : texts) {
      EXPECT_NE(std::string_view(error.what()).find(text), std::string_view::npos)
          << "message: " << error.what() << "\nlacks:   " << text;
    }
    return;
  }
  ADD_FAILURE() << "no error; wanted one that says " << (texts.empty() ? "" : texts[0]);
}

// The tensors of a file in memory, to be changed and written again.
struct EditableTensors {
  struct Item {
    DType dtype;
    Shape shape;
    std::string bytes;
    std::string stored_dtype;
  };
  std::map<std::string, Item> items;

  explicit EditableTensors(const std::filesystem::path& path) {
    const SafetensorsFile file(path);
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto bytes = tensor_bytes(file.tensor(entry));
      items[entry.name] = {entry.dtype, entry.shape,
                           std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), entry.stored_dtype};
    }
  }
  // Another type or shape, with zeros for data.
  void retype(const std::string& name, DType dtype, Shape shape) {
    items.at(name) = {dtype, shape, std::string(shape.numel() * dtype_bytes(dtype), '\0'), ""};
  }
  void rename(const std::string& from, const std::string& to) {
    auto node = items.extract(from);
    ASSERT_FALSE(node.empty()) << from;
    node.key() = to;
    items.insert(std::move(node));
  }
  void save(const std::filesystem::path& path) const {
    std::map<std::string, Tensor> tensors;
    for (const auto& [name, item] : items) {
      tensors[name] = Tensor(const_cast<char*>(item.bytes.data()), item.dtype, item.shape);
    }
    std::filesystem::remove(path);  // the old file may be mapped
    write_safetensors(path, tensors);
  }
};

}  // namespace m3
