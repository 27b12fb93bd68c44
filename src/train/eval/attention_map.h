// How much text attends to what is seen (training.md §12.7): the probability that text queries
// behind a picture or clip give to its tokens, by layer and head, and where in the picture it lies.
#pragma once
#include <string>
#include <vector>

#include "formats/checkpoint.h"
#include "train/batch.h"

namespace m3::eval {

struct AttentionMap {
  int num_layers = 0, num_heads = 0, num_documents = 0;
  // [layers, heads]: mass on vision keys over the share of vision keys among the visible ones, mean
  // over text queries behind the media. 1: as if attention were uniform.
  std::vector<double> vision_ratio_LH;
  std::vector<double> vision_mass_LH;  // the mass itself
  // Of the first document: by layer, the mean over heads and answer tokens of the probability on
  // each merged token.
  Image picture;
  int rows = 0, columns = 0;
  std::vector<double> cells_LRC;
  std::string answer;
};

// On `count` held-out pictures of the generator. Attention as the model runs it: selected blocks in
// sparse layers.
AttentionMap map_attention(const Checkpoint& checkpoint, int count, uint64_t seed);

std::string attention_table(const AttentionMap& map);
std::string attention_json(const AttentionMap& map);
std::string attention_page(
    const AttentionMap& map);  // one HTML file: heat maps by layer over the picture

}  // namespace m3::eval
