// rule.json: the generator of inputs by rule itself.
#include <nlohmann/json.hpp>

#include "base/bf16.h"
#include "verify/rule.h"
#include "verify/suites.h"

namespace m3::verify {

bool verify_rule(const std::filesystem::path&, const nlohmann::ordered_json& document, Report& report) {
  if (!document.is_object() || !document.contains("word") || !document.contains("normal_f32")) return false;
  for (const auto& [name, entry] : document.items()) {
    report.run("rule/" + name, [&, name = name, entry = entry] {
      const uint64_t seed = entry.at("seed");
      const auto& values = entry.at("values");
      for (size_t i = 0; i < values.size(); ++i) {
        bool equal = false;
        if (name == "word") {
          equal = std::to_string(rule_word(seed, i)) == values[i].get<std::string>();
        } else if (name == "integers") {
          equal = rule_integer(seed, i, entry.at("low"), entry.at("high")) == values[i].get<int64_t>();
        } else {
          float x = rule_normal(seed, i, entry.at("std"));
          if (name.find("bf16") != std::string::npos) x = to_float(bf16(x));
          equal = x == static_cast<float>(values[i].get<double>());
        }
        M3_CHECK(equal, "value {} differs from {}", i, values[i].dump());
      }
      return fmt::format("{} values equal", values.size());
    });
  }
  return true;
}

}  // namespace m3::verify
