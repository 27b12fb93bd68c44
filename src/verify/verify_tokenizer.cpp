// tests/golden/tokenizer: encoding, cutting, decoding and streaming of tokenizer.json files, and
// the files that must be refused.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/file.h"
#include "text/tokenizer.h"
#include "verify/suites.h"

namespace m3::verify {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

namespace {

std::vector<int32_t> ids_of_case(const Json& entry) {
  if (entry.contains("ids")) return entry.at("ids");
  std::vector<int32_t> ids;
  for (const Json& run : entry.at("ids_rle"))
    ids.insert(ids.end(), run[1].get<size_t>(), run[0].get<int32_t>());
  M3_CHECK(ids.size() == entry.at("count").get<size_t>(),
           "the golden's count disagrees with its runs");
  return ids;
}

std::string text_of_case(const Json& entry) {
  if (entry.contains("text")) return entry.at("text");
  std::string text;
  for (size_t i = 0; i < entry.at("repeat")[1].get<size_t>(); ++i)
    text += entry.at("repeat")[0].get<std::string>();
  return text;
}

void check_ids(const std::vector<int32_t>& got, const std::vector<int32_t>& want, size_t idx_case) {
  for (size_t i = 0; i < std::max(got.size(), want.size()); ++i) {
    M3_CHECK(i < got.size() && i < want.size() && got[i] == want[i],
             "case {}: {} ids, want {}; the first difference is at {} ({} instead of {})", idx_case,
             got.size(), want.size(), i, i < got.size() ? got[i] : -1,
             i < want.size() ? want[i] : -1);
  }
}

void check_text(const std::string& what, const std::string& got, const std::string& want,
                size_t idx_case) {
  M3_CHECK(got == want, "case {}: {} is '{}', want '{}'", idx_case, what, got.substr(0, 200),
           want.substr(0, 200));
}

void check_case(const Tokenizer& tokenizer, const Json& entry, size_t idx_case) {
  const std::string text = text_of_case(entry);
  const std::vector<int32_t> ids = ids_of_case(entry);
  check_ids(tokenizer.encode(text), ids, idx_case);
  const std::string decoded = entry.value("decoded", text);
  check_text("the decoded text", tokenizer.decode(ids), decoded, idx_case);
  if (entry.contains("decoded")) {
    check_text("the text without special tokens", tokenizer.decode(ids, true),
               entry.value("decoded_skip", decoded), idx_case);
  }
  // Pieces of scripts that came with Unicode 15 and 16 need newer tables than PCRE2 10.42 has.
  if (!entry.contains("pieces") || entry.value("group", "") == "unicode 15 and 16") return;
  const auto pieces = tokenizer.split(text);
  M3_CHECK(pieces == entry.at("pieces").get<std::vector<std::string>>(),
           "case {}: {} pieces, want {}: '{}'", idx_case, pieces.size(), entry.at("pieces").size(),
           text.substr(0, 200));
}

void check_stream(const Tokenizer& tokenizer, const Json& entry, size_t idx_case) {
  StreamDecoder decoder(tokenizer);
  const std::vector<int32_t> ids = entry.at("ids");
  std::string bytes, text;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string piece = decoder.push(ids[i]);
    check_text(fmt::format("the text released after id {}", i), piece, entry.at("pieces")[i],
               idx_case);
    for (unsigned char c : tokenizer.bytes(ids[i])) bytes += fmt::format("{:02x}", c);
    text += piece;
  }
  const std::string last = decoder.finish();
  check_text("the text released at the end", last, entry.at("final"), idx_case);
  check_text("the bytes", bytes, entry.at("bytes"), idx_case);
  check_text("the decoded text", tokenizer.decode(ids), text + last, idx_case);
}

// Cases of one list by their group, in order of first appearance.
std::vector<std::pair<std::string, std::vector<const Json*>>> by_group(const Json& cases) {
  std::vector<std::pair<std::string, std::vector<const Json*>>> groups;
  for (const Json& entry : cases) {
    const std::string group = entry.at("group");
    auto at = std::find_if(groups.begin(), groups.end(),
                           [&](const auto& pair) { return pair.first == group; });
    if (at == groups.end()) at = groups.insert(groups.end(), {group, {}});
    at->second.push_back(&entry);
  }
  return groups;
}

using Check = void (*)(const Tokenizer&, const Json&, size_t);

// Encoding needs the regex library.
bool skip_encoding(const std::string& name, Report& report) {
  if (Tokenizer::can_encode()) return false;
  report.skip(name, "built without PCRE2 (libpcre2-dev)");
  return true;
}

void verify_groups(const fs::path& tokenizer_path, const Json& cases, const std::string& name,
                   Check check, Report& report) {
  std::optional<Tokenizer> tokenizer;
  for (const auto& [group, entries] : by_group(cases)) {
    if (check == check_case && skip_encoding(name + "/" + group, report)) continue;
    report.run(name + "/" + group, [&, &entries = entries] {
      if (!tokenizer) tokenizer = Tokenizer::load(tokenizer_path);
      for (size_t i = 0; i < entries.size(); ++i) check(*tokenizer, *entries[i], i);
      return fmt::format("{} cases equal", entries.size());
    });
  }
}

bool lists_as(const Json& document, std::initializer_list<const char*> keys) {
  if (!document.is_array() || document.empty() || !document[0].is_object()) return false;
  for (const char* key : keys) {
    if (!document[0].contains(key)) return false;
  }
  return true;
}

// A build without a normaliser must refuse the file and name it.
std::string check_refused_normalizer(const fs::path& path, const std::string& normalizer) {
  try {
    Tokenizer::load(path);
  } catch (const Error& error) {
    M3_CHECK(std::string(error.what()).find(normalizer) != std::string::npos,
             "the refusal does not name {}: {}", normalizer, error.what());
    return fmt::format("refused: needs the normaliser {}", normalizer);
  }
  M3_FAIL("loaded a file whose normaliser {} is not supported", normalizer);
}

void verify_variant(const fs::path& path, const std::string& name, const Json& variant,
                    Report& report) {
  if (skip_encoding("tokenizer/variants/" + name, report)) return;
  report.run("tokenizer/variants/" + name, [&]() -> std::string {
    const Json file = Json::parse(read_file(path));
    const Json& normalizer = file.at("normalizer");
    if (!normalizer.is_null()) return check_refused_normalizer(path, normalizer.at("type"));
    const Tokenizer tokenizer = Tokenizer::load(path);
    for (size_t i = 0; i < variant.at("cases").size(); ++i)
      check_case(tokenizer, variant.at("cases")[i], i);
    return fmt::format("{} cases equal", variant.at("cases").size());
  });
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// `words`: "a|b" means one of them.
bool names_one_of(const std::string& message, const std::string& words) {
  size_t at = 0;
  while (at <= words.size()) {
    const size_t end = std::min(words.find('|', at), words.size());
    if (message.find(lower(words.substr(at, end - at))) != std::string::npos) return true;
    at = end + 1;
  }
  return false;
}

std::string check_refusal(const fs::path& path, const Json& entry) {
  std::string message;
  try {
    Tokenizer::load(path);
  } catch (const Error& error) {
    message = error.what();
  }
  M3_CHECK(!message.empty(), "loaded, but must be refused: {}", entry.at("why").get<std::string>());
  // The file's own name does not count: it often holds the word.
  std::string spoken = message;
  if (const size_t at = spoken.find(path.string()); at != std::string::npos)
    spoken.erase(at, path.string().size());
  for (const std::string words : entry.at("message_names")) {
    M3_CHECK(names_one_of(lower(spoken), words), "the message does not name '{}': {}", words,
             message);
  }
  return message;
}

void verify_broken(const fs::path& path, const std::string& name, const Json& entry,
                   Report& report) {
  if (skip_encoding("tokenizer/broken/" + name, report)) return;
  report.run("tokenizer/broken/" + name, [&] {
    if (entry.at("expect") == "refuse") return check_refusal(path, entry);
    const Tokenizer tokenizer = Tokenizer::load(path);
    for (size_t i = 0; i < entry.at("encode").size(); ++i)
      check_case(tokenizer, entry.at("encode")[i], i);
    return fmt::format("{} cases equal", entry.at("encode").size());
  });
}

// Large public tokenizers are not part of the repository: M3_REAL_TOKENIZERS names a folder that
// holds them as NAME.json (anthropic, deepseek, cl100k, o200k; see the README beside real.json).
void verify_real(const Json& document, Report& report) {
  const char* folder = std::getenv("M3_REAL_TOKENIZERS");
  for (const auto& [name, entry] : document.at("tokenizers").items()) {
    const std::string case_name = "tokenizer/real/" + name;
    const fs::path path = fs::path(folder == nullptr ? "" : folder) / (name + ".json");
    if (folder == nullptr || !fs::exists(path)) {
      report.skip(case_name, "no " + name + ".json (M3_REAL_TOKENIZERS names its folder)");
      continue;
    }
    if (skip_encoding(case_name, report)) continue;
    report.run(case_name, [&, &name = name, &entry = entry]() -> std::string {
      if (name == "anthropic") return check_refused_normalizer(path, "NFKC");
      const Tokenizer tokenizer = Tokenizer::load(path);
      const Json& texts = document.at("texts");
      for (size_t i = 0; i < texts.size(); ++i) {
        const std::string text = texts[i];
        const std::vector<int32_t> ids = entry.at("ids")[i];
        check_ids(tokenizer.encode(text), ids, i);
        check_text("the decoded text", tokenizer.decode(ids),
                   entry.at("decoded_differs").value(std::to_string(i), text), i);
      }
      return fmt::format("{} texts equal", texts.size());
    });
  }
}

bool verify_beside(const fs::path& file, const Json& document, Report& report) {
  if (!document.is_object() || document.empty()) return false;
  const Json& first = document.begin().value();
  if (!first.is_object()) return false;
  if (first.contains("cases") &&
      fs::exists(file.parent_path() / (document.begin().key() + ".json"))) {
    for (const auto& [name, variant] : document.items()) {
      verify_variant(file.parent_path() / (name + ".json"), name, variant, report);
    }
    return true;
  }
  if (first.contains("expect") && first.contains("why") &&
      (first.contains("encode") || first.contains("message_names"))) {
    for (const auto& [name, entry] : document.items())
      verify_broken(file.parent_path() / name, name, entry, report);
    return true;
  }
  return false;
}

}  // namespace

bool verify_tokenizer(const fs::path& file, const Json& document, Report& report) {
  const fs::path tokenizer = file.parent_path() / "tokenizer.json";
  if (lists_as(document, {"group", "decoded"}) && fs::exists(tokenizer)) {
    verify_groups(tokenizer, document, "tokenizer/" + file.parent_path().filename().string(),
                  check_case, report);
    return true;
  }
  if (lists_as(document, {"group", "ids", "bytes", "pieces", "final"}) && fs::exists(tokenizer)) {
    verify_groups(tokenizer, document,
                  "tokenizer/" + file.parent_path().filename().string() + "/stream", check_stream,
                  report);
    return true;
  }
  if (document.is_object() && document.contains("tokenizers") && document.contains("texts")) {
    verify_real(document, report);
    return true;
  }
  return verify_beside(file, document, report);
}

}  // namespace m3::verify
