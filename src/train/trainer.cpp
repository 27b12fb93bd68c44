#include "train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "base/log.h"
#include "base/progress.h"
#include "text/chat.h"
#include "train/activity_probe.h"
#include "train/init.h"
#include "train/schedule.h"
#include "train/selection_probe.h"

namespace m3::train {

namespace fs = std::filesystem;

namespace {

using Clock = std::chrono::steady_clock;
using Family = SourceConfig::Family;

constexpr double kNormMemory =
    0.98;  // of the guard's running mean of gradient norms: about 50 steps
constexpr int64_t kGuardWarmup = 50;  // updates before a norm can be called a spike
constexpr int kProbeQueries = 32;

std::atomic<bool> stop_requested = false;
static_assert(std::atomic<bool>::is_always_lock_free);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

bool may_have_media(const SourceConfig& source) {
  if (source.count == 0) return false;
  return source.family == Family::kCard || source.family == Family::kPicture ||
         source.family == Family::kClip || source.family == Family::kShards;
}

// tokenizer.json and what lies beside it for the chat protocol.
std::vector<fs::path> tokenizer_files(const fs::path& tokenizer) {
  const fs::path folder = fs::is_directory(tokenizer) ? tokenizer : tokenizer.parent_path();
  std::vector<fs::path> files;
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
                           "generation_config.json"}) {
    if (fs::exists(folder / name)) files.push_back(folder / name);
  }
  return files;
}

void check_tokenizer(const TrainConfig& config, const Tokenizer& tokenizer) {
  M3_CHECK(tokenizer.size() <= config.model.text.vocab_size,
           "{}: {} ids, but the model's vocab_size is {}", config.tokenizer.string(),
           tokenizer.size(), config.model.text.vocab_size);
  if (!config.model.vision) return;
  const int32_t image = tokenizer.require_added_id(chat_token::kImage),
                video = tokenizer.require_added_id(chat_token::kVideo);
  M3_CHECK(image == config.model.image_token_id && video == config.model.video_token_id,
           "{}: placeholders of images and videos are {} and {}, the model's config says {} and {}",
           config.tokenizer.string(), image, video, config.model.image_token_id,
           config.model.video_token_id);
}

TrainOptions options_of(const TrainConfig& config, const StageConfig& stage,
                        const GroupFlags& trained) {
  TrainOptions out;
  out.dtype = config.compute.dtype;
  out.stage = stage.attention;
  out.freeze = stage.freeze;
  if (!trained[static_cast<int>(Group::kIndexer)] && out.freeze == Freeze::kNone)
    out.freeze = Freeze::kFrozenIndex;
  out.train_vision = trained[static_cast<int>(Group::kVision)];
  out.lambda = config.loss.kl_weight;
  out.kl_min_tokens = config.loss.kl_min_tokens;
  out.z_weight = static_cast<float>(config.loss.z_weight);
  out.balance_alpha = static_cast<float>(config.loss.balance_alpha);
  out.detach_index_input = config.loss.detach_index_input;
  out.recompute = config.compute.recompute ? Recompute::kLayer : Recompute::kNone;
  out.gemm.batch_invariant = config.compute.batch_invariant;
  return out;
}

}  // namespace

GroupFlags trained_groups(const TrainConfig& config) {
  GroupFlags trained = {};
  bool has_media = false;
  for (const SourceConfig& source : config.sources) has_media |= may_have_media(source);
  for (const StageConfig& stage : config.stages) {
    const bool backbone = stage.freeze != Freeze::kIndexOnly;
    trained[static_cast<int>(Group::kText)] |= backbone;
    trained[static_cast<int>(Group::kVision)] |= backbone && has_media && config.model.vision;
    trained[static_cast<int>(Group::kIndexer)] |=
        teaches_index(stage.attention) && stage.freeze != Freeze::kFrozenIndex &&
        config.loss.kl_weight > 0 && config.model.text.num_sparse_layers() > 0;
  }
  for (int i = 0; i < kNumGroups; ++i)
    trained[i] = trained[i] && !config.optimizer.groups[i].frozen;
  return trained;
}

