// Byte-level BPE tokenizer read from a Hugging Face tokenizer.json (model.md §14). Everything comes
// from the file: vocabulary, merges, split pattern, added tokens and their flags. What we do not
// support is refused at load time by name, never ignored.
#pragma once
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace m3 {

class EncodeCache;

struct TextRange {  // bytes [begin, end)
  size_t begin = 0, end = 0;
};

struct EncodeOptions {
  // false: text that spells an added token is ordinary text (it cannot become a protocol marker).
  bool added_tokens = true;
  // The same for parts of the text: ascending ranges, such as what a user wrote inside a rendered prompt.
  std::span<const TextRange> plain;
  // Texts between added tokens that this tokenizer encoded before (encode_cache.h); the ids are the same with and without.
  EncodeCache* cache = nullptr;
};

// Immutable after loading; all const functions may be called from any thread.
class Tokenizer {
 public:
  // `path`: the file, or a folder that holds tokenizer.json. Throws Error naming file and entry.
  static Tokenizer load(const std::filesystem::path& path);
  static Tokenizer from_json(std::string_view json, std::string_view name = "tokenizer.json");
  // false: this build has no PCRE2, and encode() fails for files with a split pattern.
  static bool can_encode();
  ~Tokenizer();
  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;

  // Ids of a UTF-8 text; no start token is added (the chat template writes its own). Throws Error
  // if the text is not valid UTF-8 (with the byte offset) or the build has no PCRE2.
  std::vector<int32_t> encode(std::string_view text, const EncodeOptions& options = {}) const;
  // The text as cut by added tokens and the split pattern, before BPE.
  std::vector<std::string> split(std::string_view text) const;

  // UTF-8 text of the ids; invalid bytes become U+FFFD (WHATWG), ids without a token give nothing.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  int32_t size() const;                      // largest id + 1; ids from here on have no token
  std::string_view bytes(int32_t id) const;  // raw bytes; the text of an added token; else empty
  bool is_added(int32_t id) const;
  bool is_special(int32_t id) const;  // added, and marked special in the file
  std::optional<int32_t> added_id(std::string_view content) const;  // e.g. "[e~["
  int32_t require_added_id(std::string_view content) const;         // throws naming file and token

 private:
  struct Impl;
  explicit Tokenizer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Turns ids into text as they come: releases the longest valid UTF-8 prefix, holds an incomplete
// character back, replaces a byte that can no longer become one by U+FFFD as soon as that is known.
// One object per stream, one thread at a time; the tokenizer must outlive it.
class StreamDecoder {
 public:
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}
  std::string push(int32_t id);
  std::string push_bytes(std::string_view bytes);
  std::string finish();  // what was held back, replaced by U+FFFD; ready for a new stream

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;  // at most 3 bytes: the start of a character
};

}  // namespace m3
