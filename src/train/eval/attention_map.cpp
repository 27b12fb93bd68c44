#include "train/eval/attention_map.h"

#include <fmt/format.h>

#include <algorithm>

#include "text/json_value.h"
#include "train/attention_row.h"
#include "train/synthetic/pictures.h"

namespace m3::eval {
namespace {

using train::attention_row;
using train::QueryRow;

bool is_vision(const ModelConfig& config, int32_t id) {
  return id == config.image_token_id || id == config.video_token_id;
}

// Sums over the text queries behind the media of one document.
void add_layer(const ModelConfig& config, const TrainTrace::Layer& layer,
               const data::Sample& sample, int32_t first, bool is_first, AttentionMap& map) {
  const TextConfig& text = config.text;
  const bool selected = text.is_sparse[layer.index] && layer.attention->lists.defined();
  std::vector<size_t> vision;
  for (size_t i = 0; i < sample.ids.size(); ++i) {
    if (is_vision(config, sample.ids[i])) vision.push_back(i);
  }
  double num_queries = 0, num_answers = 0;
  std::vector<double> queries_H(text.num_heads, 0.0), ratio_H(text.num_heads, 0.0),
      mass_H(text.num_heads, 0.0), cells(vision.size(), 0.0);
  for (size_t i = vision.back() + 1; i < sample.ids.size(); ++i) {
    const QueryRow query{first + static_cast<int32_t>(i), first};
    const bool predicts_answer = i + 1 < sample.ids.size() && sample.weights[i + 1] > 1;
    for (int head = 0; head < text.num_heads; ++head) {
      const std::vector<double> row = attention_row(text, *layer.attention, query, head, selected);
      double mass = 0, visible_vision = 0;
      for (size_t v = 0; v < vision.size(); ++v) {
        mass += row[vision[v]];
        visible_vision += row[vision[v]] > 0;
        if (predicts_answer) cells[v] += row[vision[v]] / text.num_heads;
      }
      const double visible = static_cast<double>(
          std::count_if(row.begin(), row.end(), [](double p) { return p > 0; }));
      mass_H[head] += mass;
      if (visible_vision == 0)
        continue;  // the selection left the picture out: no share to compare with
      ratio_H[head] += mass * visible / visible_vision;
      ++queries_H[head];
    }
    ++num_queries;
    num_answers += predicts_answer;
  }
  for (int head = 0; head < text.num_heads; ++head) {
    map.vision_mass_LH[layer.index * text.num_heads + head] +=
        mass_H[head] / num_queries / map.num_documents;
    map.vision_ratio_LH[layer.index * text.num_heads + head] +=
        ratio_H[head] / std::max(queries_H[head], 1.0) / map.num_documents;
  }
  if (!is_first) return;
  for (double cell : cells) map.cells_LRC.push_back(cell / std::max(num_answers, 1.0));
}

std::string base64(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t three = 0;
    const size_t count = std::min<size_t>(3, bytes.size() - i);
    for (size_t j = 0; j < 3; ++j)
      three = three << 8 | (j < count ? static_cast<uint32_t>(bytes[i + j]) : 0);
    for (size_t j = 0; j < 4; ++j) out += j <= count ? kDigits[three >> (18 - 6 * j) & 63] : '=';
  }
  return out;
}

}  // namespace

AttentionMap map_attention(const Checkpoint& checkpoint, int count, uint64_t seed) {
  const ModelConfig& config = checkpoint.config();
  M3_CHECK(config.vision.has_value(), "{}: the model has no vision tower",
           checkpoint.folder().string());
  const Tokenizer tokenizer = Tokenizer::load(checkpoint.folder());
  const data::SampleBuilder builder(tokenizer);
  std::vector<train::BatchDocument> documents;
  AttentionMap map;
  map.num_layers = config.text.num_layers;
  map.num_heads = config.text.num_heads;
  map.num_documents = count;
  map.vision_mass_LH.assign(static_cast<size_t>(map.num_layers * map.num_heads), 0.0);
  map.vision_ratio_LH = map.vision_mass_LH;
  for (int i = 0; i < count; ++i) {
    const data::Document document = synthetic::picture_document(
        seed, static_cast<uint64_t>(i),
        {.draw = synthetic::Draw::kHeldOut, .ask = synthetic::Ask::kDescribe});
    documents.push_back({builder.build(document), 0});
    if (i > 0) continue;
    for (const data::Segment& segment : document.segments) {
      if (segment.kind == data::Segment::Kind::kImage) map.picture = segment.pictures[0].decode();
    }
    const data::Sample& sample = documents[0].sample;
    map.rows = static_cast<int>(sample.media.at(0).grid.h / kMergeSize);
    map.columns = static_cast<int>(sample.media[0].grid.w / kMergeSize);
    std::vector<int32_t> answer;
    for (size_t at = 0; at < sample.ids.size(); ++at) {
      if (sample.weights[at] > 1 && !tokenizer.is_special(sample.ids[at]))
        answer.push_back(sample.ids[at]);
    }
    map.answer = tokenizer.decode(answer, true);
  }

  std::vector<int32_t> all(documents.size());
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
  const train::PackedDocuments pack(config, documents, all);
  Arena arena("gradients (untouched)", parameter_bytes(config, DType::kF32));
  TrainOptions options;
  options.freeze = Freeze::kFrozenIndex;
  TrainableModel model(config, weights_of(checkpoint), alloc_parameters(config, DType::kF32, arena),
                       options, {pack.num_tokens(), pack.num_patches()});
  TrainTrace trace;
  trace.after_layer = [&](const TrainTrace::Layer& layer) {
    for (size_t i = 0; i < documents.size(); ++i)
      add_layer(config, layer, documents[i].sample, pack.cu_seqlens()[i], i == 0, map);
  };
  model.forward_only(pack.micro_batch(), &trace);
  return map;
}

