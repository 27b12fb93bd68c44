#include "train/plot/run_curves.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "base/check.h"
#include "base/file.h"
#include "text/json_value.h"

namespace m3::plot {

namespace fs = std::filesystem;

const char* axis_name(Axis axis) {
  constexpr const char* kNames[] = {"step", "tokens", "FLOP"};
  return kNames[static_cast<int>(axis)];
}

namespace {

double number(const JsonValue* value) {
  return value != nullptr && value->is_number() ? value->as_double() : NAN;
}

const JsonValue* at(const JsonValue& record, std::initializer_list<const char*> path) {
  const JsonValue* value = &record;
  for (const char* key : path) {
    if (value == nullptr) return nullptr;
    value = value->find(key);
  }
  return value;
}

using Values = std::vector<std::pair<std::string, double>>;

// What one record gives, by chart title.
Values values_of(const JsonValue& record) {
  Values out;
  const auto add = [&](const std::string& title, const JsonValue* value) {
    if (const double y = number(value); std::isfinite(y)) out.emplace_back(title, y);
  };
  add("loss: cross-entropy of the batch", at(record, {"loss", "ce"}));
  for (const char* group : {"by_source", "by_context"}) {
    const JsonValue* losses = record.find(group);
    if (losses == nullptr || !losses->is_object()) continue;
    for (const std::string& name : losses->keys()) {
      const JsonValue* entry = losses->find(name);
      const std::string what = std::string(group) == "by_source" ? "loss: " : "loss after ";
      const JsonValue* answer = entry->find("answer");
      add(what + name, answer != nullptr ? answer : entry->find("plain"));
    }
  }
  if (const JsonValue* layers = record.find("kl_by_layer");
      layers != nullptr && layers->is_array()) {
    for (size_t i = 0; i < layers->size(); ++i) {
      if (layers->items()[i].is_number() && layers->items()[i].as_double() > 0)
        add("KL: layer " + std::to_string(i), &layers->items()[i]);
    }
  }
  for (const char* group : {"text", "vision", "indexer"}) {
    add(std::string("gradient norm: ") + group, at(record, {"groups", group, "norm"}));
    add(std::string("learning rate: ") + group, at(record, {"groups", group, "lr"}));
    add(std::string("update / weights: ") + group, at(record, {"groups", group, "update_ratio"}));
  }
  if (const JsonValue* layers = at(record, {"gradients", "layers"});
      layers != nullptr && layers->is_array()) {
    for (size_t i = 0; i < layers->size(); ++i)
      add("gradient norm: layer " + std::to_string(i), &layers->items()[i]);
  }
  if (const JsonValue* layers = record.find("layers"); layers != nullptr && layers->is_array()) {
    for (const JsonValue& entry : layers->items()) {
      const std::string layer =
          "layer " + std::string(entry.find("layer") ? entry.find("layer")->text() : "?");
      const double mass = number(entry.find("media_mass")), share = number(entry.find("media_share"));
      if (share > 0 && std::isfinite(mass))
        out.emplace_back("text to media attention, 1: uniform: " + layer, mass / share);
      add("attention entropy: " + layer, entry.find("entropy"));
      add("largest attention logit: " + layer, entry.find("largest_logit"));
    }
  }
  if (const JsonValue* experts = record.find("experts");
      experts != nullptr && experts->is_array()) {
    for (const JsonValue& entry : experts->items()) {
      const std::string layer =
          "layer " + std::string(entry.find("layer") ? entry.find("layer")->text() : "?");
      add("expert load, largest / mean: text, " + layer, at(entry, {"text", "max_over_mean"}));
      add("expert load, largest / mean: media, " + layer, at(entry, {"media", "max_over_mean"}));
    }
  }
  if (const JsonValue* selection = record.find("selection");
      selection != nullptr && selection->is_array()) {
    for (const JsonValue& entry : selection->items()) {
      const std::string layer =
          "layer " + std::string(entry.find("layer") ? entry.find("layer")->text() : "?");
      const double captured = number(entry.find("captured")), oracle = number(entry.find("oracle"));
      if (oracle > 0 && std::isfinite(captured))
        out.emplace_back("captured / oracle mass: " + layer, captured / oracle);
      add("block recall: " + layer, entry.find("block_recall"));
    }
  }
  add("tokens per second", at(record, {"speed", "tokens_per_s"}));
  return out;
}

bool is_log_scale(const std::string& title) {
  return title.starts_with("loss") || title.starts_with("KL") || title.starts_with("gradient") ||
         title.starts_with("update");
}

// Means of `max_points` equal runs of neighbouring points.
std::vector<Point> thin(const std::vector<Point>& points, int max_points) {
  const size_t buckets = std::min(points.size(), static_cast<size_t>(max_points));
  std::vector<Point> out;
  for (size_t b = 0; b < buckets; ++b) {
    const size_t begin = b * points.size() / buckets, end = (b + 1) * points.size() / buckets;
    Point mean = {0, 0};
    for (size_t i = begin; i < end; ++i) {
      mean.x += points[i].x / static_cast<double>(end - begin);
      mean.y += points[i].y / static_cast<double>(end - begin);
    }
    out.push_back(mean);
  }
  return out;
}

std::string run_name(const fs::path& path) {
  const fs::path folder = path.filename() == "train.jsonl" ? path.parent_path() : path;
  const std::string name = folder.filename().string();
  return name.empty() ? folder.parent_path().filename().string() : name;
}

}  // namespace

std::vector<Chart> read_charts(const std::vector<fs::path>& runs, Axis axis, int max_points) {
  std::vector<Chart> charts;
  for (const fs::path& run : runs) {
    const fs::path file = fs::is_directory(run) ? run / "train.jsonl" : run;
    M3_CHECK(fs::exists(file), "{}: no such log; a run is the output folder of m3 train",
             file.string());
    std::map<std::string, std::vector<Point>> curves;
    std::vector<std::string> order;
    const std::string text = read_file(file);
    double tokens = 0, flops = 0;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = std::min(text.find('\n', begin), text.size());
      const auto record = JsonValue::try_parse(std::string_view(text).substr(begin, end - begin));
      begin = end + 1;
      if (!record || !record->is_object()) continue;
      tokens += std::max(0.0, number(at(*record, {"data", "tokens"})));
      flops += std::max(0.0, number(at(*record, {"speed", "flops"})));
      const double x = axis == Axis::kTokens  ? tokens
                       : axis == Axis::kFlops ? flops
                                              : number(record->find("step"));
      for (const auto& [title, y] : values_of(*record)) {
        if (!curves.count(title)) order.push_back(title);
        curves[title].push_back({x, y});
      }
    }
    M3_CHECK(!curves.empty(), "{}: no record of a step in it", file.string());
    for (const std::string& title : order) {
      auto chart = std::find_if(charts.begin(), charts.end(),
                                [&](const Chart& c) { return c.title == title; });
      if (chart == charts.end())
        chart = charts.insert(charts.end(), {title, is_log_scale(title), {}});
      chart->curves.push_back({run_name(run), thin(curves[title], max_points)});
    }
  }
  return charts;
}

}  // namespace m3::plot
