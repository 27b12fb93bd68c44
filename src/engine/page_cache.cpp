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
  int32_t page = -1;          // -1: its contents are in the tier
  int32_t slot = -1;          // of the tier; -1: they are in the page
  int64_t users = 0;          // sequences that hold the node
  int64_t num_resident = 0;   // children with a page
  uint64_t last_used = 0;
  std::span<const Key> keys;  // of its positions: the parent's map owns them; fewer than a page only in leaves
  std::map<std::vector<Key>, std::unique_ptr<Node>, Lexicographic> children;

  bool is_resident() const { return page >= 0; }
  bool is_unused_leaf() const { return parent != nullptr && users == 0 && children.empty(); }
};

PageCache::PageCache(int64_t num_pages, int page_tokens, bool reuse, PageTier* tier)
    : pool_(num_pages), page_tokens_(page_tokens), reuse_(reuse), tier_(tier), slots_(tier != nullptr ? tier->num_slots() : 0),
      root_(std::make_unique<Node>()) {}

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

PageCache::Path PageCache::find(std::span<const Key> keys) const {
  Path path;
  const Node* node = root_.get();
  while (true) {
    const auto rest = keys.subspan(path.full.size() * page_tokens_);
    path.next = best_child(*node, rest.first(std::min<size_t>(rest.size(), page_tokens_)));
    if (path.next.common < page_tokens_) return path;
    path.full.push_back(path.next.node);
    node = path.next.node;
  }
}

PageCache::Match PageCache::match(std::span<const Key> keys) const {
  const Path path = find(keys);
  Match match;
  match.tokens = static_cast<int64_t>(path.full.size()) * page_tokens_ + path.next.common;
  for (const Node* node : path.full) {
    match.full_pages += node->is_resident();
    match.idle_pages += node->is_resident() && node->users == 0;
  }
  return match;
}

int64_t PageCache::attach(Pages& pages, std::span<const Key> keys, const CopyPage& copy) {
  M3_CHECK(pages.ids.empty(), "attach: the sequence has {} pages already", pages.ids.size());
  Path path = find(keys);
  Node* const next = path.next.common > 0 ? path.next.node : nullptr;
  // All are held first: making room for one must not take another.
  for (Node* node : path.full) hold(*node);
  if (next != nullptr) hold(*next);

  Node* lost = nullptr;
  for (Node* node : path.full) {
    if (lost == nullptr && !node->is_resident()) {
      const int32_t page = take_copy(*node, copy);
      if (page >= 0) {
        make_resident(*node, page);
      } else {
        lost = node;
      }
    }
    if (lost != nullptr) {
      let_go(*node);
      continue;
    }
    pages.ids.push_back(node->page);
    pages.nodes.push_back(node);
  }
  int64_t tokens = static_cast<int64_t>(pages.ids.size()) * page_tokens_;
  if (next != nullptr) {
    const int32_t page = lost == nullptr ? take_copy(*next, copy) : -1;
    let_go(*next);
    if (page >= 0) {
      pages.ids.push_back(page);
      tokens += path.next.common;
    } else if (lost == nullptr && !next->is_resident()) {
      lost = next;
    }
  }
  if (lost != nullptr) remove(*lost);  // what cannot be brought back is forgotten
  return tokens;
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
    if (best.common < page_tokens_) best.node = add_child(parent, keys, pages.ids[i]);
    hold(*best.node);
    if (!best.node->is_resident()) {
      make_resident(*best.node, pages.ids[i]);
    } else if (best.node->page != pages.ids[i]) {
      pool_.give_back(pages.ids[i]);
      pages.ids[i] = best.node->page;
    }
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
    Node& oldest = *idle_leaves_.begin()->second;
    ++counts_.evicted;
    if (!store(oldest)) remove(oldest);
  }
  return pool_.take();
}

int32_t PageCache::take_copy(const Node& node, const CopyPage& copy) {
  const int32_t page = take_page();
  if (page < 0) return -1;
  if (node.is_resident()) {
    copy(node.page, page);
  } else if (tier_->load(node.slot, page)) {
    ++counts_.restored;
  } else {
    ++counts_.failed;
    pool_.give_back(page);
    return -1;
  }
  return page;
}

// The contents of an idle node move to the tier, which forgets for it what it has not used for longest.
bool PageCache::store(Node& node) {
  if (tier_ == nullptr) return false;
  if (slots_.num_free() == 0) {
    if (stored_leaves_.empty()) return false;
    remove_leaf(*stored_leaves_.begin()->second);
  }
  const int32_t slot = slots_.take();
  if (!tier_->store(node.page, slot)) {
    ++counts_.failed;
    slots_.give_back(slot);
    return false;
  }
  ++counts_.stored;
  --num_idle_;
  unlist(node);
  unlist(*node.parent);
  pool_.give_back(node.page);
  node.page = -1;
  node.slot = slot;
  --node.parent->num_resident;
  enlist(node);
  enlist(*node.parent);
  return true;
}

void PageCache::make_resident(Node& held, int32_t page) {
  unlist(*held.parent);
  slots_.give_back(held.slot);
  held.slot = -1;
  held.page = page;
  ++held.parent->num_resident;
  enlist(*held.parent);
}

