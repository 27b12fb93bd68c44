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

}  // namespace

void verify_paths(const std::vector<fs::path>& paths, Report& report) {
  int num_claimed = 0;
  for (const fs::path& path : paths) {
    for (const fs::path& file : json_files(path)) {
      // Folders of broken inputs hold JSON that must not parse: not a golden by itself.
      const auto document = nlohmann::ordered_json::parse(MappedFile(file).text(), nullptr, false);
      if (document.is_discarded()) continue;
      for (Suite suite : suites()) {
        if (suite(file, document, report)) {
          ++num_claimed;
          break;
        }
      }
    }
  }
  std::string places;
  for (const fs::path& path : paths) places += (places.empty() ? "" : ", ") + path.string();
  M3_CHECK(num_claimed > 0, "no golden found under {} (formats: tests/golden/README.md)", places);
}

}  // namespace m3::verify
