#include "verify/suites.h"

namespace m3::verify {

// The list of suites: adding one means one file and one line here.
const std::vector<Suite>& suites() {
  static const std::vector<Suite> list = {
      verify_rule,
      verify_msa,
      verify_tokenizer,
      verify_chat,
      verify_model,
      verify_training,
      verify_end_to_end,
      verify_media,
  };
  return list;
}

}  // namespace m3::verify
