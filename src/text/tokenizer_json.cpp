#include "text/tokenizer_json.h"

#include <charconv>
#include <optional>

#include "base/check.h"
#include "text/utf8.h"

namespace m3 {

namespace {

// The byte <-> character map of byte-level BPE: printable Latin-1 characters stand for themselves,
// the other bytes for U+0100 and on, in order.
bool stands_for_itself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) ||
         (byte >= 0xAE && byte <= 0xFF);
}

std::array<int, 324> make_byte_of_character() {
  std::array<int, 324> byte_of{};
  byte_of.fill(-1);
  int next = 256;
  for (int byte = 0; byte < 256; ++byte)
    byte_of[static_cast<size_t>(stands_for_itself(byte) ? byte : next++)] = byte;
  return byte_of;
}

// The bytes that the characters of an entry stand for; nothing if one stands for none.
std::optional<std::string> bytes_of_entry(const std::string& entry) {
  static const std::array<int, 324> kByteOf = make_byte_of_character();
  std::string bytes;
  for (size_t at = 0; at < entry.size();) {
    const size_t length = utf8_step(std::string_view(entry).substr(at)).length;
    unsigned character = static_cast<unsigned char>(entry[at]);
    if (length == 2)
      character = (character & 0x1F) << 6 | (static_cast<unsigned char>(entry[at + 1]) & 0x3F);
    if (length > 2 || character >= kByteOf.size() || kByteOf[character] < 0) return std::nullopt;
    bytes += static_cast<char>(kByteOf[character]);
    at += length;
  }
  return bytes;
}

class Reader {
 public:
  Reader(std::string_view json, const std::string& name)
      : name_(name), root_(JsonValue::parse(json, name)) {}

  TokenizerFile read() {
    M3_CHECK(root_.is_object(), "{}: the top level is of type {}, want an object", name_,
             root_.kind_name());
    if (const JsonValue* version = optional(root_, "version")) {
      M3_CHECK(version->is_string() && version->text() == "1.0",
               "{}: version {} is not supported, want \"1.0\"", name_, version->dump());
    }
    const JsonValue& model = read_model();
    read_vocab(model);
    read_merges(model);
    read_added();
    check_normalizer();
    check_decoder();
    const JsonValue* steps = optional(root_, "pre_tokenizer");
    M3_CHECK(
        steps != nullptr,
        "{}: no pre_tokenizer; want a ByteLevel step, else text would reach the model unmapped",
        name_);
    file_.pretokenizer = std::make_unique<Pretokenizer>(*steps, name_ + ": pre_tokenizer");
    return std::move(file_);
  }

 private:
  static const JsonValue* optional(const JsonValue& object,
                                   std::string_view key) {  // null counts as absent
    const JsonValue* value = object.find(key);
    return value != nullptr && !value->is_null() ? value : nullptr;
  }
  bool flag(const JsonValue& object, std::string_view key, const std::string& where) const {
    const JsonValue* value = optional(object, key);
    M3_CHECK(value == nullptr || value->is_bool(), "{}: {} of {} is of type {}, want true or false",
             name_, key, where, value == nullptr ? "null" : value->kind_name());
    return value != nullptr && value->as_bool();
  }

  const JsonValue& read_model() {
    const JsonValue* model = optional(root_, "model");
    M3_CHECK(model != nullptr && model->is_object(), "{}: no object 'model'", name_);
    if (const JsonValue* type = optional(*model, "type")) {
      M3_CHECK(type->is_string() && type->text() == "BPE",
               "{}: model type {} is not supported, want BPE", name_, type->dump());
    }
    if (const JsonValue* dropout = optional(*model, "dropout")) {
      M3_CHECK(dropout->is_number() && dropout->as_double() == 0,
               "{}: dropout {} makes prompts differ from run to run", name_, dropout->dump());
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      const JsonValue* affix = optional(*model, key);
      M3_CHECK(affix == nullptr || (affix->is_string() && affix->text().empty()),
               "{}: {} is not supported in byte-level BPE", name_, key);
    }
    file_.ignore_merges = flag(*model, "ignore_merges", "model");
    return *model;
  }

