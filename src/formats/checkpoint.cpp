#include "formats/checkpoint.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/fp8.h"
#include "base/log.h"
#include "formats/json_fields.h"
#include "formats/tensor_names.h"

namespace m3 {

namespace fs = std::filesystem;

namespace {

constexpr const char* kIndexName = "model.safetensors.index.json";
constexpr const char* kSingleName = "model.safetensors";

bool is_mtp(std::string_view name) {
  return name.starts_with("mtp.") || name.find(".mtp.") != std::string_view::npos;
}

bool is_vision_name(std::string_view name) {  // in every form
  for (const char* part : {"vision_tower.", "multi_modal_projector.", "patch_merge_mlp."}) {
    if (name.find(part) != std::string_view::npos) return true;
  }
  return false;
}

std::string describe(const SafetensorsEntry& entry) { return entry.stored_dtype + " " + entry.shape.str(); }

// ModelOpt's exports describe their formats here; config.json may be silent about them.
void check_hf_quant_config(const fs::path& folder) {
  const fs::path path = folder / "hf_quant_config.json";
  if (!fs::exists(path)) return;
  const nlohmann::json document = parse_json(read_file(path, kMaxJsonBytes), path.string());
  JsonFields root(document, path.string());
  if (auto quantization = root.object("quantization")) quantization->only("quant_algo", {"MXFP8"});
}

}  // namespace

// Opens the files of a folder and finds the place of every tensor of the model. Used once per Checkpoint.
class CheckpointReader {
 public:
  explicit CheckpointReader(Checkpoint& out) : out_(out), folder_(out.folder_) {}

  void read() {
    M3_CHECK(fs::is_directory(folder_), "{}: no such folder; a model is a folder with config.json and safetensors files",
             folder_.string());
    M3_CHECK(fs::exists(folder_ / "config.json"), "{}: no config.json; is this a model folder?", folder_.string());
    out_.config_ = read_model_config(folder_);
    out_.generation_ = read_generation_config(folder_);
    check_hf_quant_config(folder_);
    for (const std::string& key : out_.config_.ignored_keys) {
      log_warn("{}: key {} is not known and ignored", (folder_ / "config.json").string(), key);
    }
    open_files();
    out_.table_ = tensor_table(out_.config_);
    form_ = detect_form();
    out_.form_ = form_name(form_);
    reserve_widened();
    resolve_all();
    refuse_unused();
  }

 private:
  struct Stored {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
    bool used = false;
  };

  Stored* find(const std::string& name) {
    const auto at = stored_.find(name);
    return at == stored_.end() ? nullptr : &at->second;
  }
  static std::string file_of(const Stored& stored) { return stored.file->path().string(); }

  void open_file(const std::string& name) {
    out_.files_.push_back(std::make_unique<SafetensorsFile>(folder_ / name));
    const SafetensorsFile& file = *out_.files_.back();
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto [at, added] = stored_.emplace(entry.name, Stored{&file, &entry});
      M3_CHECK(added, "tensor '{}' is in {} and in {}; remove one of them", entry.name, file_of(at->second),
               file.path().string());
    }
  }

  void open_files() {
    const fs::path index = folder_ / kIndexName, single = folder_ / kSingleName;
    const bool sharded = fs::exists(index);
    M3_CHECK(sharded || fs::exists(single), "{}: neither {} nor {}; are all files downloaded?", folder_.string(),
             kSingleName, kIndexName);
    M3_CHECK(!sharded || !fs::exists(single), "{}: both {} and {}; remove the one that is not meant", folder_.string(),
             kSingleName, kIndexName);
    weights_name_ = (sharded ? index : single).string();
    if (sharded) {
      open_shards(index);
    } else {
      open_file(kSingleName);
    }
  }

