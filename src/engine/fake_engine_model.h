// A model for tests and benchmarks of the engine: no weights, but a memory. The state of a position is a hash of its
// token (or media row) and of the state before it, and it lies in the cache's pages. So the logits of a row are right
// only if every page that leads to it holds what it should: a stale, foreign or half copied page changes the answer.
#pragma once
#include <cstring>

#include "engine/engine_model.h"

namespace m3 {

class FakeEngineModel : public EngineModel {
 public:
  // `memory`: how many of the newest tokens the logits depend on; 0: all. Short ones make answers that repeat.
  FakeEngineModel(ModelConfig config, const EngineModelSizes& sizes, int memory = 0)
      : config_(std::move(config)), sizes_(sizes), memory_(memory), slots_(sizes.num_pages * sizes.page_tokens),
        arena_("logits", sizes.max_logit_rows * config_.text.vocab_size * int64_t{sizeof(float)} + Arena::kAlignment),
        logits_LV_(arena_.alloc("logits", DType::kF32, {sizes.max_logit_rows, config_.text.vocab_size})) {
    sizes_.page_bytes = page_bytes(sizes.page_tokens);
  }
  static int64_t page_bytes(int page_tokens) { return page_tokens * int64_t{sizeof(Slot)}; }

  const ModelConfig& config() const override { return config_; }
  const EngineModelSizes& sizes() const override { return sizes_; }
  int64_t num_features(const VisionGrid& grid) const override { return grid.num_patches() / 4; }

  std::shared_ptr<const MediaFeatures> encode_media(const MediaInput& media) override {
    ++num_encoded;
    auto features = std::make_shared<MediaFeatures>();
    features->arena = Arena("features", 1 << 16);
    features->features_MC = features->arena.alloc("features", DType::kF32, {num_features(media.grid), 1});
    for (int64_t i = 0; i < features->features_MC.numel(); ++i) {
      features->features_MC.ptr<float>()[i] = media.patches_NP->at(0) + static_cast<float>(i);
    }
    return features;
  }

  void copy_page(int32_t from, int32_t to) override {
    ++num_copied;
    std::copy_n(slots_.begin() + int64_t{from} * sizes_.page_tokens, sizes_.page_tokens,
                slots_.begin() + int64_t{to} * sizes_.page_tokens);
  }

  void read_page(int32_t page, std::span<std::byte> bytes) override {
    M3_CHECK(std::ssize(bytes) == sizes_.page_bytes, "{} bytes of a page", bytes.size());
    std::memcpy(bytes.data(), &slots_[int64_t{page} * sizes_.page_tokens], bytes.size());
  }
  void write_page(int32_t page, std::span<const std::byte> bytes) override {
    M3_CHECK(std::ssize(bytes) == sizes_.page_bytes, "{} bytes of a page", bytes.size());
    std::memcpy(&slots_[int64_t{page} * sizes_.page_tokens], bytes.data(), bytes.size());
  }

  std::string page_layout() override { return fmt::format("fake pages of {} positions\n{}\n", sizes_.page_tokens, layout_note); }

  Tensor step(const StepInput& input) override {
    if (fail_next) {
      fail_next = false;
      M3_FAIL("the fake model was told to fail");
    }
    const auto num_rows = static_cast<int64_t>(input.ids_T.size());
    M3_CHECK(num_rows > 0 && num_rows <= sizes_.max_step_tokens, "{} rows of a step", num_rows);
    M3_CHECK(static_cast<int64_t>(input.seq_lens.size()) <= sizes_.max_sequences, "{} sequences", input.seq_lens.size());
    std::vector<uint64_t> inputs(input.ids_T.begin(), input.ids_T.end());
    for (const FeatureRows& features : input.features) {
      for (size_t i = 0; i < features.rows.size(); ++i) {
        uint32_t bits;
        std::memcpy(&bits, features.features_MC[static_cast<int64_t>(i)].ptr<float>(), sizeof bits);
        inputs[features.rows[i]] = uint64_t{1} << 40 | bits;
      }
    }
    std::vector<uint64_t> seen(num_rows);  // what the row's logits depend on
    last_rows.clear();
    for (size_t n = 0; n < input.seq_lens.size(); ++n) {
      const int64_t begin = input.cu_q[n], count = input.cu_q[n + 1] - begin;
      last_rows.push_back(count);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t position = input.seq_lens[n] - count + i;
        const int32_t* pages = input.page_table.data() + static_cast<int64_t>(n) * input.max_pages;
        slot(pages, position) = next_slot(position == 0 ? Slot{} : slot(pages, position - 1), inputs[begin + i]);
        seen[begin + i] = seen_by(slot(pages, position));
      }
    }
    for (size_t i = 0; i < input.logit_rows.size(); ++i) {
      fill_logits(seen[input.logit_rows[i]], {logits_LV_[static_cast<int64_t>(i)].ptr<float>(), static_cast<size_t>(config_.text.vocab_size)});
    }
    return logits_LV_.rows(0, static_cast<int64_t>(input.logit_rows.size()));
  }

  // The logits behind a sequence, without pages: what step() must give. Media rows as encode_media makes them, from
  // `inputs` that are tokens otherwise.
  std::vector<float> logits_after(std::span<const uint64_t> inputs) const {
    Slot state;
    for (const uint64_t input : inputs) state = next_slot(state, input);
    std::vector<float> logits(config_.text.vocab_size);
    fill_logits(seen_by(state), logits);
    return logits;
  }
  static uint64_t media_input(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return uint64_t{1} << 40 | bits;
  }

  bool fast_logits = false;        // for benchmarks: only one logit of a row changes
  bool fail_next = false;          // the next step throws
  std::string layout_note = "weights of nobody";
  int64_t num_encoded = 0, num_copied = 0;
  std::vector<int64_t> last_rows;  // of the last step, by sequence

 private:
  struct Slot {
    uint64_t chain = 0;              // of all inputs up to here
    std::array<uint64_t, 4> newest{};
  };

  static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  static Slot next_slot(const Slot& before, uint64_t input) {
    Slot slot{.chain = mix(before.chain + mix(input + 1)), .newest = {}};
    std::copy_n(before.newest.begin(), 3, slot.newest.begin() + 1);
    slot.newest[0] = input;
    return slot;
  }
  uint64_t seen_by(const Slot& slot) const {
    if (memory_ == 0) return slot.chain;
    uint64_t seen = 0;
    for (int i = 0; i < memory_; ++i) seen = mix(seen + slot.newest[i] + 1);
    return seen;
  }
  Slot& slot(const int32_t* pages, int64_t position) {
    return slots_[int64_t{pages[position / sizes_.page_tokens]} * sizes_.page_tokens + position % sizes_.page_tokens];
  }
  // Eight random logits of some weight, the others far below: draws differ, and hashing every id is not needed.
  void fill_logits(uint64_t seen, std::span<float> logits) const {
    if (!fast_logits) std::fill(logits.begin(), logits.end(), -20.0f);
    for (uint64_t i = 0; i < (fast_logits ? 1 : 8); ++i) {
      const uint64_t hash = mix(seen + i);
      logits[hash % 1000] = static_cast<float>(hash >> 40) * 0x1p-22f;
    }
  }

  ModelConfig config_;
  EngineModelSizes sizes_;
  int memory_;
  std::vector<Slot> slots_;
  Arena arena_;
  Tensor logits_LV_;
};

}  // namespace m3