void Trainer::request_stop() {
  stop_requested.store(true, std::memory_order_relaxed);
}

Trainer::Trainer(const TrainConfig& config, const RunOptions& options)
    : config_(config),
      options_(options),
      lock_(config.output),
      tokenizer_(Tokenizer::load(config.tokenizer)),
      companions_(tokenizer_files(config.tokenizer)),
      parameters_(config.model, config.optimizer, config.compute.dtype, trained_groups(config)),
      optimizer_(parameters_, config.optimizer),
      store_(config.output, config.save),
      sizes_{config.compute.micro_batch_tokens,
             config.model.vision ? config.compute.micro_batch_patches : 0},
      replica_sizes_{std::max<int64_t>(1, sizes_.max_tokens / config.compute.replicas),
                     sizes_.max_patches / config.compute.replicas} {
  check_tokenizer(config_, tokenizer_);
  if (options_.resume && !store_.steps().empty()) {
    state_ = store_.load_latest(config_, parameters_, options_.may_change);
    M3_CHECK(state_.step <= config_.steps, "{}: {} steps are done, the run shall have {}",
             config_.output.string(), state_.step, config_.steps);
    for (const ConfigChange& change : state_.changes) {
      if (change.step == state_.step)
        log_info("step {}: {} changed from {} to {}", change.step, change.key, change.from, change.to);
    }
    optimizer_.num_updates() = state_.num_updates;
  } else {
    M3_CHECK(store_.steps().empty(),
             "{} holds checkpoints already; give --resume, or another output folder",
             config_.output.string());
    start_weights();
  }
  enter_stage(state_.step);
  batches_ = std::make_unique<BatchMaker>(config_, tokenizer_, state_.step, state_.streams);
  log_ = std::make_unique<StepLog>(config_.output / "train.jsonl", state_.step);
}

Trainer::~Trainer() = default;

void Trainer::start_weights() {
  parameters_.initialise(init_scheme(config_.init, config_.model, config_.seed));
  if (config_.init.scheme != InitConfig::Scheme::kCheckpoint) return;
  // A conversion may add an index branch or a vision tower; nothing else may be missing
  // (training.md §15).
  const Checkpoint checkpoint = Checkpoint::open(config_.init.checkpoint);
  for (const Parameter* parameter : parameters_.load_weights(checkpoint)) {
    M3_CHECK(parameter->group != Group::kText,
             "{} lacks {}; only index branch and vision tower may be new", config_.init.checkpoint,
             parameter->entry.name);
    log_info("new, drawn at random: {} {}", parameter->entry.name, parameter->entry.shape.str());
  }
}

MemoryPlan Trainer::memory_plan() const {
  MemoryPlan plan;
  parameters_.add_to_plan(plan);
  model_->add_to_plan(plan);
  if (replicas_) replicas_->add_to_plan(plan);
  return plan;
}

void Trainer::make_models(const TrainOptions& options) {
  model_ = std::make_unique<TrainableModel>(config_.model, parameters_.weights(),
                                            parameters_.gradients(), options, sizes_);
  if (config_.compute.replicas > 1 && !replicas_) {
    replicas_ = std::make_unique<Replicas>(config_.model, parameters_, config_.compute.replicas,
                                           options, replica_sizes_);
  }
}

void Trainer::enter_stage(int64_t step) {
  const StageConfig& stage = stage_at(config_, std::min(step, config_.steps - 1));
  if (&stage == stage_) return;
  const TrainOptions options = options_of(config_, stage, trained_groups(config_));
  if (model_) {
    model_->set_options(options);
    if (replicas_) replicas_->set_options(options);
    log_info("step {}: attention {}, freeze {}", step, train_stage_name(stage.attention),
             freeze_name(stage.freeze));
  } else {
    make_models(options);
  }
  stage_ = &stage;
}

