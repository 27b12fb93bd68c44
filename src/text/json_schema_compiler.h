// One JSON schema to grammar fragments, in one of two forms: JSON texts, or the tags of M3's tool
// calls.
#pragma once
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "text/json_grammar_parts.h"

namespace m3 {

class JsonSchemaCompiler {
 public:
  using Part = GrammarBuilder::Part;

  // `root` must outlive the compiler. `name`: how errors call the root ("#"). `namespace_id`: the
  // token that leads every tag; only parameters() needs it.
  JsonSchemaCompiler(GrammarBuilder& builder, JsonGrammarParts& parts, const JsonValue& root,
                     std::string name, int32_t namespace_id = -1);

  Part value();       // JSON texts of the root
  Part parameters();  // the declared members of the root, an object, as tags one behind the other

 private:
  enum class Form { kJson, kTags };
  struct Place {  // of a schema inside the root
    std::string pointer;
    int depth;
    Form form;
    Place at(std::string_view key) const;
    Place at(std::string_view key, std::string_view next) const { return at(key).at(next); }
  };

  [[noreturn]] static void refuse(const Place& place, std::string_view why);
  static void allow_only(const JsonValue& schema, const Place& place,
                         std::initializer_list<std::string_view> allowed);
  static void check_keywords(const JsonValue& schema, const Place& place,
                             const std::vector<std::string>& types);
  static std::vector<std::string> types_of(const JsonValue& schema, const Place& place);
  static int64_t count(const JsonValue& schema, const char* key, int64_t absent,
                       const Place& place);

  Part value(const JsonValue& schema, const Place& place);
  Part constrained_value(const JsonValue& schema, const Place& place);
  Part free_value(const Place& place);
  Part typed(const std::string& type, const JsonValue& schema, const Place& place);
  Part referenced(const JsonValue& reference, const Place& place);
  const JsonValue& resolve(const std::string& reference, const Place& place) const;
  const JsonValue& follow(const JsonValue& schema, const Place& place) const;
  Part combined(const std::string& key, const JsonValue& list, const Place& place);
  Part listed(const JsonValue& schema, const Place& place);
  Part string(const JsonValue& schema, const Place& place);
  Part regex(const std::string& expression, bool whole, const Place& place);
  Part number(const JsonValue& schema, const Place& place, bool integers);
  Part array(const JsonValue& schema, const Place& place);
  Part object(const JsonValue& schema, const Place& place);
  Part members(const JsonValue& schema, const Place& place, bool is_closed);
  Part member(const std::string& name, Part value, const Place& place);
  Part other_member(const JsonValue* properties, const JsonValue* additional, const Place& place);
  Part tagged(const std::string& name, Part value, const Place& place);

  GrammarBuilder& builder_;
  JsonGrammarParts& parts_;
  const JsonValue& root_;
  std::string name_;
  int32_t namespace_id_;
  std::map<std::pair<std::string, Form>, int> references_;  // rules
};

}  // namespace m3
