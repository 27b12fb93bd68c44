#include "train/training_checkpoint.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/file.h"
#include "base/log.h"
#include "base/sha256.h"
#include "formats/checkpoint.h"
#include "text/json_value.h"

namespace m3::train {

namespace fs = std::filesystem;

namespace {

constexpr const char* kPrefix = "step-";
constexpr const char* kManifest = "training/manifest.json";

void sync_folder(const fs::path& folder) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool done = fd >= 0 && ::fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) ::close(fd);
  M3_CHECK(done, "{}: cannot sync the folder: {}", folder.string(), std::strerror(error));
}

JsonValue list(const auto& values, auto&& make) {
  JsonValue out = JsonValue::array();
  for (const auto& value : values) out.push_back(make(value));
  return out;
}

// Members of state.json by name, each a number that must be there.
class StateReader {
 public:
  StateReader(const std::string& text, std::string file)
      : root_(JsonValue::parse(text, file)), file_(std::move(file)) {}
  bool has(const char* key) const { return root_.find(key) != nullptr; }
  const JsonValue& member(const char* key) const {
    const JsonValue* value = root_.find(key);
    M3_CHECK(value != nullptr, "{}: {} is missing", file_, key);
    return *value;
  }
  int64_t integer(const char* key) const { return integer(member(key), key); }
  double number(const char* key) const { return number(member(key), key); }
  int64_t integer(const JsonValue& value, const char* key) const {
    int64_t out = 0;
    const std::string& digits = value.text();
    const bool good =
        value.is_integer() &&
        std::from_chars(digits.data(), digits.data() + digits.size(), out).ec == std::errc();
    M3_CHECK(good, "{}: {} is not a whole number", file_, key);
    return out;
  }
  double number(const JsonValue& value, const char* key) const {
    M3_CHECK(value.is_number(), "{}: {} is not a number", file_, key);
    return value.as_double();
  }
  const std::vector<JsonValue>& of_groups(const char* key) const {
    const JsonValue& value = member(key);
    M3_CHECK(value.is_array() && value.size() == kNumGroups, "{}: {} is not a list of {}", file_,
             key, kNumGroups);
    return value.items();
  }

 private:
  JsonValue root_;
  std::string file_;
};

std::vector<fs::path> files_of(const fs::path& folder) {  // relative, sorted; without the manifest
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const fs::path relative = fs::relative(entry.path(), folder);
    if (entry.is_regular_file() && relative != kManifest) files.push_back(relative);
  }
  std::sort(files.begin(), files.end());
  return files;
}

void write_manifest(const fs::path& folder) {
  JsonValue files = JsonValue::object();
  for (const fs::path& file : files_of(folder)) {
    JsonValue entry = JsonValue::object();
    entry.append_member("bytes",
                        JsonValue::integer(static_cast<int64_t>(fs::file_size(folder / file))));
    entry.append_member("sha256", JsonValue::string(sha256_file(folder / file)));
    files.append_member(file.string(), std::move(entry));
  }
  JsonValue root = JsonValue::object();
  root.append_member("schema", JsonValue::integer(1));
  root.append_member("files", std::move(files));
  write_file_atomic(folder / kManifest, root.dump() + "\n");
}

struct StoredTensor {
  std::string name;
  Tensor tensor;
};

std::vector<StoredTensor> optimizer_tensors(const Parameters& parameters) {
  std::vector<StoredTensor> out;
  for (const Parameter& p : parameters.all()) out.push_back({"master." + p.entry.name, p.master});
  for (const Parameter& p : parameters.all()) {
    if (!p.m.defined()) continue;
    out.push_back({"m." + p.entry.name, p.m});
    out.push_back({"v." + p.entry.name, p.v});
  }
  return out;
}

void write_optimizer(const fs::path& file, const Parameters& parameters) {
  const std::vector<StoredTensor> tensors = optimizer_tensors(parameters);
  std::vector<TensorSpec> specs;
  for (const StoredTensor& t : tensors)
    specs.push_back({t.name, t.tensor.dtype(), t.tensor.shape()});
  SafetensorsWriter writer(file, specs);
  for (const StoredTensor& t : tensors) writer.write(t.name, t.tensor);
  writer.finish();
}

