#include "text/grammar.h"

#include <algorithm>
#include <bit>
#include <mutex>
#include <unordered_map>

namespace m3 {

namespace {

constexpr int32_t kBottom = -1;  // the stack of the whole grammar's rule

// A place in the machine: a state, and where its rule returns to. A grammar's position is a set of
// them.
struct Config {
  int32_t state, stack;
  bool operator==(const Config&) const = default;
};
using Configs = std::vector<Config>;

// Stacks of return states as a shared tree: equal stacks have equal numbers.
class StackPool {
 public:
  int32_t push(int32_t below, int32_t state) {
    const uint64_t key =
        uint64_t{static_cast<uint32_t>(below)} << 32 | static_cast<uint32_t>(state);
    const auto [at, is_new] = index_.try_emplace(key, static_cast<int32_t>(entries_.size()));
    if (is_new) entries_.push_back({state, below});
    return at->second;
  }
  int32_t state(int32_t stack) const { return entries_[static_cast<size_t>(stack)].state; }
  int32_t below(int32_t stack) const { return entries_[static_cast<size_t>(stack)].below; }

 private:
  struct Entry {
    int32_t state, below;
  };
  std::vector<Entry> entries_;
  std::unordered_map<uint64_t, int32_t> index_;
};

class Runner {
 public:
  Runner(const GrammarMachine& machine, StackPool& stacks) : machine_(machine), stacks_(stacks) {}

  // Adds a place and all places reached from it without consuming anything. Returns whether the
  // rule at the bottom may end.
  bool add(Config config, Configs& set) const {
    if (machine_.is_plain(config.state)) {
      if (std::find(set.begin(), set.end(), config) == set.end()) set.push_back(config);
      return false;
    }
    const size_t first = set.size();
    bool at_end = false;
    const auto visit = [&](Config next) {
      if (std::find(set.begin(), set.end(), next) == set.end()) set.push_back(next);
    };
    visit(config);
    for (size_t i = first; i < set.size(); ++i) {
      const Config at = set[i];
      const GrammarMachine::State& state = machine_.state(at.state);
      for (const auto& call : state.calls) visit({call.start, stacks_.push(at.stack, call.back)});
      if (!state.is_final) continue;
      if (at.stack == kBottom) {
        at_end = true;
      } else {
        visit({stacks_.state(at.stack), stacks_.below(at.stack)});
      }
    }
    return at_end;
  }

  bool step(const Configs& from, uint8_t byte, Configs& to) const {
    to.clear();
    bool at_end = false;
    for (const Config& config : from) {
      const int32_t next = machine_.next(config.state, byte);
      if (next >= 0 && add({next, config.stack}, to)) at_end = true;
    }
    return at_end;
  }

  // A position on the way through the trie. Mostly it is one plain place, which needs no set.
  struct Level {
    bool is_single = false;
    Config single{};
    Configs set;
  };

  // Walks the tokens below a node from a position. Calls on_token(id) for those that are allowed
  // and on_end(node) where the rule at the bottom may end inside a token. `levels` is working
  // memory.
  template <typename OnToken, typename OnEnd>
  void walk(const TokenTrie& trie, int32_t node, const Configs& start, std::vector<Level>& levels,
            OnToken on_token, OnEnd on_end) const {
    if (levels.empty()) levels.resize(1);
    levels[0].is_single = false;
    levels[0].set = start;
    const int32_t base = trie.depth(node);
    for (int32_t at = node + 1, end = trie.end(node); at < end;) {
      const auto depth = static_cast<size_t>(trie.depth(at) - base);
      if (levels.size() <= depth) levels.resize(depth + 1);
      bool at_end = false;
      if (!advance(levels[depth - 1], trie.byte(at), levels[depth], at_end)) {
        at = trie.end(at);
        continue;
      }
      if (at_end && trie.end(at) > at + 1) on_end(at);
      for (int32_t id : trie.tokens(at)) on_token(id);
      ++at;
    }
  }

 private:
  // Returns whether the byte leads anywhere.
  bool advance(const Level& from, uint8_t byte, Level& to, bool& at_end) const {
    if (!from.is_single) {
      at_end = step(from.set, byte, to.set);
      to.is_single = to.set.size() == 1 && machine_.is_plain(to.set[0].state);
      if (to.is_single) to.single = to.set[0];
      return !to.set.empty();
    }
    const int32_t next = machine_.next(from.single.state, byte);
    if (next < 0) return false;
    to.is_single = machine_.is_plain(next);
    to.single = {next, from.single.stack};
    if (!to.is_single) {
      to.set.clear();
      at_end = add(to.single, to.set);
    }
    return true;
  }