  void open_shards(const fs::path& index) {
    const std::string where = index.string();
    const nlohmann::json document = parse_json(read_file(index, kMaxJsonBytes), where);
    JsonFields root(document, where);
    M3_CHECK(root.object("weight_map"), "{}: weight_map is missing", where);
    const nlohmann::json& weight_map = document["weight_map"];
    std::set<std::string> files;
    for (const auto& [name, file] : weight_map.items()) {
      M3_CHECK(file.is_string(), "{}: weight_map names no file for tensor '{}'", where, name);
      const std::string shard = file.get<std::string>();
      // A path that leaves the folder is never a shard of this model.
      M3_CHECK(shard.ends_with(".safetensors") && shard.find('/') == std::string::npos &&
                   shard.find('\0') == std::string::npos,
               "{}: weight_map places tensor '{}' in '{}'; want the name of a .safetensors file in the same folder", where,
               name, shard);
      files.insert(shard);
    }
    M3_CHECK(!files.empty(), "{}: weight_map is empty", where);
    for (const std::string& file : files) {
      M3_CHECK(fs::exists(folder_ / file), "{}: missing, but {} names it; download it again", (folder_ / file).string(),
               where);
      open_file(file);
    }
    for (const auto& [name, file] : weight_map.items()) {
      const Stored* stored = find(name);
      M3_CHECK(stored != nullptr, "{}: no tensor '{}', but {} places it there", (folder_ / file.get<std::string>()).string(),
               name, where);
      M3_CHECK(stored->file->path().filename() == file.get<std::string>(), "tensor '{}' is in {}, but {} places it in {}",
               name, file_of(*stored), where, file.get<std::string>());
    }
    for (const auto& [name, stored] : stored_) {
      M3_CHECK(weight_map.contains(name), "{}: tensor '{}' is not in {}; do both belong to the same checkpoint?",
               file_of(stored), name, where);
    }
  }

  // The form under whose names most tensors are present, so that a single wrong name is reported as such.
  CheckpointForm detect_form() {
    constexpr CheckpointForm kForms[] = {CheckpointForm::kReleased, CheckpointForm::kTransformersSave,
                                         CheckpointForm::kTransformersNative};
    CheckpointForm best = CheckpointForm::kReleased;
    int64_t most = 0;
    for (const CheckpointForm form : kForms) {
      const int64_t count = std::count_if(out_.table_.begin(), out_.table_.end(), [&](const TensorEntry& entry) {
        return find(stored_place(entry, form).name) != nullptr;
      });
      if (count > most) {
        best = form;
        most = count;
      }
    }
    return best;
  }

