// Which pages hold what: pages of running sequences, and pages of ended ones that the next request may reuse.
//
// A cached page is a node of a tree whose edges are the contents of pages: a sequence that begins like an earlier one
// walks down the same nodes. Contents are compared key by key, so nothing is reused by mistake; a key is a token id, or
// stands for a row of media features (sequence.h). Full pages are shared by count; of a page that agrees only in its
// first positions, a copy is taken and the rest is computed again, so hits end at any token.
//
// What no sequence holds is evicted, least recently used first, from the leaves. With a second tier (page_tier.h) the
// contents of an evicted page go there and its node stays: nodes in memory stand above stored ones. A hit brings them
// back. The tier forgets by the same rule. A page is one object for all lanes (engine_model.h); this class moves ids only.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "engine/page_pool.h"
#include "engine/page_tier.h"

namespace m3 {

class PageCache {
 public:
  using Key = uint64_t;
  using CopyPage = std::function<void(int32_t from, int32_t to)>;
  struct Node;

  // Pages of one running sequence: page i holds its positions [i*B, (i+1)*B). The first nodes.size() of them are in
  // the tree and full, the others belong to the sequence alone.
  struct Pages {
    std::vector<int32_t> ids;
    std::vector<Node*> nodes;
  };

  struct Match {
    int64_t tokens = 0;      // that need not be computed
    int64_t full_pages = 0;  // of them in shared pages: need no page of their own
    int64_t idle_pages = 0;  // shared pages that nobody holds now: a hit takes them from num_available()
  };

  struct Counts {
    int64_t evicted = 0;   // pages that made room
    int64_t stored = 0;    // of them those whose contents went to the tier
    int64_t restored = 0;  // pages filled from it
    int64_t failed = 0;    // stores and loads that the tier refused
  };

  // `reuse` false: pages of ended sequences are free at once and nothing ever matches. The tier must outlive the cache;
  // null: what is evicted is forgotten.
  PageCache(int64_t num_pages, int page_tokens, bool reuse, PageTier* tier = nullptr);
  ~PageCache();

  int64_t num_pages() const { return pool_.num_pages(); }
  int page_tokens() const { return page_tokens_; }
  int64_t num_free() const { return pool_.num_free(); }
  int64_t num_idle() const { return num_idle_; }  // cached, held by nobody
  int64_t num_available() const { return num_free() + num_idle(); }
  int64_t num_stored() const { return slots_.num_pages() - slots_.num_free(); }  // in the tier now
  const Counts& counts() const { return counts_; }
  int64_t pages_for(int64_t tokens) const { return (tokens + page_tokens_ - 1) / page_tokens_; }

  Match match(std::span<const Key> keys) const;

  // Gives an empty sequence the longest known beginning of `keys`; returns its tokens.
  int64_t attach(Pages& pages, std::span<const Key> keys, const CopyPage& copy);

  // Takes pages until there are enough for so many tokens, evicting as needed. false: there are not, and nothing
  // has changed.
  bool grow(Pages& pages, int64_t num_tokens);

  // Full pages among these computed positions become known to others. Where another sequence has published the same
  // contents, its page takes the place of the own one.
  void publish(Pages& pages, std::span<const Key> computed);

  // Ends a sequence: what is computed stays known, everything else is free.
  void release(Pages& pages, std::span<const Key> computed);

  // Every end of the tree in memory, least recently used first, with the keys and pages from the root to it.
  using VisitBranch = std::function<void(std::span<const Key> keys, std::span<const int32_t> pages)>;
  void for_each_branch(const VisitBranch& visit) const;

  // Throws unless each page is free, or in the tree, or of one of these sequences (all there are), exactly once, and
  // the counts agree.
  void check(std::span<const Pages* const> sequences) const;

 private:
  struct Best {
    Node* node = nullptr;
    int64_t common = 0;
  };
  // The known beginning of keys: nodes of full pages, and what comes next in part.
  struct Path {
    std::vector<Node*> full;
    Best next;
  };
  static Best best_child(const Node& node, std::span<const Key> keys);
  Path find(std::span<const Key> keys) const;

  int32_t take_page();  // -1: none
  int32_t take_copy(const Node& node, const CopyPage& copy);  // a page with a held node's contents; -1: none
  bool store(Node& node);
  void make_resident(Node& held, int32_t page);
  Node* add_child(Node& parent, std::span<const Key> keys, int32_t page);
  void remove_leaf(Node& leaf);
  void remove(Node& node);  // and all behind it
  void hold(Node& node);
  void let_go(Node& node);

  using Leaves = std::set<std::pair<uint64_t, Node*>>;  // by time of last use
  Leaves* list_of(const Node& node);
  void enlist(Node& node);
  void unlist(Node& node);  // before anything that list_of() reads changes

  PagePool pool_;
  int page_tokens_;
  bool reuse_;
  PageTier* tier_;
  PagePool slots_;  // of the tier
  std::unique_ptr<Node> root_;
  uint64_t tick_ = 0;
  int64_t num_idle_ = 0;
  Counts counts_;
  // Nodes that nobody holds: in memory and with no page in memory behind them; in the tier and with nothing behind them.
  Leaves idle_leaves_, stored_leaves_;
};

}  // namespace m3