// A document longer than the limits of a micro-batch needs a larger arena.
void Trainer::fit_model(const std::vector<PackedDocuments>& packs) {
  TrainSizes needed = sizes_;
  for (const PackedDocuments& pack : packs) {
    needed.max_tokens = std::max(needed.max_tokens, pack.num_tokens());
    needed.max_patches = std::max(needed.max_patches, pack.num_patches());
  }
  if (needed.max_tokens == sizes_.max_tokens && needed.max_patches == sizes_.max_patches) return;
  sizes_ = needed;
  const TrainOptions options = model_->options();
  model_.reset();
  make_models(options);
}

std::vector<PackedDocuments> Trainer::pack(const std::vector<BatchDocument>& documents,
                                           std::vector<int32_t> which,
                                           const TrainSizes& limits) const {
  std::vector<PackedDocuments> packs;
  for (std::vector<int32_t>& some :
       pack_documents(documents, std::move(which), limits.max_tokens, limits.max_patches))
    packs.emplace_back(config_.model, documents, std::move(some));
  return packs;
}

// Takes those of `which` that one replica can hold; longer ones stay, for all threads together.
std::vector<std::vector<PackedDocuments>> Trainer::pack_for_replicas(
    const std::vector<BatchDocument>& documents, std::vector<int32_t>& which) const {
  std::vector<int32_t> small, large;
  std::vector<double> work;
  for (const int32_t idx : which) {
    const PackedDocuments alone(config_.model, documents, {idx});
    if (alone.num_tokens() > replica_sizes_.max_tokens ||
        alone.num_patches() > replica_sizes_.max_patches) {
      large.push_back(idx);
    } else {
      small.push_back(idx);
      work.push_back(train_flops(config_.model, model_->options(), alone.micro_batch()).total());
    }
  }
  which = std::move(large);
  std::vector<std::vector<PackedDocuments>> packs_R;
  for (std::vector<int32_t>& share : spread_documents(small, work, config_.compute.replicas))
    packs_R.push_back(pack(documents, std::move(share), replica_sizes_));
  return packs_R;
}

void Trainer::run_micro_batches(const Batch& batch, StepReport& report) {
  std::vector<int32_t> which = all_of(batch.documents);
  std::vector<std::vector<PackedDocuments>> packs_R;
  if (replicas_) packs_R = pack_for_replicas(batch.documents, which);
  const std::vector<PackedDocuments> packs = pack(
      batch.documents, std::move(which),
      {config_.compute.micro_batch_tokens, config_.compute.micro_batch_patches});
  fit_model(packs);
  std::vector<const PackedDocuments*> all;
  for (const PackedDocuments& pack : packs) all.push_back(&pack);
  for (const std::vector<PackedDocuments>& of_replica : packs_R)
    for (const PackedDocuments& pack : of_replica) all.push_back(&pack);
  // Counted over the whole batch before the first backward (training.md §3).
  Normalisers global;
  for (const PackedDocuments* pack : all)
    global.add(normalisers_of(pack->micro_batch(), model_->options()));

  parameters_.zero_gradients();
  std::vector<MicroBatchResult> results;
  for (const PackedDocuments& pack : packs)
    results.push_back(model_->forward_backward(pack.micro_batch(), global));
  if (replicas_) {
    for (MicroBatchResult& result : replicas_->forward_backward(packs_R, global))
      results.push_back(std::move(result));
  }
  for (size_t i = 0; i < all.size(); ++i) {
    const PackedDocuments& pack = *all[i];
    report.sums.add(results[i].sums);
    add_losses(config_, batch.documents, pack, results[i].loss_T, report);
    report.flops.add(train_flops(config_.model, model_->options(), pack.micro_batch()));
    report.num_tokens += pack.num_tokens();
    report.num_patches += pack.num_patches();
    for (const TrainMedia& media : pack.micro_batch().media)
      report.num_media_tokens += static_cast<int64_t>(media.rows.size());
  }
  report.loss = train_loss(config_.model.text, model_->options(), report.sums);
  report.num_micro_batches = static_cast<int64_t>(all.size());
  if (is_probed(batch.step)) probe(all, report);
}

