#include "engine/session.h"

#include <algorithm>
#include <chrono>

#include "base/log.h"

namespace m3 {

namespace {

ModelOptions model_options(const SessionOptions& options) {
  ModelOptions model;
  model.decoder.dtype = options.dtype;
  model.decoder.attention = options.attention;
  model.step.max_tokens = options.max_step_tokens;
  model.step.max_sequences = options.max_requests;
  model.step.max_logit_rows = options.max_requests * (1 + options.engine.max_draft_tokens);
  model.step.max_sequence_tokens = options.longest_sequence > 0 ? options.longest_sequence : options.context_tokens;
  model.max_vision_patches = options.max_vision_patches;
  return model;
}

}  // namespace

Session::Session(const Checkpoint& checkpoint, const Tokenizer& tokenizer, const SessionOptions& options) {
  const TextConfig& text = checkpoint.config().text;
  const int64_t already_resident = resident_bytes();
  model_ = std::make_unique<Model>(checkpoint, model_options(options));
  const int64_t num_pages = (options.context_tokens + text.block_size - 1) / text.block_size;
  const int64_t cache_bytes = KvCache::bytes(text, num_pages, options.dtype, uses_index(options.attention));

  model_->add_to_plan(plan_);
  plan_.add("KV cache", cache_bytes);
  EngineOptions engine = options.engine;
  if (options.total_patches > 0) {
    const int64_t rows = options.total_patches / checkpoint.config().vision->merge_factor();
    engine.media_cache_bytes = rows * text.hidden_size * dtype_bytes(model_->activation_dtype());
  }
  if (options.max_vision_patches > 0) plan_.add("media features", engine.media_cache_bytes);
  if (!engine.offload_dir.empty() || !engine.cache_file.empty()) plan_.add("page buffer", cache_bytes / num_pages);
  plan_.add("program and input", already_resident);
  if (const int64_t excess = peak_resident_bytes() - plan_.total_bytes(); excess > 0) {
    plan_.add("reading the input, at its worst", excess);
  }
  const int64_t wanted = plan_.total_bytes() - model_->weight_bytes() - already_resident;
  const int64_t available = available_memory_bytes();
  M3_CHECK(wanted <= available,
           "cache and activations need {}, {} of memory are free: about {} tokens of context fit (asked for {})",
           format_bytes(static_cast<double>(wanted)), format_bytes(static_cast<double>(available)),
           std::max<int64_t>(0, (available - (wanted - cache_bytes)) / (cache_bytes / num_pages) * text.block_size),
           options.context_tokens);

  const auto start = std::chrono::steady_clock::now();
  if (model_->weight_bytes() <= available - wanted) {
    Progress progress("loading", model_->weight_bytes(), "bytes", options.progress);
    model_->load([&](int64_t done) { progress.update(done); });
  } else {
    log_warn("weights of {} do not fit the free memory: they will be read from disk again and again",
             format_bytes(static_cast<double>(model_->weight_bytes())));
  }
  load_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  engine_model_ = std::make_unique<CpuEngineModel>(*model_, num_pages);
  engine_ = std::make_unique<Engine>(*engine_model_, tokenizer, engine);
}

std::string Session::capacity() const {
  const EngineModelSizes& sizes = engine_model_->sizes();
  const int64_t longest = engine_->max_request_tokens();
  std::string together, offload;
  for (int64_t length = longest; length >= sizes.page_tokens; length /= 4) {
    const int64_t pages = (length + sizes.page_tokens - 1) / sizes.page_tokens;
    const int64_t count = std::min(sizes.num_pages / pages, sizes.max_sequences);
    together += fmt::format("{}{} x {}", together.empty() ? "" : " | ", count, length);
    if (count == sizes.max_sequences) break;
  }
  if (const int64_t slots = engine_->metrics().offload_slots; slots > 0) {
    offload = fmt::format("; offload {} more in {}", slots * sizes.page_tokens, engine_->options().offload_dir.string());
  }
  return fmt::format("cache  {} a token, {} pages of {} = {} tokens; together {} tokens{}",
                     format_bytes(static_cast<double>(sizes.page_bytes) / sizes.page_tokens), sizes.num_pages,
                     sizes.page_tokens, sizes.num_pages * sizes.page_tokens, together, offload);
}

}  // namespace m3
