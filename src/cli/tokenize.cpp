// m3 tokenize: text to ids and back with a model's tokenizer.
#include <fmt/core.h>

#include <charconv>

#include "base/check.h"
#include "base/file.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "text/json_value.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace m3::cli {

namespace {

// A token as one readable word: JSON string form, bytes that are no whole characters as \xNN.
std::string readable(std::string_view bytes) {
  std::string out;
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind == Utf8Kind::kValid) {
      json_escape(bytes.substr(0, step.length), out);
    } else {
      for (unsigned char c : bytes.substr(0, step.length)) out += fmt::format("\\x{:02x}", c);
    }
    bytes.remove_prefix(step.length);
  }
  return out;
}

// Integers with white space, commas or list brackets between them; each must have a token.
std::vector<int32_t> read_ids(const Tokenizer& tokenizer, std::string_view text) {
  constexpr std::string_view kBetween = " \t\r\n,[]";
  std::vector<int32_t> ids;
  size_t at = 0;
  while ((at = text.find_first_not_of(kBetween, at)) != text.npos) {
    const size_t end = std::min(text.find_first_of(kBetween, at), text.size());
    int32_t id = 0;
    const auto parsed = std::from_chars(text.data() + at, text.data() + end, id);
    M3_CHECK(parsed.ec == std::errc() && parsed.ptr == text.data() + end,
             "'{}' is no token id (want integers)", text.substr(at, end - at));
    M3_CHECK(id >= 0 && id < tokenizer.size(), "no token has id {}: the tokenizer's ids are 0 to {}", id,
             tokenizer.size() - 1);
    ids.push_back(id);
    at = end;
  }
  return ids;
}

void print_table(const Tokenizer& tokenizer, const std::vector<int32_t>& ids) {
  for (int32_t id : ids) {
    const char* kind = tokenizer.is_special(id) ? "  special"
                       : tokenizer.is_added(id) ? "  added"
                                                : "";
    fmt::print("{:>8}  \"{}\"{}\n", id, readable(tokenizer.bytes(id)), kind);
  }
  fmt::print("{} tokens\n", ids.size());
}

void print_json(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                std::string_view text) {
  JsonValue id_list = JsonValue::array(), tokens = JsonValue::array();
  for (int32_t id : ids) {
    id_list.push_back(JsonValue::integer(int64_t{id}));
    tokens.push_back(JsonValue::string(readable(tokenizer.bytes(id))));
  }
  JsonValue out = JsonValue::object();
  out.set("text", JsonValue::string(std::string(text)));
  out.set("count", JsonValue::integer(static_cast<int64_t>(ids.size())));
  out.set("ids", std::move(id_list));
  out.set("tokens", std::move(tokens));
  fmt::print("{}\n", out.dump());
}

}  // namespace

int command_tokenize(const Args& args) {
  std::string model;
  std::optional<std::string> file;
  bool ids_only = false, decode = false, json = false, plain = false;
  Options options("tokenize",
                  "Cuts text into tokens with a model's tokenizer.json, or with --decode joins ids "
                  "to text. The input is "
                  "TEXT, --file, or standard input.",
                  "m3 tokenize tests/golden/tokenizer/tiny 'Hello, world!'\n"
                  "  echo '39 425 310' | m3 tokenize tests/golden/tokenizer/tiny --decode");
  std::vector<std::string> texts;
  options.positional("MODEL", model, "model folder, or a tokenizer.json");
  options.positional("TEXT", texts, "the text, or the ids with --decode", false);
  options.add("--file", file, "read the input from this file");
  options.flag("--ids", ids_only, "print only the ids, on one line");
  options.flag("--decode", decode, "the input is a list of ids; print their text");
  options.flag("--json", json, "print one JSON object: text, count, ids, tokens");
  options.flag("--plain", plain, "text that spells an added token is ordinary text");
  options.parse(args);
  if (file && !texts.empty())
    throw UsageError{"give either TEXT or --file (see m3 tokenize --help)"};
  if (texts.size() > 1 && !decode)
    throw UsageError{"TEXT is one argument: put it in quotes (see m3 tokenize --help)"};
  if (ids_only && json)
    throw UsageError{"--ids and --json exclude each other (see m3 tokenize --help)"};

  const Tokenizer tokenizer = Tokenizer::load(model);
  std::string input;
  if (file) {
    input = read_file(*file);
  } else if (!texts.empty()) {
    for (const std::string& word : texts) input += (input.empty() ? "" : " ") + word;
  } else {
    input = read_stdin();
  }

  const std::vector<int32_t> ids =
      decode ? read_ids(tokenizer, input) : tokenizer.encode(input, {.added_tokens = !plain});
  if (json) {
    print_json(tokenizer, ids, decode ? tokenizer.decode(ids) : input);
  } else if (ids_only) {
    std::string line;
    for (int32_t id : ids) line += fmt::format("{}{}", line.empty() ? "" : " ", id);
    fmt::print("{}\n", line);
  } else if (decode) {
    fmt::print("{}\n", tokenizer.decode(ids));
  } else {
    print_table(tokenizer, ids);
  }
  return 0;
}

}  // namespace m3::cli