  const GrammarMachine& machine_;
  StackPool& stacks_;
};

// What a state allows whatever its stack is: tokens, and the nodes of the trie where its rule can
// end and the stack has to say how a token may go on.
struct StateMask {
  bool is_dense = false;
  std::vector<uint64_t> words;  // dense
  std::vector<int32_t> ids;     // sparse
  std::vector<int32_t> ends;
};

}  // namespace

int64_t TokenMask::count() const {
  int64_t sum = 0;
  for (uint64_t word : words_) sum += std::popcount(word);
  return sum;
}

struct Grammar::Impl {
  Impl(std::shared_ptr<const TokenTrie> trie_in, GrammarMachine machine_in)
      : trie(std::move(trie_in)), machine(std::move(machine_in)), masks(machine.size()) {}

  const StateMask& mask_of(int32_t state) const {
    const auto index = static_cast<size_t>(state);
    {
      const std::lock_guard lock(mutex);
      if (masks[index] != nullptr) return *masks[index];
    }
    auto computed = std::make_unique<const StateMask>(compute(state));
    const std::lock_guard lock(mutex);
    if (masks[index] == nullptr) masks[index] = std::move(computed);
    return *masks[index];
  }

  StateMask compute(int32_t state) const {
    StateMask mask;
    if (!machine.state(state).has_bytes) return mask;
    StackPool stacks;
    std::vector<Runner::Level> levels;
    Runner(machine, stacks)
        .walk(
            *trie, 0, {{state, kBottom}}, levels, [&](int32_t id) { mask.ids.push_back(id); },
            [&](int32_t node) { mask.ends.push_back(node); });
    constexpr size_t kSparseShare = 64;  // below this share of the vocabulary a list is smaller
    mask.is_dense = mask.ids.size() > static_cast<size_t>(trie->num_tokens()) / kSparseShare;
    if (mask.is_dense) {
      TokenMask bits(trie->num_tokens());
      for (int32_t id : mask.ids) bits.set(id);
      mask.words.assign(bits.words().begin(), bits.words().end());
      mask.ids = {};
    }
    return mask;
  }

  std::shared_ptr<const TokenTrie> trie;
  GrammarMachine machine;
  mutable std::mutex mutex;  // guards masks (the pointers; what they point to never changes)
  mutable std::vector<std::unique_ptr<const StateMask>> masks;
};

Grammar::Grammar(std::shared_ptr<const TokenTrie> trie, GrammarMachine machine)
    : impl_(std::make_unique<Impl>(std::move(trie), std::move(machine))) {}
Grammar::~Grammar() = default;
size_t Grammar::num_states() const {
  return impl_->machine.size();
}

std::shared_ptr<const Grammar> Grammar::json_schema(std::shared_ptr<const TokenTrie> trie,
                                                    const JsonValue& schema) {
  return std::make_shared<const Grammar>(std::move(trie), json_schema_machine(schema));
}
std::shared_ptr<const Grammar> Grammar::json_object(std::shared_ptr<const TokenTrie> trie) {
  return std::make_shared<const Grammar>(std::move(trie), json_object_machine());
}
std::shared_ptr<const Grammar> Grammar::regex(std::shared_ptr<const TokenTrie> trie,
                                              std::string_view pattern) {
  return std::make_shared<const Grammar>(std::move(trie), regex_machine(pattern));
}
std::shared_ptr<const Grammar> Grammar::choice(std::shared_ptr<const TokenTrie> trie,
                                               std::span<const std::string> texts) {
  return std::make_shared<const Grammar>(std::move(trie), choice_machine(texts));
}
std::shared_ptr<const Grammar> Grammar::tool_calls(std::shared_ptr<const TokenTrie> trie,
                                                   std::span<const Tool> tools,
                                                   const ToolCallRules& rules) {
  return std::make_shared<const Grammar>(std::move(trie), tool_call_machine(tools, rules));
}

struct GrammarState::Impl {
  explicit Impl(std::shared_ptr<const Grammar> grammar_in) : grammar(std::move(grammar_in)) {
    const GrammarMachine& machine = grammar->impl_->machine;
    at_end = Runner(machine, stacks).add({machine.start(), kBottom}, configs);
  }

