// Ids of texts that were encoded before: a chat's next turn encodes only what is new in it. Thread-safe.
//
// What stands between two added tokens is encoded by itself (tokenizer.cpp), so its ids are a function of its bytes, and
// a turn that was sent before is found whole. Texts are compared byte by byte. Least recently used go first.
#pragma once
#include <cstdint>
#include <list>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace m3 {

class EncodeCache {
 public:
  explicit EncodeCache(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Appends the ids of the text. false: it is not known, nothing is appended.
  bool find(std::string_view text, std::vector<int32_t>& ids);
  void add(std::string_view text, std::span<const int32_t> ids);

  struct Counts {
    int64_t hits = 0, hit_bytes = 0;  // texts found, and their bytes
    int64_t encoded_bytes = 0;        // of texts that had to be encoded
    int64_t held_bytes = 0;           // in memory now
  };
  Counts counts() const;

 private:
  struct Entry {
    std::string text;
    std::vector<int32_t> ids;
    int64_t bytes() const;
  };

  const int64_t max_bytes_;
  mutable std::mutex mutex_;  // guards what follows
  std::list<Entry> entries_;  // newest first
  std::unordered_map<std::string_view, std::list<Entry>::iterator> by_text_;  // of the entries' texts
  Counts counts_;
};

}  // namespace m3
