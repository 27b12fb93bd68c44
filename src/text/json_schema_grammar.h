// JSON schemas as grammars (docs/structured-output.md lists what is supported).
#pragma once
#include "text/grammar_machine.h"
#include "text/json_value.h"

namespace m3 {

struct JsonGrammarLimits {
  size_t max_states = 20'000;
  int max_depth = 64;  // of the schema itself
};

// The machine of all JSON texts that the schema allows and that we generate: members in the order in
// which they are declared, little white space. Whatever a schema asks for that we cannot hold is refused
// with an Error that begins with its JSON pointer.
GrammarMachine json_schema_machine(const JsonValue& schema, const JsonGrammarLimits& limits = {});

// Any JSON object.
GrammarMachine json_object_machine();

}  // namespace m3
