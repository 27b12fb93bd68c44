#include "verify/verify.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/file.h"

namespace m3::verify {

namespace fs = std::filesystem;

void Report::add(CaseResult result) {
  switch (result.outcome) {
    case CaseResult::Outcome::kPassed: ++num_passed; break;
    case CaseResult::Outcome::kFailed: ++num_failed; break;
    case CaseResult::Outcome::kSkipped: ++num_skipped; break;
  }
  on_case_(result);
}

void Report::run(const std::string& name, const std::function<std::string()>& body) {
  if (!wants(name)) return;
  CaseResult result{name, CaseResult::Outcome::kPassed, {}};
  try {
    result.detail = body();
  } catch (const std::exception& error) {
    result.outcome = CaseResult::Outcome::kFailed;
    result.detail = error.what();
  }
  add(std::move(result));
}

void Report::skip(const std::string& name, const std::string& reason) {
  if (wants(name)) add({name, CaseResult::Outcome::kSkipped, reason});
}

namespace {

std::vector<fs::path> json_files(const fs::path& path) {
  std::vector<fs::path> files;
  if (fs::is_regular_file(path)) {
    files.push_back(path);
  } else {
    M3_CHECK(fs::is_directory(path), "{}: no such file or folder", path.string());
    for (const auto& entry : fs::recursive_directory_iterator(path)) {
      if (entry.is_regular_file() && entry.path().extension() == ".json") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
  }
  return files;
}

// Folders called "broken" hold inputs of the cases, among them JSON that must not parse: no goldens by themselves.
bool is_broken_input(const fs::path& file, const fs::path& path) {
  const fs::path inside = file.lexically_relative(path);
  return std::find(inside.begin(), inside.end(), "broken") != inside.end();
}

// Runs the file if a suite knows it. Throws on a damaged golden, which must not pass by being left out.
bool verify_file(const fs::path& file, Report& report) {
  const auto document = nlohmann::ordered_json::parse(MappedFile(file).text(), nullptr, false);
  M3_CHECK(!document.is_discarded(), "not valid JSON; copy the golden again");
  const int before = report.num_cases();
  for (Suite suite : suites()) {
    if (!suite(file, document, report)) continue;
    M3_CHECK(report.num_cases() > before || !report.options().filter.empty(), "holds no case");
    return true;
  }
  // Objects without a kind are parts of goldens: configurations, tokenizers. Nothing else lies beside goldens.
  M3_CHECK(document.is_object(), "no golden begins like this: want an object, or the cases of a chat golden");
  M3_CHECK(!document.contains("kind"), "no golden is of kind {}", document["kind"].dump());
  return false;
}

}  // namespace

void verify_paths(const std::vector<fs::path>& paths, Report& report) {
  for (const fs::path& path : paths) {
    bool found = false;
    for (const fs::path& file : json_files(path)) {
      if (is_broken_input(file, path)) continue;
      try {
        found |= verify_file(file, report);
      } catch (const std::exception& error) {
        report.add({file.string(), CaseResult::Outcome::kFailed, error.what()});
        found = true;
      }
    }
    M3_CHECK(found, "no golden found under {} (formats: tests/golden/README.md)", path.string());
  }
}

}  // namespace m3::verify
