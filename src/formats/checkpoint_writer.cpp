#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "formats/checkpoint.h"

namespace m3 {

namespace fs = std::filesystem;

CheckpointWriter::CheckpointWriter(const fs::path& folder, const std::string& config_json,
                                   const std::vector<TensorEntry>& table, int64_t shard_bytes)
    : folder_(folder.has_filename() ? folder : folder.parent_path()),  // "out/" is "out"
      partial_(folder_.string() + ".partial"), order_(table) {
  M3_CHECK(!fs::exists(folder_), "{} exists; choose another name or remove it", folder_.string());
  M3_CHECK(!order_.empty() && shard_bytes > 0, "{}: nothing to write", folder_.string());
  // Consecutive tensors share a shard until it is full; inside a shard larger elements come first, as the format
  // wants for alignment.
  int64_t bytes = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    if (i == 0 || bytes + order_[i].bytes() > shard_bytes) {
      shard_begin_.push_back(i);
      bytes = 0;
    }
    bytes += order_[i].bytes();
  }
  const size_t num_shards = shard_begin_.size();
  shard_begin_.push_back(order_.size());
  for (size_t shard = 0; shard < num_shards; ++shard) {
    std::stable_sort(order_.begin() + shard_begin_[shard], order_.begin() + shard_begin_[shard + 1],
                     [](const TensorSpec& a, const TensorSpec& b) { return dtype_bytes(a.dtype) > dtype_bytes(b.dtype); });
    shard_names_.push_back(num_shards == 1 ? "model.safetensors"
                                           : fmt::format("model-{:05}-of-{:05}.safetensors", shard + 1, num_shards));
  }
  fs::remove_all(partial_);  // left by a run that was interrupted
  std::error_code error;
  fs::create_directories(partial_, error);
  M3_CHECK(!error, "{}: cannot create the folder: {}", partial_.string(), error.message());
  write_file("config.json", config_json);
  if (num_shards > 1) {
    nlohmann::ordered_json index;
    index["metadata"]["total_size"] = total_bytes(order_);
    for (size_t shard = 0; shard < num_shards; ++shard) {
      for (size_t i = shard_begin_[shard]; i < shard_begin_[shard + 1]; ++i) {
        index["weight_map"][order_[i].name] = shard_names_[shard];
      }
    }
    write_file("model.safetensors.index.json", index.dump(1) + "\n");
  }
  open_shard(0);
}

CheckpointWriter::~CheckpointWriter() {
  if (finished_) return;
  writer_.reset();
  std::error_code ignored;
  fs::remove_all(partial_, ignored);
}

void CheckpointWriter::open_shard(size_t shard) {
  shard_ = shard;
  const std::vector<TensorSpec> tensors(order_.begin() + shard_begin_[shard], order_.begin() + shard_begin_[shard + 1]);
  writer_ = std::make_unique<SafetensorsWriter>(partial_ / shard_names_[shard], tensors);
}

void CheckpointWriter::write(std::string_view name, std::span<const std::byte> piece) {
  if (writer_->complete() && shard_ + 1 < shard_names_.size()) {
    writer_->finish();
    open_shard(shard_ + 1);
  }
  writer_->write(name, piece);
}

void CheckpointWriter::write(std::string_view name, const Tensor& tensor) {
  write(name, tensor_bytes(tensor));
}

void CheckpointWriter::write_file(const std::string& name, std::string_view content) {
  write_file_atomic(partial_ / name, content);
}

void CheckpointWriter::copy_file(const fs::path& file) { write_file(file.filename().string(), read_file(file)); }

void CheckpointWriter::finish() {
  M3_CHECK(shard_ + 1 == shard_names_.size(), "{}: only {} of {} shards were written", folder_.string(), shard_ + 1,
           shard_names_.size());
  writer_->finish();
  std::error_code error;
  fs::rename(partial_, folder_, error);
  M3_CHECK(!error, "{}: cannot rename {} to it: {}", folder_.string(), partial_.string(), error.message());
  finished_ = true;
}

}  // namespace m3