void read_optimizer(const fs::path& path, Parameters& parameters) {
  const SafetensorsFile file(path);
  const std::vector<StoredTensor> tensors = optimizer_tensors(parameters);
  for (const StoredTensor& t : tensors) {
    const Tensor stored = file.get(t.name);
    M3_CHECK(stored.shape() == t.tensor.shape() && stored.dtype() == t.tensor.dtype(),
             "{}: {} is {} {}; this run has {} {}", path.string(), t.name,
             dtype_name(stored.dtype()), stored.shape().str(), dtype_name(t.tensor.dtype()),
             t.tensor.shape().str());
    std::memcpy(t.tensor.data(), stored.data(), static_cast<size_t>(stored.bytes()));
  }
  M3_CHECK(file.entries().size() == tensors.size(),
           "{}: {} tensors, this run has {}: it trains other groups of parameters than the run "
           "that wrote it",
           path.string(), file.entries().size(), tensors.size());
  parameters.round_copies();
}

void write_weights(CheckpointWriter& writer, const Parameters& parameters) {
  std::vector<bf16> rounded;
  for (const TensorEntry& entry : writer.order()) {
    const Parameter& p = parameters.find(entry.name);
    if (entry.dtype == DType::kF32) {
      writer.write(entry.name, p.master);
      continue;
    }
    const float* from = p.master.ptr<float>();
    rounded.resize(static_cast<size_t>(p.master.numel()));
    for (size_t i = 0; i < rounded.size(); ++i) rounded[i] = bf16(from[i]);
    writer.write(entry.name, std::as_bytes(std::span(rounded)));
  }
}

// Adds the keys below `path` in which the two differ; either may be absent (null pointer).
void find_changes(const std::string& path, const JsonValue* then, const JsonValue* now,
                  std::vector<ConfigChange>& out) {
  if (then != nullptr && now != nullptr && *then == *now) return;
  const auto is_object = [](const JsonValue* value) { return value == nullptr || value->is_object(); };
  if (!is_object(then) || !is_object(now)) {
    out.push_back({0, path, then ? then->dump() : "", now ? now->dump() : ""});
    return;
  }
  const auto below = [&](const std::string& key) { return path.empty() ? key : path + "." + key; };
  const auto member = [](const JsonValue* of, const std::string& key) {
    return of == nullptr ? nullptr : of->find(key);
  };
  if (then != nullptr) {
    for (const std::string& key : then->keys())
      find_changes(below(key), then->find(key), member(now, key), out);
  }
  if (now == nullptr) return;
  for (const std::string& key : now->keys()) {
    if (member(then, key) == nullptr) find_changes(below(key), nullptr, now->find(key), out);
  }
}

bool names(const std::string& allowed, const std::string& key) {
  return key == allowed || key.starts_with(allowed + ".");
}

bool has_key(const JsonValue& identity, const std::string& key) {
  const JsonValue* at = &identity;
  for (size_t begin = 0; begin <= key.size() && at != nullptr;) {
    const size_t end = std::min(key.find('.', begin), key.size());
    at = at->find(key.substr(begin, end - begin));
    begin = end + 1;
  }
  return at != nullptr;
}

std::string shown(const std::string& value) {
  return value.empty() ? "absent" : value.size() <= 200 ? value : value.substr(0, 200) + "...";
}

// What was changed of the identity in `file`. Throws Error for a change that nobody asked for.
std::vector<ConfigChange> check_identity(const TrainConfig& config, const fs::path& file,
                                         const std::vector<std::string>& may_change) {
  const JsonValue then = JsonValue::parse(read_file(file), file.string());
  const JsonValue now = JsonValue::parse(run_identity(config), "this run's configuration");
  for (const std::string& key : may_change) {
    M3_CHECK(has_key(then, key) || has_key(now, key),
             "--allow-change {}: neither the run nor the checkpoint has such a key", key);
  }
  std::vector<ConfigChange> changes;
  find_changes("", &then, &now, changes);
  if (then.find("manifests") == nullptr) {
    log_warn("{} does not say which data the run was started with; it is not compared",
             file.string());
    std::erase_if(changes, [](const ConfigChange& c) { return names("manifests", c.key); });
  }
  for (const ConfigChange& change : changes) {
    if (std::ranges::any_of(may_change, [&](const auto& key) { return names(key, change.key); }))
      continue;
    M3_FAIL(
        "{}: the run was started with another '{}': {}; now it is {}. Resume with the same, start "
        "a new run in another output folder, or give --allow-change {}: the run goes on with the "
        "new one, and its log and checkpoints say so",
        file.string(), change.key, shown(change.from), shown(change.to), change.key);
  }
  return changes;
}

}  // namespace