  // Ids are non-negative integers; holes are allowed as long as a table by id stays small.
  int32_t read_id(const JsonValue& value, const std::string& of) const {
    M3_CHECK(value.is_integer(), "{}: the id of {} is of type {}, want an integer", name_, of,
             value.kind_name());
    int64_t id = -1;
    const std::string& digits = value.text();
    const auto result = std::from_chars(digits.data(), digits.data() + digits.size(), id);
    M3_CHECK(result.ec == std::errc() && id >= 0 && id < max_ids_,
             "{}: the id of {} is {}, want 0 to {} (for {} entries)", name_, of, digits,
             max_ids_ - 1, num_entries_);
    return static_cast<int32_t>(id);
  }

  void read_vocab(const JsonValue& model) {
    const JsonValue* vocab = optional(model, "vocab");
    M3_CHECK(vocab != nullptr && vocab->is_object(), "{}: no object 'vocab' in the model", name_);
    const JsonValue* added = optional(root_, "added_tokens");
    num_entries_ = static_cast<int64_t>(vocab->size() + (added != nullptr ? added->size() : 0));
    constexpr int64_t kSpareIds = 1 << 16;
    max_ids_ = 4 * num_entries_ + kSpareIds;
    file_.byte_ids.fill(-1);
    id_of_.reserve(vocab->size());
    entry_of_.reserve(static_cast<size_t>(num_entries_));
    for (size_t i = 0; i < vocab->size(); ++i) {
      const std::string& entry = vocab->keys()[i];
      const int32_t id = read_id(vocab->items()[i], "entry '" + entry + "'");
      const auto [owner, is_new] = entry_of_.try_emplace(id, entry);
      M3_CHECK(is_new, "{}: id {} belongs to the entries '{}' and '{}'", name_, id, owner->second,
               entry);
      id_of_.emplace(entry, id);
      const std::optional<std::string> bytes = bytes_of_entry(entry);
      place(id, bytes.value_or(entry));
      if (bytes && bytes->size() == 1) file_.byte_ids[static_cast<unsigned char>((*bytes)[0])] = id;
      if (bytes && file_.ignore_merges) file_.whole.emplace(*bytes, id);
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      M3_CHECK(file_.byte_ids[byte] >= 0, "{}: vocab has no entry for byte {:#04x}", name_, byte);
    }
  }

  void place(int32_t id, std::string bytes) {
    if (file_.bytes.size() <= static_cast<size_t>(id))
      file_.bytes.resize(static_cast<size_t>(id) + 1);
    file_.bytes[static_cast<size_t>(id)] = std::move(bytes);
  }

  void read_merges(const JsonValue& model) {
    const JsonValue* merges = optional(model, "merges");
    M3_CHECK(merges != nullptr && merges->is_array(), "{}: no list 'merges' in the model", name_);
    const auto& list = merges->items();
    size_t first = 0;
    if (!list.empty() && list[0].is_string() && list[0].text().starts_with("#version")) first = 1;
    file_.merges.reserve(list.size());
    for (size_t i = first; i < list.size(); ++i) {
      M3_CHECK(list[i].kind() == list[first].kind(),
               "{}: merge {} is of type {}, but those before are of type {}", name_, i,
               list[i].kind_name(), list[first].kind_name());
      const auto [left, right] = merge_parts(list[i], i);
      const int32_t left_id = merge_entry(left, i), right_id = merge_entry(right, i);
      const int32_t result_id = merge_entry(std::string(left) + std::string(right), i);
      file_.merges.push_back({left_id, right_id, result_id});
    }
  }

  std::pair<std::string_view, std::string_view> merge_parts(const JsonValue& merge,
                                                            size_t i) const {
    if (merge.is_string()) {
      const std::string_view text = merge.text();
      const size_t space = text.find(' ');
      M3_CHECK(space != text.npos && space > 0 && space + 1 < text.size() &&
                   text.find(' ', space + 1) == text.npos,
               "{}: merge {} is '{}', want two entries with a space between them", name_, i, text);
      return {text.substr(0, space), text.substr(space + 1)};
    }
    M3_CHECK(merge.is_array() && merge.size() == 2 && merge.items()[0].is_string() &&
                 merge.items()[1].is_string(),
             "{}: merge {} is {}, want two strings", name_, i, merge.dump().substr(0, 100));
    return {merge.items()[0].text(), merge.items()[1].text()};
  }