  const TokenTrie& trie() const { return *grammar->impl_->trie; }

  bool accept_bytes(std::string_view bytes) {
    const Runner runner(grammar->impl_->machine, stacks);
    Configs now = configs, next;
    bool end = at_end;
    for (char c : bytes) {
      end = runner.step(now, static_cast<uint8_t>(c), next);
      now.swap(next);
      if (now.empty()) return false;
    }
    configs = std::move(now);
    at_end = end;
    return true;
  }

  bool accept_token_edge(int32_t id) {
    const GrammarMachine& machine = grammar->impl_->machine;
    const Runner runner(machine, stacks);
    Configs next;
    bool end = false;
    for (const Config& config : configs) {
      for (const auto& edge : machine.state(config.state).tokens) {
        if (edge.id == id && runner.add({edge.to, config.stack}, next)) end = true;
      }
    }
    if (next.empty()) return false;
    configs = std::move(next);
    at_end = end;
    return true;
  }

  void fill(TokenMask& out) {
    const Grammar::Impl& shared = *grammar->impl_;
    const Runner runner(shared.machine, stacks);
    for (const Config& config : configs) {
      const GrammarMachine::State& state = shared.machine.state(config.state);
      for (const auto& edge : state.tokens) out.set(edge.id);
      if (!state.has_bytes) continue;
      const StateMask& local = shared.mask_of(config.state);
      for (size_t i = 0; i < local.words.size(); ++i) out.words()[i] |= local.words[i];
      for (int32_t id : local.ids) out.set(id);
      if (config.stack == kBottom || local.ends.empty()) continue;
      behind.clear();
      runner.add({stacks.state(config.stack), stacks.below(config.stack)}, behind);
      for (int32_t node : local.ends) {
        runner.walk(
            trie(), node, behind, levels, [&](int32_t id) { out.set(id); }, [](int32_t) {});
      }
    }
  }

  // Answers dwell in few positions (inside a string, above all), so their masks are kept.
  const TokenMask& mask() {
    for (const Remembered& entry : remembered) {
      if (entry.configs == configs) return *entry.mask;
    }
    auto computed = std::make_shared<TokenMask>(trie().num_tokens());
    fill(*computed);
    constexpr size_t kMaxRemembered = 32;
    if (remembered.size() < kMaxRemembered) {
      remembered.push_back({configs, std::move(computed)});
      return *remembered.back().mask;
    }
    oldest = (oldest + 1) % kMaxRemembered;
    remembered[oldest] = {configs, std::move(computed)};
    return *remembered[oldest].mask;
  }

  bool must_end() const {
    return std::none_of(configs.begin(), configs.end(), [&](const Config& config) {
      const GrammarMachine::State& state = grammar->impl_->machine.state(config.state);
      return state.has_bytes || !state.tokens.empty();
    });
  }

  struct Remembered {
    Configs configs;
    std::shared_ptr<const TokenMask> mask;
  };

  std::shared_ptr<const Grammar> grammar;
  StackPool stacks;
  Configs configs;
  bool at_end = false;
  std::vector<Remembered> remembered;
  size_t oldest = 0;
  Configs behind;                     // working memory
  std::vector<Runner::Level> levels;  // working memory
};

GrammarState::GrammarState(std::shared_ptr<const Grammar> grammar)
    : impl_(std::make_unique<Impl>(std::move(grammar))) {}
GrammarState::~GrammarState() = default;
GrammarState::GrammarState(const GrammarState& other)
    : impl_(std::make_unique<Impl>(*other.impl_)) {}
GrammarState& GrammarState::operator=(const GrammarState& other) {
  if (this != &other) impl_ = std::make_unique<Impl>(*other.impl_);
  return *this;
}
GrammarState::GrammarState(GrammarState&&) noexcept = default;
GrammarState& GrammarState::operator=(GrammarState&&) noexcept = default;

bool GrammarState::accept(int32_t id) {
  if (impl_->accept_token_edge(id)) return true;
  const std::string_view bytes = impl_->trie().bytes(id);
  return !bytes.empty() && impl_->accept_bytes(bytes);
}

bool GrammarState::accept_text(std::string_view text) {
  return impl_->accept_bytes(text);
}
const TokenMask& GrammarState::mask() {
  return impl_->mask();
}
bool GrammarState::can_end() const {
  return impl_->at_end;
}
bool GrammarState::must_end() const {
  return impl_->must_end();
}

}  // namespace m3
