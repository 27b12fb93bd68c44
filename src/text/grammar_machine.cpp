#include "text/grammar_machine.h"

#include <algorithm>
#include <array>
#include <map>

#include "base/check.h"

namespace m3 {

namespace {

constexpr size_t kMaxNodes = 1'000'000;

}  // namespace

// --- fragments

int GrammarBuilder::add_node() {
  M3_CHECK(nodes_.size() < kMaxNodes, "the grammar is too large (more than {} positions)",
           kMaxNodes);
  nodes_.emplace_back();
  return static_cast<int>(nodes_.size()) - 1;
}

GrammarBuilder::Part GrammarBuilder::nothing() {
  const int begin = add_node();
  return {begin, add_node()};
}

GrammarBuilder::Part GrammarBuilder::empty() {
  const Part part = nothing();
  link(part.begin, part.end);
  return part;
}

GrammarBuilder::Part GrammarBuilder::bytes(uint8_t low, uint8_t high) {
  const Part part = nothing();
  link_bytes(part.begin, low, high, part.end);
  return part;
}

GrammarBuilder::Part GrammarBuilder::literal(std::string_view text) {
  const int begin = add_node();
  int end = begin;
  for (char c : text) {
    const int next = add_node();
    link_bytes(end, static_cast<uint8_t>(c), static_cast<uint8_t>(c), next);
    end = next;
  }
  return {begin, end};
}

GrammarBuilder::Part GrammarBuilder::token(int32_t id) {
  const Part part = nothing();
  nodes_[static_cast<size_t>(part.begin)].tokens.push_back({id, part.end});
  return part;
}

GrammarBuilder::Part GrammarBuilder::call(int rule) {
  const Part part = nothing();
  nodes_[static_cast<size_t>(part.begin)].calls.push_back({rule, part.end});
  return part;
}

GrammarBuilder::Part GrammarBuilder::sequence(const std::vector<Part>& parts) {
  if (parts.empty()) return empty();
  for (size_t i = 0; i + 1 < parts.size(); ++i) link(parts[i].end, parts[i + 1].begin);
  return {parts.front().begin, parts.back().end};
}

GrammarBuilder::Part GrammarBuilder::either(const std::vector<Part>& parts) {
  const Part all = nothing();
  for (const Part& part : parts) {
    link(all.begin, part.begin);
    link(part.end, all.end);
  }
  return all;
}

GrammarBuilder::Part GrammarBuilder::optional(Part part) {
  return either({part, empty()});
}

GrammarBuilder::Part GrammarBuilder::loop(Part part) {
  const Part all =
      nothing();  // nodes of its own: the way back must not lead past what comes before
  link(all.begin, part.begin);
  link(part.end, all.end);
  link(all.end, all.begin);
  return all;
}

GrammarBuilder::Part GrammarBuilder::repeat(const MakePart& make, int64_t min, int64_t max) {
  const Part all = nothing();
  int at = all.begin;
  for (int64_t i = 0; i < min; ++i) {
    const Part part = make();
    link(at, part.begin);
    at = part.end;
  }
  if (max < 0) {
    const Part rest = optional(loop(make()));
    link(at, rest.begin);
    return {all.begin, rest.end};
  }
  for (int64_t i = min; i < max; ++i) {
    link(at, all.end);
    const Part part = make();
    link(at, part.begin);
    at = part.end;
  }
  link(at, all.end);
  return all;
}

// --- determinisation

class Determinizer {
 public:
  Determinizer(const GrammarBuilder& builder, size_t max_states)
      : builder_(builder), max_states_(max_states), seen_in_(builder.nodes_.size()) {}

  GrammarMachine run(int root_rule) {
    find_productive();
    M3_CHECK(rule_productive_[static_cast<size_t>(root_rule)], "no text satisfies the grammar");
    machine_.start_ = start_of(root_rule);
    while (!pending_.empty()) {
      const Pending next = pending_.back();
      pending_.pop_back();
      expand(next);
    }
    for (auto& state :
         machine_.states_) {  // rules were numbered by their place until all were known
      for (auto& call : state.calls) call.start = rule_start_.at(call.start);
    }
    for (const auto& state : machine_.states_) {
      machine_.is_plain_.push_back(state.calls.empty() && state.tokens.empty() && !state.is_final);
    }
    check_left_recursion();
    return std::move(machine_);
  }