  int32_t merge_entry(std::string_view entry, size_t i) const {
    const auto at = id_of_.find(entry);
    M3_CHECK(at != id_of_.end(), "{}: merge {} needs the entry '{}', which vocab does not have",
             name_, i, entry);
    return at->second;
  }

  void read_added() {
    const JsonValue* list = optional(root_, "added_tokens");
    if (list == nullptr) return;
    M3_CHECK(list->is_array(), "{}: added_tokens is of type {}, want a list", name_,
             list->kind_name());
    std::unordered_map<std::string, int32_t> seen;  // owns the texts that entry_of_ refers to
    for (size_t i = 0; i < list->size(); ++i) {
      AddedToken token = read_added_token(list->items()[i], fmt::format("added token {}", i));
      const auto [earlier, is_new] = seen.emplace(token.content, token.id);
      M3_CHECK(is_new, "{}: the added token '{}' is listed twice (ids {} and {})", name_,
               token.content, earlier->second, token.id);
      const auto entry = id_of_.find(token.content);
      M3_CHECK(entry == id_of_.end() || entry->second == token.id,
               "{}: the added token '{}' has id {}, but the entry of that text has id {}", name_,
               token.content, token.id, entry == id_of_.end() ? 0 : entry->second);
      const auto [owner, is_new_id] = entry_of_.try_emplace(token.id, earlier->first);
      M3_CHECK(is_new_id || owner->second == token.content,
               "{}: the added token '{}' has id {}, which belongs to '{}'", name_, token.content,
               token.id, owner->second);
      place(token.id, token.content);
      file_.added.push_back(std::move(token));
    }
  }

  AddedToken read_added_token(const JsonValue& json, const std::string& where) const {
    M3_CHECK(json.is_object(), "{}: {} is of type {}, want an object", name_, where,
             json.kind_name());
    const JsonValue* content = optional(json, "content");
    M3_CHECK(content != nullptr && content->is_string() && !content->text().empty(),
             "{}: {} has no content (a text that is not empty)", name_, where);
    const std::string title = "added token '" + content->text() + "'";
    const JsonValue* id = optional(json, "id");
    M3_CHECK(id != nullptr, "{}: {} has no id", name_, title);
    AddedToken token;
    token.content = content->text();
    token.id = read_id(*id, title);
    token.special = flag(json, "special", title);
    token.normalized = flag(json, "normalized", title);
    token.lstrip = flag(json, "lstrip", title);
    token.rstrip = flag(json, "rstrip", title);
    token.single_word = flag(json, "single_word", title);
    return token;
  }

  void check_normalizer() const {
    const JsonValue* normalizer = optional(root_, "normalizer");
    if (normalizer == nullptr) return;
    const JsonValue* type = normalizer->find("type");
    const JsonValue* list = normalizer->find("normalizers");
    const bool is_empty_sequence = type != nullptr && type->is_string() &&
                                   type->text() == "Sequence" && list != nullptr &&
                                   list->is_array() && list->size() == 0;
    M3_CHECK(is_empty_sequence,
             "{}: the normalizer {} is not supported; convert the tokenizer to one without", name_,
             normalizer->dump().substr(0, 200));
  }

  void check_decoder() const {
    const JsonValue* decoder = optional(root_, "decoder");
    if (decoder == nullptr) return;
    const JsonValue* type = decoder->find("type");
    M3_CHECK(
        type != nullptr && type->is_string() && type->text() == "ByteLevel",
        "{}: the decoder {} is not supported, want ByteLevel (the inverse of the pre_tokenizer)",
        name_, decoder->dump().substr(0, 200));
  }

  const std::string& name_;
  const JsonValue root_;
  TokenizerFile file_;
  int64_t num_entries_ = 0, max_ids_ = 0;
  std::unordered_map<std::string_view, int32_t> id_of_;     // by entry, as spelled in the file
  std::unordered_map<int32_t, std::string_view> entry_of_;  // by id
};

}  // namespace

TokenizerFile read_tokenizer_json(std::string_view json, const std::string& name) {
  return Reader(json, name).read();
}

}  // namespace m3
