// The texts that the tokenizer of m3-nano is trained on (nano.md §2).
#pragma once
#include <filesystem>

namespace m3::train {

// A third of the corpus, the strings of generated documents, names and words of facts often enough
// to become single tokens. Writes tokenizer.json and the layout's companion files into `out`.
void train_nano_tokenizer(const std::filesystem::path& corpus,
                          const std::filesystem::path& layout_folder,
                          const std::filesystem::path& out, uint64_t seed);

}  // namespace m3::train
