// From the tags of a tool call to JSON: a small tree of elements and its conversion under the
// tool's schema (tests/golden/chat/README.md, rules 4 to 6).
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/json_value.h"
#include "text/tool_schema.h"

namespace m3 {

// One parameter, member or item. Its text lies in the raw text of the call: everything in order,
// with tags but without their markers; "<name>" stands directly before it where an opening tag was
// read.
struct CallElement {
  std::string name;
  size_t raw_begin = 0, raw_end = 0;
  std::vector<CallElement> children;
  std::string closed_by;  // name in the closing tag; empty if there was none
  bool cut = false;       // the output ended inside
};

// Collects the members of one object in order of arrival.
class ArgumentBuilder {
 public:
  // `raw` and what `schema` refers to must outlive the builder; `raw` may grow.
  ArgumentBuilder(const std::string& raw, ToolSchema schema)
      : raw_(&raw), schema_(std::move(schema)) {}

  enum class Change { kNone, kNewKey, kMerged };
  struct Added {
    Change change = Change::kNone;
    size_t index = 0;        // of the key in object()
    bool may_merge = false;  // a repetition of the key would change the value
  };
  Added add(const CallElement& element);

  const ToolSchema& schema() const { return schema_; }
  const JsonValue& object() const { return object_; }
  bool has(const std::string& key) const { return index_.contains(key); }
  JsonValue take() { return std::move(object_); }

 private:
  const std::string* raw_;
  ToolSchema schema_;
  JsonValue object_ = JsonValue::object();
  std::vector<bool> repeated_;  // by index: an undeclared key that became a list by repetition
  std::unordered_map<std::string, size_t> index_;
};

}  // namespace m3
