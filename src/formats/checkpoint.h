// A model folder: config.json, optionally generation_config.json, and the weights as model.safetensors or
// as shards with model.safetensors.index.json. Whatever form the files have, tensors are asked for by
// their released names (tensor_table.h). Accepted forms, model.md §3.3 and §11 (docs/checkpoints.md):
//
//   released             MiniMax's own names, routers and patch embedding in F32
//   transformers save    released names, but dense and vision MLPs under block_sparse_moe, all bf16
//   transformers native  save_original_format=False: its own names, fused gate_up and experts, all bf16
//   MXFP8                released names, each text matrix as F8_E4M3 with scales NAME.weight_scale_inv
//                        (U8 or F8_E8M0; NAME.weight_scale in ModelOpt's exports), decided per tensor
//
// Nothing is copied: weights are views of read-only file maps, also inside fused tensors (whose parts are
// contiguous). The exceptions are the few tensors that must be F32 and were saved as bf16; they are widened.
//
// Strict: a missing, extra, misshapen or wrongly typed tensor, scales without a matrix or the reverse, a shard
// that the index does not know are refused with file, tensor, found, expected and what to do.
#pragma once
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/config.h"
#include "formats/safetensors.h"
#include "formats/tensor_table.h"
#include "tensor/arena.h"

namespace m3 {

// A matrix, vector or other parameter as stored. Read-only: writing to it may crash.
struct StoredWeight {
  Tensor data;    // the type in tensor_table, or e4m3
  Tensor scales;  // with e4m3: u8 [out, in / 32], E8M0 exponents; the value is e4m3 * 2^(scale - 127) (base/fp8.h)
  bool is_mxfp8() const { return scales.defined(); }
};

class Checkpoint {
 public:
  static Checkpoint open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const ModelConfig& config() const { return config_; }
  const GenerationConfig& generation() const { return generation_; }
  const std::vector<TensorEntry>& table() const { return table_; }

  const StoredWeight& weight(std::string_view name) const;  // by released name; throws if the model has no such tensor
  const StoredWeight& weight(size_t index_in_table) const { return weights_[index_in_table]; }

  struct Skipped {
    std::string name, reason;
  };
  const std::vector<Skipped>& skipped() const { return skipped_; }  // tensors present and not used
  const std::string& form() const { return form_; }                 // "released", "transformers save", ...

  int64_t mapped_bytes() const;                                // of all weight files
  int64_t widened_bytes() const { return widened_.used_bytes(); }
  int num_files() const { return static_cast<int>(files_.size()); }
  void release() const;  // gives resident pages back to the page cache

 private:
  friend class CheckpointReader;
  std::filesystem::path folder_;
  ModelConfig config_;
  GenerationConfig generation_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<TensorEntry> table_;
  std::vector<StoredWeight> weights_;  // beside table_
  std::unordered_map<std::string_view, size_t> index_;  // name in table_ -> position
  std::vector<Skipped> skipped_;
  std::string form_;
  Arena widened_;
};

// Writes a checkpoint of the released form: model.safetensors, or shards with an index if the tensors exceed
// shard_bytes. They arrive in order(), each in any number of pieces. Everything goes to FOLDER.partial (an old
// one is removed), which is renamed at the end: a folder with the final name is complete. Refuses a folder that
// exists.
class CheckpointWriter {
 public:
  static constexpr int64_t kShardBytes = int64_t{5} << 30;

  // `config_json` is written as config.json as it is.
  CheckpointWriter(const std::filesystem::path& folder, const std::string& config_json,
                   const std::vector<TensorEntry>& table, int64_t shard_bytes = kShardBytes);
  ~CheckpointWriter();  // without finish(): removes what was written
  CheckpointWriter(const CheckpointWriter&) = delete;
  CheckpointWriter& operator=(const CheckpointWriter&) = delete;

  const std::vector<TensorEntry>& order() const { return order_; }  // `table`, arranged for writing
  void write(std::string_view name, std::span<const std::byte> piece);
  void write(std::string_view name, const Tensor& tensor);
  void copy_file(const std::filesystem::path& file);  // tokenizer.json and the like, into the folder
  void write_file(const std::string& name, std::string_view content);
  void finish();

 private:
  void open_shard(size_t shard);

  std::filesystem::path folder_, partial_;
  std::vector<TensorEntry> order_;
  std::vector<size_t> shard_begin_;  // first tensor of each shard, and the end
  std::vector<std::string> shard_names_;
  size_t shard_ = 0;
  std::unique_ptr<SafetensorsWriter> writer_;
  bool finished_ = false;
};

}  // namespace m3
