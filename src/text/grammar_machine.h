// Grammars as automata over bytes: a set of rules that call each other. The builder makes
// nondeterministic fragments; finish() makes every rule deterministic, so that what is left
// undecided at run time is only which rule was called. Schemas, regular expressions and word lists
// all become such machines (grammar.h runs them).
#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

class GrammarMachine {
 public:
  struct Call {
    int32_t start;  // state where the called rule begins
    int32_t back;   // state of the caller behind it
  };
  struct TokenEdge {
    int32_t id;  // a token that counts by its id, not by its text
    int32_t to;
  };
  struct State {
    std::vector<Call> calls;
    std::vector<TokenEdge> tokens;
    bool is_final = false;  // the rule may end here
    bool has_bytes = false;
  };

  int32_t start() const { return start_; }
  size_t size() const { return states_.size(); }
  const State& state(int32_t state) const { return states_[static_cast<size_t>(state)]; }
  // -1: the byte cannot follow.
  int32_t next(int32_t state, uint8_t byte) const {
    return next_[static_cast<size_t>(state) * 256 + byte];
  }
  // Nothing but bytes leads on from here.
  bool is_plain(int32_t state) const { return is_plain_[static_cast<size_t>(state)] != 0; }

 private:
  friend class Determinizer;
  int32_t start_ = 0;
  std::vector<State> states_;
  std::vector<int32_t> next_;
  std::vector<uint8_t> is_plain_;
};

class GrammarBuilder {
 public:
  // A fragment with one entry and one exit; each may be used once.
  struct Part {
    int begin, end;
  };
  using MakePart = std::function<Part()>;

  Part empty();
  Part nothing();  // matches no text at all
  Part bytes(uint8_t low, uint8_t high);
  Part literal(std::string_view text);
  Part token(int32_t id);
  Part sequence(const std::vector<Part>& parts);
  Part either(const std::vector<Part>& parts);
  Part optional(Part part);
  Part loop(Part part);                                         // once or more
  Part repeat(const MakePart& make, int64_t min, int64_t max);  // max < 0: without end

  // For what is no sequence or choice: nodes of one's own. A node that can be left again after it
  // was reached must not be the entry of another part.
  int add_node();
  void link(int from, int to) { nodes_[static_cast<size_t>(from)].empty.push_back(to); }
  void link_bytes(int from, uint8_t low, uint8_t high, int to) {
    nodes_[static_cast<size_t>(from)].bytes.push_back({low, high, to});
  }

  int add_rule() {
    rules_.push_back({-1, -1});
    return static_cast<int>(rules_.size()) - 1;
  }
  void define_rule(int rule, Part body) { rules_[static_cast<size_t>(rule)] = body; }
  Part call(int rule);

  // Throws Error if the machine needs more than max_states, if no text satisfies it, or if a rule
  // calls itself without consuming anything.
  GrammarMachine finish(int root_rule, size_t max_states) const;

 private:
  struct ByteEdge {
    uint8_t low, high;
    int to;
  };
  struct RuleEdge {
    int rule, to;
  };
  struct Node {
    std::vector<int> empty;
    std::vector<ByteEdge> bytes;
    std::vector<RuleEdge> calls;
    std::vector<GrammarMachine::TokenEdge> tokens;
  };
  friend class Determinizer;

  std::vector<Node> nodes_;
  std::vector<Part> rules_;
};

}  // namespace m3
