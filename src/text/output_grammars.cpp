#include "text/output_grammars.h"

#include "base/check.h"
#include "text/grammar_regex.h"
#include "text/json_schema_compiler.h"

namespace m3 {

using Part = GrammarBuilder::Part;

namespace {

GrammarMachine finish(GrammarBuilder& builder, Part root) {
  const int rule = builder.add_rule();
  builder.define_rule(rule, root);
  return builder.finish(rule, kMaxGrammarStates);
}

// Arguments without a schema: any tags and texts. Only the tags that would end the call, or begin
// another, are kept out.
Part free_arguments(GrammarBuilder& builder, JsonGrammarParts& parts, int32_t namespace_id) {
  const std::vector<std::string_view> reserved = {"invoke", "tool_call", ""};
  const CharSet forbidden = {{'<', '<'}, {'>', '>'}, {'\n', '\n'}, {'"', '"'}, {'/', '/'}};
  const Part slash = builder.optional(builder.literal("/"));
  const Part tag = builder.sequence({builder.token(namespace_id), builder.literal("<"), slash,
                                     parts.none_of(reserved, forbidden), builder.literal(">")});
  return builder.optional(builder.loop(builder.sequence({tag, parts.text()})));
}

}  // namespace

GrammarMachine json_schema_machine(const JsonValue& schema) {
  GrammarBuilder builder;
  JsonGrammarParts parts(builder);
  JsonSchemaCompiler compiler(builder, parts, schema, "#");
  return finish(builder, builder.sequence({parts.space(), compiler.value()}));
}

GrammarMachine json_object_machine() {
  GrammarBuilder builder;
  JsonGrammarParts parts(builder);
  return finish(builder, builder.sequence({parts.space(), parts.any_object()}));
}

GrammarMachine regex_machine(std::string_view pattern) {
  GrammarBuilder builder;
  return finish(builder, grammar_regex(builder, pattern, {}));
}

GrammarMachine choice_machine(std::span<const std::string> texts) {
  M3_CHECK(!texts.empty(), "a choice needs at least one text");
  GrammarBuilder builder;
  std::vector<Part> parts;
  for (const std::string& text : texts) parts.push_back(builder.literal(text));
  return finish(builder, builder.either(parts));
}

GrammarMachine tool_call_machine(std::span<const Tool> tools, const ToolCallRules& rules) {
  M3_CHECK(!tools.empty(), "a forced tool call needs at least one tool");
  GrammarBuilder builder;
  JsonGrammarParts parts(builder);
  const auto tag = [&](std::string_view text) {
    return builder.sequence({builder.token(rules.namespace_id), builder.literal(text)});
  };
  std::vector<Part> calls;
  for (const Tool& tool : tools) {
    const std::string name = tool.name();
    M3_CHECK(!name.empty() && name.find('"') == name.npos, "a tool named '{}' cannot be forced",
             name);
    const JsonValue* strict = tool.function.find("strict");
    const bool is_strict =
        strict != nullptr && strict->is_bool() && strict->as_bool() && tool.parameters() != nullptr;
    Part arguments = builder.empty();
    if (is_strict) {
      JsonSchemaCompiler compiler(builder, parts, *tool.parameters(), name + "#",
                                  rules.namespace_id);
      arguments = compiler.parameters();
    } else {
      arguments = free_arguments(builder, parts, rules.namespace_id);
    }
    calls.push_back(builder.sequence({tag(fmt::format("<invoke name=\"{}\">", name)), arguments,
                                      tag("</invoke>"), builder.literal("\n")}));
  }
  const Part call = builder.either(calls);
  return finish(
      builder, builder.sequence({tag("<tool_call>"), builder.literal("\n"),
                                 rules.parallel ? builder.loop(call) : call, tag("</tool_call>")}));
}

}  // namespace m3