// A leaf whose contents are the beginning of the new ones is of no use any more.
PageCache::Node* PageCache::add_child(Node& parent, std::span<const Key> keys, int32_t page) {
  unlist(parent);
  auto [it, added] = parent.children.emplace(std::vector<Key>(keys.begin(), keys.end()), std::make_unique<Node>());
  M3_CHECK(added, "a page with these contents is cached already");
  ++parent.num_resident;
  enlist(parent);
  Node* node = it->second.get();
  node->parent = &parent;
  node->page = page;
  node->keys = it->first;
  node->last_used = ++tick_;
  ++num_idle_;
  enlist(*node);
  while (it != parent.children.begin()) {
    Node& before = *std::prev(it)->second;
    const bool beginning = before.keys.size() < keys.size() && std::ranges::equal(before.keys, keys.first(before.keys.size()));
    if (!beginning || !before.is_unused_leaf()) break;
    remove_leaf(before);
  }
  return node;
}

void PageCache::remove_leaf(Node& leaf) {
  Node& parent = *leaf.parent;
  unlist(leaf);
  unlist(parent);
  if (leaf.is_resident()) {
    --num_idle_;
    --parent.num_resident;
    pool_.give_back(leaf.page);
  } else {
    slots_.give_back(leaf.slot);
  }
  parent.children.erase(parent.children.find(leaf.keys));
  enlist(parent);
}

void PageCache::remove(Node& node) {
  for (Node* at = &node;;) {
    if (!at->children.empty()) {
      at = at->children.begin()->second.get();
      continue;
    }
    Node* parent = at->parent;
    const bool done = at == &node;
    remove_leaf(*at);
    if (done) return;
    at = parent;
  }
}

void PageCache::hold(Node& node) {
  if (node.users == 0) {
    unlist(node);
    num_idle_ -= node.is_resident();
  }
  ++node.users;
}

void PageCache::let_go(Node& node) {
  if (--node.users > 0) return;
  num_idle_ += node.is_resident();
  node.last_used = ++tick_;
  enlist(node);
}

PageCache::Leaves* PageCache::list_of(const Node& node) {
  if (node.parent == nullptr || node.users > 0) return nullptr;
  if (node.is_resident()) return node.num_resident == 0 ? &idle_leaves_ : nullptr;
  return node.children.empty() ? &stored_leaves_ : nullptr;
}

void PageCache::enlist(Node& node) {
  if (Leaves* list = list_of(node)) list->insert({node.last_used, &node});
}

void PageCache::unlist(Node& node) {
  if (Leaves* list = list_of(node)) list->erase({node.last_used, &node});
}

void PageCache::for_each_branch(const VisitBranch& visit) const {
  std::vector<std::pair<uint64_t, const Node*>> ends;
  std::vector<const Node*> open = {root_.get()};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    for (const auto& [keys, child] : node->children) {
      if (child->is_resident()) open.push_back(child.get());
    }
    if (node->num_resident == 0 && node != root_.get()) ends.push_back({node->last_used, node});
  }
  std::sort(ends.begin(), ends.end());
  for (const auto& [used, end] : ends) {
    std::vector<const Node*> path;
    for (const Node* node = end; node != root_.get(); node = node->parent) path.push_back(node);
    std::vector<Key> keys;
    std::vector<int32_t> pages;
    for (auto node = path.rbegin(); node != path.rend(); ++node) {
      keys.insert(keys.end(), (*node)->keys.begin(), (*node)->keys.end());
      pages.push_back((*node)->page);
    }
    visit(keys, pages);
  }
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
  std::vector<int> seen_slots(slots_.num_pages());
  int64_t idle = 0;
  size_t idle_leaves = 0, stored_leaves = 0;
  std::vector<const Node*> open = {root_.get()};
  while (!open.empty()) {
    const Node* node = open.back();
    open.pop_back();
    int64_t num_resident = 0;
    for (const auto& [keys, child] : node->children) {
      open.push_back(child.get());
      num_resident += child->is_resident();
    }
    M3_CHECK(num_resident == node->num_resident, "page {} counts {} children in memory, it has {}", node->page,
             node->num_resident, num_resident);
    if (node == root_.get()) continue;
    M3_CHECK(node->is_resident() || num_resident == 0, "slot {} has pages in memory behind it", node->slot);
    M3_CHECK(node->is_resident() != (node->slot >= 0), "page {} is in slot {} too", node->page, node->slot);
    ++(node->is_resident() ? seen[node->page] : seen_slots[node->slot]);
    M3_CHECK(node->users == users[node], "page {} counts {} users, {} hold it", node->page, node->users, users[node]);
    M3_CHECK(node->children.empty() || static_cast<int>(node->keys.size()) == page_tokens_, "page {} is not full", node->page);
    idle += node->is_resident() && node->users == 0;
    idle_leaves += node->is_resident() && node->users == 0 && num_resident == 0;
    stored_leaves += !node->is_resident() && node->children.empty();
  }
  pool_.for_each_free([&](int32_t page) { ++seen[page]; });
  for (size_t page = 0; page < seen.size(); ++page) {
    M3_CHECK(seen[page] == 1, "page {} is in {} places, want 1", page, seen[page]);
  }
  slots_.for_each_free([&](int32_t slot) { ++seen_slots[slot]; });
  for (size_t slot = 0; slot < seen_slots.size(); ++slot) {
    M3_CHECK(seen_slots[slot] == 1, "slot {} is in {} places, want 1", slot, seen_slots[slot]);
  }
  M3_CHECK(idle == num_idle_, "{} pages are idle, counted {}", idle, num_idle_);
  M3_CHECK(idle_leaves == idle_leaves_.size() && stored_leaves == stored_leaves_.size(),
           "{} idle and {} stored leaves, {} and {} listed", idle_leaves, stored_leaves, idle_leaves_.size(), stored_leaves_.size());
}

}  // namespace m3