JsonValue ConfigChange::to_json() const {
  JsonValue out = JsonValue::object();
  out.append_member("step", JsonValue::integer(step));
  out.append_member("key", JsonValue::string(key));
  out.append_member("from", JsonValue::string(from));
  out.append_member("to", JsonValue::string(to));
  return out;
}

std::string run_identity(const TrainConfig& config) {
  JsonValue root = JsonValue::parse(config.identity, "this run's configuration");
  JsonValue manifests = JsonValue::object();
  const auto add = [&](const std::string& name, const fs::path& folder) {
    const fs::path file = folder / "manifest.json";
    if (fs::exists(file))  // else the reader says what is missing
      manifests.set(name, JsonValue::string(sha256_file(file)));
  };
  if (!config.corpus.empty()) add("corpus", config.corpus);
  for (const SourceConfig& source : config.sources) {
    if (source.family == SourceConfig::Family::kShards) add(source.name, source.folder);
  }
  root.set("manifests", std::move(manifests));
  return root.dump();
}

std::string TrainingState::to_json() const {
  JsonValue root = JsonValue::object();
  const auto integer = [](int64_t value) { return JsonValue::integer(value); };
  root.append_member("step", integer(step));
  root.append_member("num_updates", list(num_updates, integer));
  root.append_member("mean_norm",
                     list(mean_norm, [](double value) { return JsonValue::number(value); }));
  root.append_member("num_skipped", integer(num_skipped));
  root.append_member("num_skipped_in_row", integer(num_skipped_in_row));
  root.append_member("num_tokens", integer(num_tokens));
  root.append_member("num_documents", integer(num_documents));
  root.append_member("flops", JsonValue::number(flops));
  root.append_member("seconds", JsonValue::number(seconds));
  JsonValue positions = JsonValue::object();
  for (const auto& [name, stream] : streams) positions.append_member(name, stream.to_json());
  root.append_member("streams", std::move(positions));
  root.append_member("changes", list(changes, [](const ConfigChange& change) { return change.to_json(); }));
  return root.dump() + "\n";
}

TrainingState TrainingState::from_json(const std::string& text, const std::string& file) {
  const StateReader reader(text, file);
  TrainingState state;
  state.step = reader.integer("step");
  for (int i = 0; i < kNumGroups; ++i) {
    state.num_updates[i] = reader.integer(reader.of_groups("num_updates")[i], "num_updates");
    state.mean_norm[i] = reader.number(reader.of_groups("mean_norm")[i], "mean_norm");
  }
  state.num_skipped = reader.integer("num_skipped");
  state.num_skipped_in_row = reader.integer("num_skipped_in_row");
  state.num_tokens = reader.integer("num_tokens");
  state.num_documents = reader.integer("num_documents");
  state.flops = reader.number("flops");
  state.seconds = reader.number("seconds");
  const JsonValue& streams = reader.member("streams");
  for (const std::string& name : streams.keys())
    state.streams[name] = data::StreamState::from_json(*streams.find(name), file);
  if (reader.has("changes")) {  // older checkpoints have none
    for (const JsonValue& change : reader.member("changes").items()) {
      const auto text = [&](const char* key) {
        const JsonValue* value = change.find(key);
        M3_CHECK(value != nullptr && value->is_string(), "{}: a change has no {}", file, key);
        return value->text();
      };
      const JsonValue* step = change.find("step");
      M3_CHECK(step != nullptr, "{}: a change has no step", file);
      state.changes.push_back(
          {reader.integer(*step, "step"), text("key"), text("from"), text("to")});
    }
  }
  return state;
}

void verify_checkpoint(const fs::path& folder) {
  const fs::path path = folder / kManifest;
  const JsonValue root = JsonValue::parse(read_file(path), path.string());
  const JsonValue* files = root.find("files");
  M3_CHECK(files != nullptr && files->is_object() && files->size() > 0, "{}: no list of files",
           path.string());
  for (const std::string& name : files->keys()) {
    const fs::path file = folder / name;
    M3_CHECK(fs::is_regular_file(file), "{}: the file is missing", file.string());
    const JsonValue *bytes = files->find(name)->find("bytes"),
                    *hash = files->find(name)->find("sha256");
    M3_CHECK(bytes != nullptr && hash != nullptr, "{}: {} has no size or hash", path.string(),
             name);
    M3_CHECK(std::to_string(fs::file_size(file)) == bytes->text(),
             "{}: {} bytes; the manifest says {}", file.string(), fs::file_size(file),
             bytes->text());
    const std::string found = sha256_file(file);
    M3_CHECK(found == hash->text(), "{}: SHA-256 is {}; the manifest says {}", file.string(), found,
             hash->text());
  }
}

