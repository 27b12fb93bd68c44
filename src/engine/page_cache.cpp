#include "engine/page_cache.h"

#include <algorithm>

namespace m3 {

namespace {

struct Lexicographic {
  using is_transparent = void;
  bool operator()(std::span<const PageCache::Key> a, std::span<const PageCache::Key> b) const {
    return std::ranges::lexicographical_compare(a, b);
  }
};

}  // namespace

struct PageCache::Node {
  Node* parent = nullptr;
  int32_t page = -1;
  int64_t users = 0;       // sequences that hold the page
  uint64_t last_used = 0;
  std::span<const Key> keys;  // of its positions: the parent's map owns them; fewer than a page only in leaves
  std::map<std::vector<Key>, std::unique_ptr<Node>, Lexicographic> children;

  bool is_idle_leaf() const { return parent != nullptr && users == 0 && children.empty(); }
};

PageCache::PageCache(int64_t num_pages, int page_tokens, bool reuse)
    : pool_(num_pages), page_tokens_(page_tokens), reuse_(reuse), root_(std::make_unique<Node>()) {}

PageCache::~PageCache() {
  // Leaf by leaf: chains of a million tokens are deeper than the stack.
  for (Node* node = root_.get(); node != nullptr;) {
    if (!node->children.empty()) {
      node = node->children.begin()->second.get();
    } else {
      node = node->parent;
      if (node != nullptr) node->children.erase(node->children.begin());
    }
  }
}

// In lexicographic order, whatever shares most with `keys` stands next to where `keys` would stand.
PageCache::Best PageCache::best_child(const Node& node, std::span<const Key> keys) {
  Best best;
  const auto consider = [&](const auto& child) {
    const auto differs = std::ranges::mismatch(child.first, keys).in2;
    const int64_t common = differs - keys.begin();
    if (common > best.common) best = {child.second.get(), common};
  };
  const auto next = node.children.lower_bound(keys);
  if (next != node.children.end()) consider(*next);
  if (next != node.children.begin()) consider(*std::prev(next));
  return best;
}

PageCache::Match PageCache::match(std::span<const Key> keys) const {
  Match match;
  const Node* node = root_.get();
  while (true) {
    const auto rest = keys.subspan(match.full_pages * page_tokens_);
    const Best best = best_child(*node, rest.first(std::min<size_t>(rest.size(), page_tokens_)));
    match.tokens += best.common;
    if (best.common < page_tokens_) return match;
    node = best.node;
    ++match.full_pages;
    match.idle_pages += node->users == 0;
  }
}

int64_t PageCache::attach(Pages& pages, std::span<const Key> keys, const CopyPage& copy) {
  M3_CHECK(pages.ids.empty(), "attach: the sequence has {} pages already", pages.ids.size());
  Node* node = root_.get();
  while (true) {
    const auto done = static_cast<int64_t>(pages.ids.size()) * page_tokens_;
    const auto rest = keys.subspan(done);
    const Best best = best_child(*node, rest.first(std::min<size_t>(rest.size(), page_tokens_)));
    if (best.common == page_tokens_) {
      node = best.node;
      hold(*node);
      pages.ids.push_back(node->page);
      pages.nodes.push_back(node);
      continue;
    }
    if (best.common == 0) return done;
    hold(*best.node);  // the page taken must not be the one to copy
    const int32_t page = take_page();
    if (page >= 0) {
      copy(best.node->page, page);
      pages.ids.push_back(page);
    }
    let_go(*best.node);
    return page >= 0 ? done + best.common : done;
  }
}

bool PageCache::grow(Pages& pages, int64_t num_tokens) {
  const int64_t wanted = pages_for(num_tokens) - static_cast<int64_t>(pages.ids.size());
  if (wanted > num_available()) return false;
  for (int64_t i = 0; i < wanted; ++i) pages.ids.push_back(take_page());
  return true;
}

void PageCache::publish(Pages& pages, std::span<const Key> computed) {
  if (!reuse_) return;
  while ((pages.nodes.size() + 1) * page_tokens_ <= computed.size()) {
    const size_t i = pages.nodes.size();
    Node& parent = i == 0 ? *root_ : *pages.nodes[i - 1];
    const auto keys = computed.subspan(i * page_tokens_, page_tokens_);
    Best best = best_child(parent, keys);
    if (best.common == page_tokens_) {
      pool_.give_back(pages.ids[i]);
      pages.ids[i] = best.node->page;
    } else {
      best.node = add_child(parent, keys, pages.ids[i]);
    }
    hold(*best.node);
    pages.nodes.push_back(best.node);
  }
}

void PageCache::release(Pages& pages, std::span<const Key> computed) {
  publish(pages, computed);
  size_t kept = pages.nodes.size();
  if (const auto tail = computed.subspan(std::min(computed.size(), kept * page_tokens_)); reuse_ && !tail.empty()) {
    Node& parent = kept == 0 ? *root_ : *pages.nodes[kept - 1];
    if (best_child(parent, tail).common < static_cast<int64_t>(tail.size())) {
      Node* leaf = add_child(parent, tail, pages.ids[kept++]);
      hold(*leaf);
      let_go(*leaf);
    }
  }
  for (size_t i = kept; i < pages.ids.size(); ++i) pool_.give_back(pages.ids[i]);
  for (Node* node : pages.nodes) let_go(*node);
  pages = {};
}

int32_t PageCache::take_page() {
  if (pool_.num_free() == 0) {
    if (idle_leaves_.empty()) return -1;
    remove_leaf(*idle_leaves_.begin()->second);
    ++num_evicted_;
  }
  return pool_.take();
}

// A leaf whose contents are the beginning of the new ones is of no use any more.
PageCache::Node* PageCache::add_child(Node& parent, std::span<const Key> keys, int32_t page) {
  idle_leaves_.erase({parent.last_used, &parent});
  auto [it, added] = parent.children.emplace(std::vector<Key>(keys.begin(), keys.end()), std::make_unique<Node>());
  M3_CHECK(added, "a page with these contents is cached already");
  Node* node = it->second.get();
  node->parent = &parent;
  node->page = page;
  node->keys = it->first;
  node->last_used = ++tick_;
  ++num_idle_;
  idle_leaves_.insert({node->last_used, node});
  while (it != parent.children.begin()) {
    Node& before = *std::prev(it)->second;
    const bool beginning = before.keys.size() < keys.size() && std::ranges::equal(before.keys, keys.first(before.keys.size()));
    if (!beginning || !before.is_idle_leaf()) break;
    remove_leaf(before);
  }
  return node;
}

void PageCache::remove_leaf(Node& leaf) {
  Node& parent = *leaf.parent;
  idle_leaves_.erase({leaf.last_used, &leaf});
  --num_idle_;
  pool_.give_back(leaf.page);
  parent.children.erase(parent.children.find(leaf.keys));
  if (parent.is_idle_leaf()) idle_leaves_.insert({parent.last_used, &parent});
}

void PageCache::hold(Node& node) {
  if (node.users++ > 0) return;
  --num_idle_;
  idle_leaves_.erase({node.last_used, &node});
}

void PageCache::let_go(Node& node) {
  if (--node.users > 0) return;
  ++num_idle_;
  node.last_used = ++tick_;
  if (node.children.empty()) idle_leaves_.insert({node.last_used, &node});
}

void PageCache::check(std::span<const Pages* const> sequences) const {
  std::vector<int> seen(num_pages());
  std::map<const Node*, int64_t> users;
  for (const Pages* pages : sequences) {
    M3_CHECK(pages->nodes.size() <= pages->ids.size(), "{} nodes for {} pages", pages->nodes.size(), pages->ids.size());
    for (size_t i = 0; i < pages->ids.size(); ++i) {
      if (i < pages->nodes.size()) {
        M3_CHECK(pages->nodes[i]->page == pages->ids[i], "page {} of a sequence is {}, its node says {}", i, pages->ids[i],
                 pages->nodes[i]->page);
        ++users[pages->nodes[i]];
      } else {
        ++seen[pages->ids[i]];
      }
    }
  }
  int64_t idle = 0, idle_leaves = 0;
  std::vector<const Node*> open = {root_.get()};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& [keys, child] : node->children) open.push_back(child.get());
    if (node == root_.get()) continue;
    ++seen[node->page];
    M3_CHECK(node->users == users[node], "page {} counts {} users, {} hold it", node->page, node->users, users[node]);
    M3_CHECK(node->children.empty() || static_cast<int>(node->keys.size()) == page_tokens_, "page {} is not full", node->page);
    idle += node->users == 0;
    idle_leaves += node->is_idle_leaf();
  }
  pool_.for_each_free([&](int32_t page) { ++seen[page]; });
  for (size_t page = 0; page < seen.size(); ++page) {
    M3_CHECK(seen[page] == 1, "page {} is in {} places, want 1", page, seen[page]);
  }
  M3_CHECK(idle == num_idle_, "{} pages are idle, counted {}", idle, num_idle_);
  M3_CHECK(idle_leaves == static_cast<int64_t>(idle_leaves_.size()), "{} leaves are idle, {} listed", idle_leaves,
           idle_leaves_.size());
}

}  // namespace m3
