// One function per golden format; see verify.h.
#pragma once
#include "verify/verify.h"

namespace m3::verify {

bool verify_rule(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_msa(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_tokenizer(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_chat(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_model(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_training(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_end_to_end(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);
bool verify_media(const std::filesystem::path& file, const nlohmann::ordered_json& document, Report& report);

}  // namespace m3::verify