std::string attention_table(const AttentionMap& map) {
  std::string out = fmt::format(
      "text to vision attention over its share of keys (1: uniform), {} pictures\n{:<8}",
      map.num_documents, "layer");
  for (int head = 0; head < map.num_heads; ++head)
    out += fmt::format("{:>7}", fmt::format("h{}", head));
  for (int layer = 0; layer < map.num_layers; ++layer) {
    out += fmt::format("\n{:<8}", layer);
    for (int head = 0; head < map.num_heads; ++head)
      out += fmt::format("{:>7.2f}", map.vision_ratio_LH[layer * map.num_heads + head]);
  }
  return out + "\n";
}

std::string attention_json(const AttentionMap& map) {
  const auto numbers = [](const std::vector<double>& values) {
    JsonValue list = JsonValue::array();
    for (const double value : values) list.push_back(JsonValue::number(value));
    return list;
  };
  JsonValue root = JsonValue::object();
  root.append_member("layers", JsonValue::integer(int64_t{map.num_layers}));
  root.append_member("heads", JsonValue::integer(int64_t{map.num_heads}));
  root.append_member("documents", JsonValue::integer(int64_t{map.num_documents}));
  root.append_member("vision_mass_LH", numbers(map.vision_mass_LH));
  root.append_member("vision_ratio_LH", numbers(map.vision_ratio_LH));
  root.append_member("picture_rows", JsonValue::integer(int64_t{map.rows}));
  root.append_member("picture_columns", JsonValue::integer(int64_t{map.columns}));
  root.append_member("picture_cells_LRC", numbers(map.cells_LRC));
  root.append_member("answer", JsonValue::string(map.answer));
  return root.dump() + "\n";
}

std::string attention_page(const AttentionMap& map) {
  constexpr int kCell = 44;
  const int width = map.columns * kCell, height = map.rows * kCell, cells = map.rows * map.columns;
  const std::string picture = base64(encode_png(map.picture));
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>attention to a "
      "picture</title>\n"
      "<style>body{{font-family:sans-serif;margin:16px}}figure{{display:inline-block;margin:8px}}"
      "pre{{font-size:12px}}</style></head><body>\n"
      "<p>Answer: {}. Red: probability that the answer's tokens give to each cell of the picture, "
      "mean over heads; the strongest cell of a layer is opaque.</p>\n",
      map.answer);
  for (int layer = 0; layer < map.num_layers; ++layer) {
    const double* begin = map.cells_LRC.data() + layer * cells;
    const double largest = std::max(*std::max_element(begin, begin + cells), 1e-12);
    double sum = 0;
    for (int i = 0; i < cells; ++i) sum += begin[i];
    out += fmt::format(
        "<figure><svg width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\"><image width=\"{0}\" "
        "height=\"{1}\" "
        "href=\"data:image/png;base64,{2}\"/>\n",
        width, height, picture);
    for (int i = 0; i < cells; ++i) {
      out += fmt::format(
          "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"#e00020\" "
          "fill-opacity=\"{:.3f}\"><title>{:.4f}</title></rect>\n",
          i % map.columns * kCell, i / map.columns * kCell, kCell, kCell, 0.75 * begin[i] / largest,
          begin[i]);
    }
    out +=
        fmt::format("</svg><figcaption>layer {}: {:.1f} % on the picture</figcaption></figure>\n",
                    layer, 100 * sum);
  }
  return out + "<pre>" + attention_table(map) + "</pre></body></html>\n";
}

}  // namespace m3::eval
