// The training parts of msa/NAME.json: attend_backward and index_kl against the goldens.
#pragma once
#include "verify/msa_case.h"
#include "verify/verify.h"

namespace m3::verify {

// Cases with `backward` or `kl`; `document` holds the norms of the whole tensors. CPU only. Returns
// the measured errors.
std::string check_msa_training(const MsaCase& c, const nlohmann::ordered_json& document,
                               const Options& options);

}  // namespace m3::verify