 private:
  using Nodes = std::vector<int>;  // sorted
  struct Pending {
    int32_t state;
    int rule;
    Nodes nodes;
  };

  const GrammarBuilder::Node& node(int index) const {
    return builder_.nodes_[static_cast<size_t>(index)];
  }
  const GrammarBuilder::Part& rule(int index) const {
    return builder_.rules_[static_cast<size_t>(index)];
  }

  // A node is productive if its rule can end from there. Edges to others are dropped, so that a
  // state of the machine always leads to an end: a mask is never empty.
  void find_productive() {
    const size_t num_nodes = builder_.nodes_.size();
    productive_.assign(num_nodes, false);
    rule_productive_.assign(builder_.rules_.size(), false);
    std::vector<std::vector<int>> back(num_nodes);  // edges without a condition, turned around
    std::vector<std::vector<std::pair<int, int>>> calls(
        builder_.rules_.size());  // (from, to) by rule
    Nodes work;
    const auto mark = [&](int at) {
      if (productive_[static_cast<size_t>(at)]) return;
      productive_[static_cast<size_t>(at)] = true;
      work.push_back(at);
    };
    std::vector<std::vector<int>> waiting(num_nodes);  // rules called with this node behind them
    std::vector<std::vector<int>> begins(num_nodes);   // rules that begin here
    for (size_t i = 0; i < num_nodes; ++i) {
      const int from = static_cast<int>(i);
      for (int to : node(from).empty) back[static_cast<size_t>(to)].push_back(from);
      for (const auto& edge : node(from).bytes) back[static_cast<size_t>(edge.to)].push_back(from);
      for (const auto& edge : node(from).tokens) back[static_cast<size_t>(edge.to)].push_back(from);
      for (const auto& edge : node(from).calls) {
        calls[static_cast<size_t>(edge.rule)].emplace_back(from, edge.to);
        waiting[static_cast<size_t>(edge.to)].push_back(edge.rule);
      }
    }
    for (size_t i = 0; i < builder_.rules_.size(); ++i) {
      if (builder_.rules_[i].begin < 0) continue;
      begins[static_cast<size_t>(builder_.rules_[i].begin)].push_back(static_cast<int>(i));
      mark(builder_.rules_[i].end);
    }
    const auto mark_callers = [&](int called) {
      if (!rule_productive_[static_cast<size_t>(called)]) return;
      for (const auto& [from, to] : calls[static_cast<size_t>(called)]) {
        if (productive_[static_cast<size_t>(to)]) mark(from);
      }
    };
    while (!work.empty()) {
      const int at = work.back();
      work.pop_back();
      for (int from : back[static_cast<size_t>(at)]) mark(from);
      for (int called : waiting[static_cast<size_t>(at)]) mark_callers(called);
      for (int begun : begins[static_cast<size_t>(at)]) {
        rule_productive_[static_cast<size_t>(begun)] = true;
        mark_callers(begun);
      }
    }
  }

  // The nodes reached from a set without consuming anything, without those that only pass on: two
  // sets with the same future should be equal.
  Nodes closure(int in_rule, Nodes work) {
    Nodes kept;
    ++round_;
    while (!work.empty()) {
      const int at = work.back();
      work.pop_back();
      if (!productive_[static_cast<size_t>(at)] || seen_in_[static_cast<size_t>(at)] == round_)
        continue;
      seen_in_[static_cast<size_t>(at)] = round_;
      const auto& edges = node(at);
      const bool leads_on = !edges.bytes.empty() || !edges.calls.empty() || !edges.tokens.empty();
      if (leads_on || at == rule(in_rule).end) kept.push_back(at);
      work.insert(work.end(), edges.empty.begin(), edges.empty.end());
    }
    std::sort(kept.begin(), kept.end());
    return kept;
  }

  // The state of a set of nodes in a rule; a new one is expanded later. -1: an empty set.
  int32_t state_of(int in_rule, Nodes nodes) {
    nodes = closure(in_rule, std::move(nodes));
    if (nodes.empty()) return -1;
    const auto [at, is_new] =
        ids_.try_emplace({in_rule, nodes}, static_cast<int32_t>(machine_.states_.size()));
    if (is_new) {
      M3_CHECK(machine_.states_.size() < max_states_,
               "the grammar is too large (more than {} states)", max_states_);
      machine_.states_.emplace_back();
      machine_.next_.resize(machine_.next_.size() + 256, -1);
      pending_.push_back({at->second, in_rule, std::move(nodes)});
    }
    return at->second;
  }