  void reserve_widened() {
    int64_t bytes = 0;
    for (const TensorEntry& entry : out_.table_) {
      const Stored* stored = find(stored_place(entry, form_).name);
      if (entry.dtype == DType::kF32 && stored && stored->entry->dtype == DType::kBF16) {
        bytes += (entry.bytes() + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
      }
    }
    out_.widened_ = Arena("widened weights", bytes);
  }

  void resolve_all() {
    out_.weights_.reserve(out_.table_.size());
    out_.index_.reserve(out_.table_.size());
    std::vector<std::pair<const TensorEntry*, std::string>> missing;
    for (const TensorEntry& entry : out_.table_) {
      const StoredPlace place = stored_place(entry, form_);
      out_.index_.emplace(entry.name, out_.weights_.size());
      out_.weights_.push_back({});
      if (Stored* stored = find(place.name)) {
        out_.weights_.back() = resolve(entry, place, *stored);
      } else {
        missing.emplace_back(&entry, place.name);
      }
    }
    if (missing.empty()) return;
    const TensorEntry& entry = *missing[0].first;
    std::string unused = "no tensor is left over";
    for (const auto& [name, stored] : stored_) {
      if (stored.used || is_mtp(name)) continue;
      unused = fmt::format("'{}' in {} has no use: was it renamed?", name, file_of(stored));
      break;
    }
    M3_FAIL("{}: {} of {} tensors missing, first '{}' ({} {} by config.json, form {}); {}", weights_name_, missing.size(),
            out_.table_.size(), missing[0].second, dtype_name(entry.dtype), entry.shape.str(), out_.form_, unused);
  }

  StoredWeight resolve(const TensorEntry& entry, const StoredPlace& place, Stored& stored) {
    stored.used = true;
    const SafetensorsEntry& found = *stored.entry;
    if (found.dtype == DType::kU8 && entry.is_quantisable()) {
      M3_FAIL("{}: tensor '{}' is {}: 4-bit formats (NVFP4, MXFP4) are not supported; use the bf16 or the MXFP8 checkpoint",
              file_of(stored), found.name, describe(found));
    }
    Shape whole;
    if (place.in_experts) whole.push_back(out_.config_.text.num_experts);
    whole.push_back(entry.shape[0] * place.num_parts);
    for (int axis = 1; axis < entry.shape.rank(); ++axis) whole.push_back(entry.shape[axis]);
    M3_CHECK(found.shape == whole, "{}: tensor '{}' is {}, but config.json asks for {}", file_of(stored), found.name,
             describe(found), whole.str());

    StoredWeight weight;
    weight.data = stored.file->tensor(found);
    if (place.in_experts) weight.data = weight.data[entry.expert];
    weight.data = weight.data.rows(place.part * entry.shape[0], (place.part + 1) * entry.shape[0]);
    if (found.dtype == entry.dtype) return weight;
    if (entry.dtype == DType::kF32 && found.dtype == DType::kBF16) {
      weight.data = widen(entry, weight.data);
      return weight;
    }
    if (found.dtype == DType::kE4M3 && entry.is_quantisable() && form_ == CheckpointForm::kReleased) {
      weight.scales = find_scales(entry, stored);
      return weight;
    }
    M3_FAIL("{}: tensor '{}' is {}; want {}{}", file_of(stored), found.name, describe(found),
            entry.dtype == DType::kF32 ? "F32 or BF16" : "BF16",
            entry.is_quantisable() ? " or, under released names, F8_E4M3 with MXFP8 scales" : "");
  }

  Tensor widen(const TensorEntry& entry, const Tensor& stored) {
    const Tensor wide = out_.widened_.alloc(entry.name.c_str(), DType::kF32, entry.shape);
    const bf16* from = stored.ptr<bf16>();
    float* to = wide.ptr<float>();
    for (int64_t i = 0; i < wide.numel(); ++i) to[i] = to_float(from[i]);
    return wide;
  }

  Tensor find_scales(const TensorEntry& entry, const Stored& matrix) {
    const int64_t out = entry.shape[0], in = entry.shape[1];
    M3_CHECK(in % kMxBlock == 0, "{}: tensor '{}' is F8_E4M3 with {} columns, not a multiple of {} (MXFP8)",
             file_of(matrix), entry.name, in, kMxBlock);
    const Shape wanted = {out, in / kMxBlock};
    const std::string name = mxfp8_scale_name(entry.name), modelopt_name = entry.name + "_scale";
    Stored* scales = find(name);
    Stored* modelopt = find(modelopt_name);
    M3_CHECK(scales == nullptr || modelopt == nullptr, "{}: tensor '{}' has two scales, '{}' and '{}'", file_of(matrix),
             entry.name, name, modelopt_name);
    if (scales == nullptr) scales = modelopt;
    M3_CHECK(scales != nullptr,
             "{}: tensor '{}' is F8_E4M3, but its scales '{}' (U8 {}) are missing; download the shard again or use the bf16 "
             "checkpoint", file_of(matrix), entry.name, name, wanted.str());
    scales->used = true;
    const SafetensorsEntry& found = *scales->entry;
    M3_CHECK(found.dtype == DType::kU8 && found.shape == wanted,
             "{}: scales '{}' are {}; want U8 or F8_E8M0 {} (MXFP8: one exponent per {} columns)", file_of(*scales),
             found.name, describe(found), wanted.str(), kMxBlock);
    return scales->file->tensor(found);
  }

  void refuse_unused() {
    size_t count = 0;
    std::pair<std::string, const Stored*> first;
    for (const auto& [name, stored] : stored_) {
      if (stored.used) continue;
      if (is_mtp(name)) {
        out_.skipped_.push_back({name, "multi-token prediction module, not used"});
      } else if (count++ == 0) {
        first = {name, &stored};
      }
    }
    if (!out_.skipped_.empty()) {
      log_info("{}: {} tensors of multi-token prediction modules skipped", folder_.string(), out_.skipped_.size());
    }
    if (count == 0) return;
    const std::string& name = first.first;
    const char* advice = "config.json does not ask for it: do they belong to the same checkpoint?";
    if (name.find("_scale") != std::string::npos) {
      advice = "no 8-bit matrix uses these scales: the matrix was renamed, or stored in another format";
    } else if (!out_.config_.vision && is_vision_name(name)) {
      advice = "config.json has no vision_config";
    }
    M3_FAIL("{}: {} tensors that the model does not have, first '{}' ({}); {}", file_of(*first.second), count, name,
            describe(*first.second->entry), advice);
  }

  Checkpoint& out_;
  const fs::path& folder_;
  std::string weights_name_;  // the index or the single file, for messages
  std::map<std::string, Stored> stored_;  // ordered, so that messages do not depend on chance
  CheckpointForm form_ = CheckpointForm::kReleased;
};

Checkpoint Checkpoint::open(const fs::path& folder) {
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  CheckpointReader(checkpoint).read();
  return checkpoint;
}

const StoredWeight& Checkpoint::weight(std::string_view name) const {
  const auto at = index_.find(name);
  M3_CHECK(at != index_.end(), "{}: the model has no tensor '{}'", folder_.string(), name);
  return weights_[at->second];
}

int64_t Checkpoint::mapped_bytes() const {
  int64_t bytes = 0;
  for (const auto& file : files_) bytes += file->size_bytes();
  return bytes;
}

void Checkpoint::release() const {
  for (const auto& file : files_) file->release();
}

}  // namespace m3