// Activity where most media are, else in the longest documents; the selection in the longest ones.
void Trainer::probe(const std::vector<const PackedDocuments*>& packs, StepReport& report) {
  const auto largest = [&](auto size) {
    return (*std::ranges::max_element(packs, {}, size))->micro_batch();
  };
  const MicroBatch longest = largest([](const PackedDocuments* pack) {
    return pack->num_tokens() / static_cast<int64_t>(pack->documents().size());
  });
  const MicroBatch media = largest([](const PackedDocuments* pack) { return pack->num_patches(); });
  report.layers = probe_activity(*model_, media.media.empty() ? longest : media, kProbeQueries);
  const TrainStage stage = model_->options().stage;
  if (stage == TrainStage::kWarmup || stage == TrainStage::kSparse)
    report.selection = probe_selection(*model_, longest, kProbeQueries);
}

std::string Trainer::reason_to_skip(const StepReport& report) const {
  for (int i = 0; i < kNumGroups; ++i) {
    const double norm = report.groups[i].norm;
    const char* name = group_name(static_cast<Group>(i));
    if (!std::isfinite(norm)) return fmt::format("the gradient of {} is not finite", name);
    const bool has_mean = state_.num_updates[i] >= kGuardWarmup && state_.mean_norm[i] > 0;
    if (config_.guard.spike_factor > 0 && has_mean &&
        norm > config_.guard.spike_factor * state_.mean_norm[i]) {
      return fmt::format("spike: the gradient norm of {} is {:.4g}, its mean {:.4g}", name, norm,
                         state_.mean_norm[i]);
    }
  }
  if (!std::isfinite(report.loss.total())) return "the loss is not finite";
  return {};
}

void Trainer::update(const Batch& batch, StepReport& report) {
  report.groups = optimizer_.measure();
  report.gradients = parameters_.gradient_norms();
  report.zeros_changed = report.gradients.zeros != zero_gradients_;
  zero_gradients_ = report.gradients.zeros;
  report.skipped = reason_to_skip(report);
  if (!report.skipped.empty()) {
    for (const BatchDocument& document : batch.documents)
      report.documents.push_back(document.sample.id);
    ++state_.num_skipped;
    ++state_.num_skipped_in_row;
    const bool spike = report.skipped.starts_with("spike");
    const GuardConfig::Action action = spike ? config_.guard.spike : config_.guard.non_finite;
    if (action == GuardConfig::Action::kSkip &&
        state_.num_skipped_in_row < config_.guard.max_skipped) {
      log_warn("step {}: no update: {}", batch.step, report.skipped);
      return;
    }
    log_->write(report.to_json(config_.model, ceiling_gflops_));
    M3_FAIL(
        "step {}: {} ({} skipped in a row). The documents of the step are in the last record of "
        "{}; the checkpoint of "
        "step {} is untouched",
        batch.step, report.skipped, state_.num_skipped_in_row,
        (config_.output / "train.jsonl").string(),
        store_.steps().empty() ? 0 : store_.steps().back());
  }
  state_.num_skipped_in_row = 0;

  const double factor = lr_factor(config_.schedule, batch.step, config_.steps);
  const bool backbone = stage_->freeze != Freeze::kIndexOnly;
  const bool indexer = teaches_index(stage_->attention) && stage_->freeze != Freeze::kFrozenIndex;
  optimizer_.update(config_.optimizer.lr * factor, {1, 1, stage_->indexer_lr_factor},
                    {backbone, backbone, indexer}, report.groups, is_probed(batch.step));
  state_.num_updates = optimizer_.num_updates();
  for (int i = 0; i < kNumGroups; ++i) {
    double& mean = state_.mean_norm[i];
    mean = mean == 0 ? report.groups[i].norm
                     : kNormMemory * mean + (1 - kNormMemory) * report.groups[i].norm;
  }
  const bool rests = !config_.optimizer.router_bias_in_decay &&
                     in_final_decay(config_.schedule, batch.step, config_.steps);
  if (backbone && !rests && config_.optimizer.router_bias_step > 0) {
    std::vector<int64_t> load_LE = report.sums.text_experts_LE;
    for (size_t i = 0; i < load_LE.size(); ++i) load_LE[i] += report.sums.media_experts_LE[i];
    if (!load_LE.empty())
      optimizer_.balance_experts(config_.model.text, load_LE, config_.optimizer.router_bias_step);
  }
}