  int32_t start_of(int called) {
    const auto at = rule_start_.find(called);
    if (at != rule_start_.end()) return at->second;
    const int32_t state = state_of(called, {rule(called).begin});
    rule_start_[called] = state;
    return state;
  }

  void expand(const Pending& from) {
    std::array<Nodes, 256> by_byte;
    std::map<int, Nodes> by_rule;
    std::map<int32_t, Nodes> by_token;
    bool is_final = false;
    for (int at : from.nodes) {
      is_final = is_final || at == rule(from.rule).end;
      for (const auto& edge : node(at).bytes) {
        for (int byte = edge.low; byte <= edge.high; ++byte)
          by_byte[static_cast<size_t>(byte)].push_back(edge.to);
      }
      for (const auto& edge : node(at).tokens) by_token[edge.id].push_back(edge.to);
      for (const auto& edge : node(at).calls) {
        if (rule_productive_[static_cast<size_t>(edge.rule)]) by_rule[edge.rule].push_back(edge.to);
      }
    }
    std::array<int32_t, 256> next;
    for (size_t byte = 0; byte < 256; ++byte) {
      const bool same = byte > 0 && by_byte[byte] == by_byte[byte - 1];
      next[byte] = same                    ? next[byte - 1]
                   : by_byte[byte].empty() ? -1
                                           : state_of(from.rule, by_byte[byte]);
    }
    GrammarMachine::State state;
    state.is_final = is_final;
    for (auto& [id, nodes] : by_token) {
      const int32_t to = state_of(from.rule, std::move(nodes));
      if (to >= 0) state.tokens.push_back({id, to});
    }
    for (auto& [called, nodes] : by_rule) {
      const int32_t back = state_of(from.rule, std::move(nodes));
      if (back < 0) continue;
      start_of(called);
      state.calls.push_back({called, back});
    }
    for (int32_t to : next) state.has_bytes = state.has_bytes || to >= 0;
    std::copy(next.begin(), next.end(),
              machine_.next_.begin() + static_cast<long>(from.state) * 256);
    machine_.states_[static_cast<size_t>(from.state)] = std::move(state);
  }

  // Whether a rule can end without consuming anything, and which rules it can call before
  // consuming.
  void check_left_recursion() const {
    std::map<int32_t, bool> nullable;  // by start state
    for (const auto& [called, start] : rule_start_) nullable[start] = false;
    const auto reach = [&](int32_t start) {  // states reached from a rule's start without consuming
      std::vector<int32_t> all = {start};
      for (size_t i = 0; i < all.size(); ++i) {
        for (const auto& call : machine_.state(all[i]).calls) {
          if (nullable[call.start] && std::find(all.begin(), all.end(), call.back) == all.end())
            all.push_back(call.back);
        }
      }
      return all;
    };
    for (bool changed = true; changed;) {
      changed = false;
      for (auto& [start, is_nullable] : nullable) {
        if (is_nullable) continue;
        for (int32_t at : reach(start)) is_nullable = is_nullable || machine_.state(at).is_final;
        changed = changed || is_nullable;
      }
    }
    std::map<int32_t, int> colour;  // 1: on the path, 2: done
    const std::function<void(int32_t)> visit = [&](int32_t start) {
      M3_CHECK(colour[start] != 1, "the grammar calls itself without consuming anything");
      if (colour[start] == 2) return;
      colour[start] = 1;
      for (int32_t at : reach(start)) {
        for (const auto& call : machine_.state(at).calls) visit(call.start);
      }
      colour[start] = 2;
    };
    for (const auto& [start, is_nullable] : nullable) visit(start);
  }

  const GrammarBuilder& builder_;
  size_t max_states_;
  std::vector<bool> productive_, rule_productive_;
  std::vector<int> seen_in_;  // by node: the last closure that met it
  int round_ = 0;
  GrammarMachine machine_;
  std::map<std::pair<int, Nodes>, int32_t> ids_;
  std::map<int, int32_t> rule_start_;
  std::vector<Pending> pending_;
};

GrammarMachine GrammarBuilder::finish(int root_rule, size_t max_states) const {
  return Determinizer(*this, max_states).run(root_rule);
}

}  // namespace m3
