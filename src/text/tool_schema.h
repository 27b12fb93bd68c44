// The JSON schema of a tool's parameters, as far as reading a call needs it: which types a value
// may have, and the schemas of members and items. $ref, anyOf, oneOf and allOf are flattened into a
// list of branches; limits on depth and number keep circular and hostile schemas harmless.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "text/json_value.h"

namespace m3 {

// A set of JSON types.
struct SchemaTypes {
  enum Bit : unsigned {
    kString = 1,
    kInteger = 2,
    kNumber = 4,
    kBoolean = 8,
    kNull = 16,
    kArray = 32,
    kObject = 64
  };
  unsigned bits = 0;
  bool has_unknown = false;  // a name that JSON schema does not know

  bool empty() const { return bits == 0 && !has_unknown; }
  bool only_unknown() const { return bits == 0 && has_unknown; }
  bool has(unsigned any_of) const { return (bits & any_of) != 0; }
};

// A view into the schema's JSON, which must outlive it.
class ToolSchema {
 public:
  // `schema` may be a null pointer or no object: nothing is known. References start at `root`.
  ToolSchema(const JsonValue* schema, const JsonValue* root);

  bool is_free() const { return is_free_; }  // there is no schema
  const SchemaTypes& types() const { return types_; }
  bool declares(std::string_view name) const { return property(name) != nullptr; }
  bool has_properties() const;
  ToolSchema member(std::string_view name) const;
  ToolSchema item(size_t index) const;

 private:
  void flatten(const JsonValue* schema, int depth);
  const JsonValue* resolve(std::string_view reference) const;
  const JsonValue* property(std::string_view name) const;

  const JsonValue* root_;
  bool is_free_;
  std::vector<const JsonValue*> branches_;
  SchemaTypes types_;
};

}  // namespace m3
