// First weights of a training run (nano.md §2), as a scheme for any writer of random weights.
#pragma once
#include "formats/random_init.h"
#include "train/train_config.h"

namespace m3::train {

// kNormal: init_normal. kFanIn: every matrix normal with std 1 / sqrt(fan-in), output matrices of
// blocks also times 1 / sqrt(2 layers) (text and vision layers counted apart), embedding and head
// by their own std, norms neutral, biases 0. kCheckpoint: as kFanIn, for the parameters that the
// checkpoint lacks.
//
// positional_start changes layer 0 so that query heads 0..3 attend 1, 2, 3, 4 tokens back from the
// first step on; all of it is trained on. Needs C > 1, at least 4 query heads in the group of KV
// head 0, and rotary_dim >= 6.
InitScheme init_scheme(const InitConfig& init, const ModelConfig& config, uint64_t seed);

}  // namespace m3::train
