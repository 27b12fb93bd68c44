// The strict reader of tokenizer.json: everything the tokenizer needs, checked.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"

namespace m3 {

struct TokenizerFile {
  std::vector<std::string> bytes;  // by id; empty: the id has no token
  std::array<int32_t, 256> byte_ids;
  std::vector<BpeMerge> merges;
  bool ignore_merges = false;
  std::unordered_map<std::string, int32_t> whole;  // with ignore_merges: entries by their bytes
  std::vector<AddedToken> added;
  std::unique_ptr<Pretokenizer> pretokenizer;
};

// Throws Error that starts with `name`. Ids need not be dense, but a table by id must stay small
// beside the file.
TokenizerFile read_tokenizer_json(std::string_view json, const std::string& name);

}  // namespace m3
