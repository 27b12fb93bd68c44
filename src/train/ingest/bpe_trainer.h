// Trains a byte-level BPE vocabulary (Sennrich et al. 2016, on bytes) in the layout of an existing
// tokenizer.json: its added tokens, split pattern, byte alphabet and number of entries stay; the
// merges are new.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>

#include "text/json_value.h"
#include "text/tokenizer.h"

namespace m3::ingest {

class BpeTrainer {
 public:
  // `layout`: text of a tokenizer.json whose first 256 ids are single bytes. While it trains,
  // digits are cut one by one, so that no entry holds two of them (nano.md §2); the file that comes
  // out keeps the layout's pattern.
  explicit BpeTrainer(std::string_view layout);

  void add(std::string_view text, int64_t times = 1);

  // The new tokenizer.json. Merges the most frequent pair, of equal ones that of the smallest ids,
  // and counts again, until the vocabulary has the layout's size. Throws if the texts hold too few
  // pairs.
  std::string train() const;

 private:
  JsonValue layout_;
  Tokenizer cutter_;
  std::unordered_map<std::string, int64_t> pieces_;
};

}  // namespace m3::ingest