StepReport Trainer::do_step(Batch batch) {
  M3_CHECK(!batch.documents.empty(), "step {}: no source gives a document at this share of the run",
           batch.step);
  StepReport report;
  report.step = batch.step;
  report.stage = train_stage_name(stage_->attention);
  for (const ConfigChange& change : state_.changes) {
    if (change.step == batch.step) report.changes.push_back(change);
  }
  report.num_documents = static_cast<int64_t>(batch.documents.size());
  auto start = Clock::now();
  run_micro_batches(batch, report);
  report.model_seconds = seconds_since(start);
  start = Clock::now();
  update(batch, report);
  report.update_seconds = seconds_since(start);

  state_.step = batch.step + 1;
  state_.num_tokens += report.num_tokens;
  state_.num_documents += report.num_documents;
  state_.flops += report.flops.total();
  state_.streams = std::move(batch.streams);
  for (const auto& [name, stream] : state_.streams) report.num_broken += stream.num_skipped();
  return report;
}

void Trainer::save() {
  store_.save(config_, parameters_, state_, companions_);
}

namespace {

// Means over the steps between two lines of the terminal.
class Means {
 public:
  void add(const StepReport& report) {
    for (const auto& [name, sum] : report.by_source) sums_[name].add(sum);
    tokens_ += report.num_tokens;
    seconds_ += report.seconds();
    flops_ += report.flops.total();
  }
  std::string text(double ceiling_gflops) const {
    std::string out = fmt::format("{:.0f} tokens/s", static_cast<double>(tokens_) / seconds_);
    if (ceiling_gflops > 0)
      out +=
          fmt::format("  {:.0f} % of the machine", 100 * flops_ / seconds_ * 1e-9 / ceiling_gflops);
    for (const auto& [name, sum] : sums_)
      out += fmt::format("  {} {:.3f}", name, sum.answers > 0 ? sum.answer_mean() : sum.mean());
    return out;
  }

 private:
  LossSums sums_;
  int64_t tokens_ = 0;
  double seconds_ = 0, flops_ = 0;
};

}  // namespace

RunEnd Trainer::run() {
  const int64_t first = state_.step, last = options_.stop_after > 0
                                                ? std::min(options_.stop_after, config_.steps)
                                                : config_.steps;
  Progress progress("training", last - first, "steps",
                    options_.show_progress ? Progress::Mode::kAuto : Progress::Mode::kOff);
  Means means;
  std::string note;
  int64_t saved = first;
  while (state_.step < last && !stop_requested) {
    enter_stage(state_.step);
    const auto start = Clock::now();
    Batch batch = batches_->next();
    const double load_seconds = seconds_since(start);
    StepReport report = do_step(std::move(batch));
    report.load_seconds = load_seconds;
    state_.seconds += report.seconds();
    log_->write(report.to_json(config_.model, ceiling_gflops_));
    means.add(report);
    if (state_.step % config_.log.every == 0) {
      note = fmt::format("step {}  {}", state_.step, means.text(ceiling_gflops_));
      means = {};
    }
    progress.update(state_.step - first, note);
    if (options_.on_step) options_.on_step(report);
    if (state_.step % config_.save.every == 0) {
      save();
      saved = state_.step;
    }
  }
  stop_requested = false;
  progress.finish();
  if (saved != state_.step) save();
  return state_.step == config_.steps ? RunEnd::kFinished : RunEnd::kStopped;
}

}  // namespace m3::train
