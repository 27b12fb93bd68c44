#include "verify/golden_input.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/file.h"

namespace m3::verify {
namespace {

using nlohmann::ordered_json;
const std::filesystem::path kGolden = std::filesystem::path(M3_SOURCE_DIR) / "tests/golden";

TEST(GoldenInput, rules_give_the_stored_numbers) {
  const ordered_json document = ordered_json::parse(read_file(kGolden / "rule.json"));
  for (const auto& [name, entry] : document.items()) {
    if (name == "word") continue;
    SCOPED_TRACE(name);
    ordered_json spec = entry;
    spec["rule"] = name == "integers" ? "integers" : "normal";
    const auto& wanted = entry.at("values");
    const DType dtype = name.find("bf16") != std::string::npos ? DType::kBF16 : DType::kF32;
    const std::vector<float> got = golden_input(spec, {static_cast<int64_t>(wanted.size())}, dtype, nullptr);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], static_cast<float>(wanted[i].get<double>())) << i;
  }
}

TEST(GoldenInput, stored_tensors_and_ids) {
  const SafetensorsFile file(kGolden / "msa/dsa.safetensors");
  const std::vector<float> qx = golden_input({{"tensor", "qx"}}, {153, 6, 32}, DType::kF32, &file);
  EXPECT_EQ(qx, to_f32(file.get("in.qx")));
  EXPECT_THROW(golden_input({{"tensor", "qx"}}, {153, 192}, DType::kF32, &file), Error);   // another shape
  EXPECT_THROW(golden_input({{"tensor", "qx"}}, {153, 6, 32}, DType::kF32, nullptr), Error);
  EXPECT_THROW(golden_input({{"rule", "magic"}}, {1}, DType::kF32, nullptr), Error);
  EXPECT_EQ(golden_ids({3, 1, 2}), (std::vector<int32_t>{3, 1, 2}));
  const auto ids = golden_ids({{"rule", "integers"}, {"seed", 151}, {"count", 200}, {"low", 0}, {"high", 157}});
  ASSERT_EQ(ids.size(), 200u);
  for (const int32_t id : ids) EXPECT_TRUE(id >= 0 && id <= 157);
}

}  // namespace
}  // namespace m3::verify