RunLock::RunLock(const fs::path& output) {
  std::error_code error;
  fs::create_directories(output, error);
  M3_CHECK(!error, "{}: cannot create the folder: {}", output.string(), error.message());
  const fs::path file = output / ".lock";
  fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  M3_CHECK(fd_ >= 0, "{}: cannot open: {}", file.string(), std::strerror(errno));
  if (::flock(fd_, LOCK_EX | LOCK_NB) != 0) {
    ::close(fd_);
    M3_FAIL("{} is in use by another run; wait for its end, or choose another output folder",
            output.string());
  }
}

RunLock::~RunLock() {
  ::close(fd_);
}

fs::path CheckpointStore::folder(int64_t step) const {
  return output_ / fmt::format("{}{:08}", kPrefix, step);
}

std::vector<int64_t> CheckpointStore::steps() const {
  std::vector<int64_t> steps;
  if (!fs::exists(output_)) return steps;
  for (const auto& entry : fs::directory_iterator(output_)) {
    const std::string name = entry.path().filename().string();
    int64_t step = 0;
    if (!name.starts_with(kPrefix)) continue;
    const char *begin = name.data() + std::strlen(kPrefix), *end = name.data() + name.size();
    const auto [at, error] = std::from_chars(begin, end, step);
    if (error == std::errc() && at == end) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

void CheckpointStore::save(const TrainConfig& config, const Parameters& parameters,
                           const TrainingState& state, const std::vector<fs::path>& companions) {
  const fs::path target = folder(state.step), work = saving() / target.filename();
  fs::remove_all(saving());
  fs::create_directories(saving());
  try {
    CheckpointWriter writer(work, config.model_json, tensor_table(config.model));
    for (const fs::path& file : companions) writer.copy_file(file);
    write_weights(writer, parameters);
    writer.finish();
    const fs::path training = work / "training";
    fs::create_directories(training);
    write_optimizer(training / "optimizer.safetensors", parameters);
    write_file_atomic(training / "state.json", state.to_json());
    write_file_atomic(training / "config.json", config.resolved);
    write_file_atomic(training / "identity.json", run_identity(config));
    write_manifest(work);
    sync_folder(training);
    sync_folder(work);
    fs::remove_all(
        target);  // a broken one of an earlier run, which was reported when it was not loaded
    fs::rename(work, target);
    sync_folder(output_);
  } catch (const std::exception&) {
    std::error_code ignored;
    fs::remove_all(saving(), ignored);  // gives a full disk its space back
    throw;
  }
  prune();
}

void CheckpointStore::prune() {
  const std::vector<int64_t> all = steps();
  for (size_t i = 0; i + static_cast<size_t>(config_.keep) < all.size(); ++i) {
    if (config_.keep_every > 0 && all[i] % config_.keep_every == 0) continue;
    // Moved first: a half removed folder never looks like a checkpoint.
    const fs::path rubbish = saving() / folder(all[i]).filename();
    fs::rename(folder(all[i]), rubbish);
  }
  fs::remove_all(saving());
}

TrainingState CheckpointStore::load_latest(const TrainConfig& config, Parameters& parameters,
                                           const std::vector<std::string>& may_change) {
  const std::vector<int64_t> all = steps();
  M3_CHECK(!all.empty(), "{}: no checkpoint to resume from; start without --resume",
           output_.string());
  for (size_t i = all.size(); i-- > 0;) {
    const fs::path path = folder(all[i]), training = path / "training";
    try {
      verify_checkpoint(path);
    } catch (const Error& error) {
      log_warn("checkpoint {} is broken and not used: {}", path.string(), error.what());
      if (i > 0) log_warn("going back to {}", folder(all[i - 1]).string());
      continue;
    }
    std::vector<ConfigChange> changes =
        check_identity(config, training / "identity.json", may_change);
    TrainingState state = TrainingState::from_json(read_file(training / "state.json"),
                                                   (training / "state.json").string());
    for (ConfigChange& change : changes) {
      change.step = state.step;
      state.changes.push_back(std::move(change));
    }
    read_optimizer(training / "optimizer.safetensors", parameters);
    return state;
  }
  M3_FAIL("{}: none of the {} checkpoints is sound", output_.string(), all.size());
}

}  // namespace m3::train
