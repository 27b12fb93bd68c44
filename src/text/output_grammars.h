// The grammars that a request can ask for, as machines (grammar.h runs them;
// docs/structured-output.md).
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "text/chat.h"
#include "text/grammar_machine.h"
#include "text/json_value.h"

namespace m3 {

inline constexpr size_t kMaxGrammarStates = 20'000;  // about 1 KB each

// All JSON texts that the schema allows and that we generate: members in the order in which they
// are declared, little white space. What a schema asks for and we cannot hold is refused with an
// Error that begins with its JSON pointer.
GrammarMachine json_schema_machine(const JsonValue& schema);
GrammarMachine json_object_machine();  // any JSON object
GrammarMachine regex_machine(std::string_view pattern);
GrammarMachine choice_machine(std::span<const std::string> texts);

// One block of tool calls in M3's own syntax, from its opening tag to its closing tag. Arguments of
// tools that say "strict": true are held to their parameters, those of others are free.
struct ToolCallRules {
  bool parallel = true;      // several calls in the block
  int32_t namespace_id = 0;  // the token that leads every tag
};
GrammarMachine tool_call_machine(std::span<const Tool> tools, const ToolCallRules& rules);

}  // namespace m3
