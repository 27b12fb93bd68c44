// Goldens of image and video preprocessing (tests/golden/media/README.md), claimed by their content:
// target sizes, decoding and resize, patch rows, frame sampling, real files, broken files.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/file.h"
#include "formats/safetensors.h"
#include "media/image.h"
#include "media/preprocess.h"
#include "media/sampling.h"
#include "media/video.h"
#include "verify/suites.h"

namespace m3::verify {
namespace {

using nlohmann::ordered_json;
namespace fs = std::filesystem;

PixelBounds bounds_of(const ordered_json& pair) { return {pair.at(0), pair.at(1)}; }

Grid grid_of(const ordered_json& grid) { return {grid.at(0), grid.at(1), grid.at(2)}; }

void check_size(const ordered_json& want, int64_t height, int64_t width) {
  M3_CHECK(want.at(0) == height && want.at(1) == width, "size {} x {}, want {}", height, width, want.dump());
}

void check_grid(const ordered_json& want, const Grid& grid) {
  M3_CHECK(grid_of(want) == grid, "grid ({}, {}, {}), want {}", grid.t, grid.h, grid.w, want.dump());
}

// Largest difference of two pictures of one size.
int largest_difference(const Image& a, const Image& b) {
  M3_CHECK(a.height == b.height && a.width == b.width, "size {} x {}, want {} x {}", a.height, a.width, b.height, b.width);
  int worst = 0;
  for (size_t i = 0; i < a.rgb_HW3.size(); ++i) worst = std::max(worst, std::abs(a.rgb_HW3[i] - b.rgb_HW3[i]));
  return worst;
}

std::string check_smart_resize(const ordered_json& cases) {
  static const std::pair<const char*, const char*> kWords[] = {
      {"aspect_ratio", "aspect ratio"}, {"empty_input", "is empty"}, {"empty_result", "a side of zero"}};
  for (const ordered_json& entry : cases) {
    const ordered_json& in = entry.at("in");
    std::string got;
    try {
      const ImageSize size = smart_resize(in.at(0), in.at(1), {in.at(2), in.at(3)});
      got = fmt::format("[{},{}]", size.height, size.width);
    } catch (const Error& error) {
      for (const auto& [kind, words] : kWords) {
        if (std::string(error.what()).find(words) != std::string::npos) got = fmt::format("\"{}\"", kind);
      }
    }
    const std::string want = entry.contains("out") ? entry.at("out").dump() : entry.at("error").dump();
    M3_CHECK(got == want, "{} gives {}, want {}", in.dump(), got, want);
  }
  return fmt::format("{} cases equal", cases.size());
}

std::string check_resize(const fs::path& folder, const ordered_json& entry) {
  const Image decoded = load_image(folder / entry.at("file").get<std::string>());
  check_size(entry.at("size"), decoded.height, decoded.width);
  Image source = decoded;
  int worst = 0;
  const int tolerance = entry.value("rgb_tolerance", 0);
  if (entry.contains("rgb")) {
    source = load_image(folder / entry.at("rgb").get<std::string>());
    worst = largest_difference(decoded, source);
    M3_CHECK(worst <= tolerance, "decoded pixels differ by {} levels, allowed {}", worst, tolerance);
  }
  const ImageSize size = smart_resize(source.height, source.width, bounds_of(entry.at("bounds")));
  check_size(entry.at("resized"), size.height, size.width);
  const Image want = load_image(folder / entry.at("out").get<std::string>());
  const int difference = largest_difference(resize_bicubic(source, size), want);
  M3_CHECK(difference == 0, "resized pixels differ by {} levels, want 0", difference);
  return fmt::format("decoder {} of {} levels, resize exact", worst, tolerance);
}

// Image i of a uint8 tensor [h, w, 3] or [n, h, w, 3].
std::vector<Image> images_of(const Tensor& tensor) {
  const Shape& shape = tensor.shape();
  const int rank = shape.rank();
  M3_CHECK(tensor.dtype() == DType::kU8 && (rank == 3 || rank == 4) && shape[rank - 1] == 3, "want uint8 [n, h, w, 3], got {}",
           shape.str());
  const auto* bytes = static_cast<const uint8_t*>(tensor.data());
  std::vector<Image> images;
  for (int64_t i = 0; i < (rank == 4 ? shape[0] : 1); ++i) {
    Image image(static_cast<int>(shape[rank - 3]), static_cast<int>(shape[rank - 2]));
    std::copy_n(bytes + i * static_cast<int64_t>(image.rgb_HW3.size()), image.rgb_HW3.size(), image.rgb_HW3.begin());
    images.push_back(std::move(image));
  }
  return images;
}

std::string check_patches(const SafetensorsFile& tensors, const std::string& name, const ordered_json& entry) {
  constexpr double kTolerance = 2e-6;
  std::vector<Image> images = images_of(tensors.get(name + ".rgb"));
  const bool video = entry.at("kind") == "video";
  check_size(entry.at("size"), images.at(0).height, images.at(0).width);
  const MediaRows got = video ? preprocess_frames(std::move(images)) : preprocess_image(images.at(0));
  check_grid(entry.at("grid"), got.grid);
  check_size(entry.at("resized"), got.grid.h * kPatchSize, got.grid.w * kPatchSize);

  const Tensor want = tensors.get(name + ".rows");
  M3_CHECK(want.dtype() == DType::kF32 && want.shape().numel() == static_cast<int64_t>(got.rows.size()),
           "{} values, want {}", got.rows.size(), want.shape().numel());
  const auto* values = static_cast<const float*>(want.data());
  double worst = 0;
  for (size_t i = 0; i < got.rows.size(); ++i) {
    const double difference = std::abs(double{got.rows[i]} - values[i]);
    M3_CHECK(difference <= kTolerance, "row {} value {}: {}, want {}", i / kPatchValues, i % kPatchValues, got.rows[i],
             values[i]);
    worst = std::max(worst, difference);
  }
  return fmt::format("{} rows, largest difference {:.1e} (allowed {:.0e})", got.grid.num_rows(), worst, kTolerance);
}

std::string check_sampling(const ordered_json& document) {
  for (const ordered_json& entry : document.at("cases")) {
    const double fps = entry.at("fps");
    const std::vector<int64_t> kept = sample_frames(entry.at("frames"), fps, entry.at("target_fps"));
    M3_CHECK(ordered_json(kept) == entry.at("indices"), "fps {}, {} frames, target {}: kept {}, want {}", fps,
             entry.at("frames").dump(), entry.at("target_fps").dump(), ordered_json(kept).dump(), entry.at("indices").dump());
    const std::vector<std::string> seconds = step_seconds(kept, fps);
    M3_CHECK(ordered_json(seconds) == entry.at("seconds"), "fps {}, {} frames: seconds {}, want {}", fps,
             entry.at("frames").dump(), ordered_json(seconds).dump(), entry.at("seconds").dump());
  }
  for (const ordered_json& entry : document.at("texts")) {
    const int64_t index = entry.at(0);
    const std::string text = fmt::format("]<]{} seconds[>[", step_seconds({&index, 1}, entry.at(1)).at(0));
    M3_CHECK(text == entry.at(2), "frame {} at {} fps: {}, want {}", index, entry.at(1).dump(), text, entry.at(2).dump());
  }
  return fmt::format("{} clips, {} timestamps equal", document.at("cases").size(), document.at("texts").size());
}

// Mean and standard deviation of each channel of the rows against `want`; returns the largest error.
double check_statistics(const ordered_json& want, const std::vector<float>& rows) {
  constexpr int kChannelValues = kPatchValues / 3;
  const double count = static_cast<double>(rows.size()) / 3, tolerance = want.at("tolerance");
  double sum[3] = {}, squares[3] = {}, worst = 0;
  for (size_t i = 0; i < rows.size(); ++i) sum[i % kPatchValues / kChannelValues] += rows[i];
  for (size_t i = 0; i < rows.size(); ++i) {
    const int c = static_cast<int>(i % kPatchValues / kChannelValues);
    squares[c] += (rows[i] - sum[c] / count) * (rows[i] - sum[c] / count);
  }
  for (int c = 0; c < 3; ++c) {
    const double mean = sum[c] / count, std = std::sqrt(squares[c] / count);
    const double difference = std::max(std::abs(mean - want.at("mean").at(c).get<double>()),
                                       std::abs(std - want.at("std").at(c).get<double>()));
    M3_CHECK(difference <= tolerance, "channel {}: mean {:.5f}, std {:.5f}, want {} and {} within {}", c, mean, std,
             want.at("mean").dump(), want.at("std").dump(), tolerance);
    worst = std::max(worst, difference);
  }
  return worst;
}

std::string check_picture_file(const fs::path& path, const ordered_json& entry) {
  const MediaRows got = preprocess_image_file(path);
  check_size(entry.at("size"), got.source_height, got.source_width);
  check_size(entry.at("resized"), got.grid.h * kPatchSize, got.grid.w * kPatchSize);
  check_grid(entry.at("grid"), got.grid);
  M3_CHECK(got.grid.num_tokens() == entry.at("tokens"), "{} tokens, want {}", got.grid.num_tokens(), entry.at("tokens").dump());
  return fmt::format("{} tokens, statistics within {:.1e}", got.grid.num_tokens(), check_statistics(entry, got.rows));
}

std::string check_film_file(const fs::path& path, const ordered_json& entry) {
  double worst = 0;
  for (const ordered_json& sampled : entry.at("sampled")) {
    VideoOptions options;
    options.target_fps = sampled.at("target_fps");
    const MediaRows got = preprocess_video_file(path, options);
    check_size(entry.at("size"), got.source_height, got.source_width);
    M3_CHECK(got.source_frames == entry.at("frames") && got.source_fps == entry.at("fps"), "{} frames at {} fps, want {} at {}",
             got.source_frames, got.source_fps, entry.at("frames").dump(), entry.at("fps").dump());
    check_size(entry.at("resized"), got.grid.h * kPatchSize, got.grid.w * kPatchSize);
    M3_CHECK(ordered_json(got.indices) == sampled.at("indices"), "kept {}, want {}", ordered_json(got.indices).dump(),
             sampled.at("indices").dump());
    M3_CHECK(ordered_json(got.seconds) == sampled.at("seconds"), "seconds {}, want {}", ordered_json(got.seconds).dump(),
             sampled.at("seconds").dump());
    check_grid(sampled.at("grid"), got.grid);
    M3_CHECK(got.grid.num_tokens() == sampled.at("tokens"), "{} tokens, want {}", got.grid.num_tokens(),
             sampled.at("tokens").dump());
    worst = std::max(worst, check_statistics(sampled, got.rows));
  }
  return fmt::format("{} frames, statistics within {:.1e}", entry.at("frames").dump(), worst);
}

// Frame k has its brightest columns of `row` at x[k] .. x[k] + width - 1.
void check_bar(const ordered_json& bar, const Image& image, size_t frame) {
  const uint8_t* row = image.row(bar.at("row"));
  int brightest = 0, level = -1;
  for (int x = 0; x < image.width; ++x) {
    const int sum = row[3 * x] + row[3 * x + 1] + row[3 * x + 2];
    if (sum > level) brightest = x, level = sum;
  }
  const int left = bar.at("x").at(frame), width = bar.at("width");
  M3_CHECK(brightest >= left && brightest < left + width, "frame {}: brightest column {}, want {} to {}", frame, brightest,
           left, left + width - 1);
}

void check_corners(const ordered_json& corners, const Image& image) {
  constexpr int kTolerance = 40;
  for (const ordered_json& corner : corners) {
    const int y = corner.at(0), x = corner.at(1);
    for (int c = 0; c < 3; ++c) {
      const int got = image.row(y)[3 * x + c], want = corner.at(2).at(c);
      M3_CHECK(std::abs(got - want) <= kTolerance, "pixel ({}, {}) channel {}: {}, want {}", y, x, c, got, want);
    }
  }
}

void load_broken_picture(const fs::path& path, const ordered_json& entry) {
  const Image image = load_image(path);
  preprocess_image(image);
  if (entry.contains("size")) check_size(entry.at("size"), image.height, image.width);
}

void load_broken_film(const fs::path& path, const ordered_json& entry) {
  const MediaRows sampled = preprocess_video_file(path);  // names the file in its message
  const MappedFile file(path);
  VideoReader reader(file.bytes());
  int64_t num_frames = 0;
  for (; reader.next(); ++num_frames) {
    if (!entry.contains("size")) continue;
    const Image image = reader.image();
    check_size(entry.at("size"), image.height, image.width);
    if (entry.contains("bar")) check_bar(entry.at("bar"), image, static_cast<size_t>(num_frames));
    if (entry.contains("corners") && num_frames == 0) check_corners(entry.at("corners"), image);
  }
  if (!entry.contains("size")) return;
  M3_CHECK(num_frames == entry.at("frames") && sampled.source_frames == num_frames, "{} frames, want {}", num_frames,
           entry.at("frames").dump());
  M3_CHECK(reader.fps() == entry.at("fps"), "{} frames a second, want {}", reader.fps(), entry.at("fps").dump());
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

// The message must hold a word of every group; the file's own path does not count.
void check_refusal(const ordered_json& groups, const fs::path& path, std::string message) {
  if (message.starts_with(path.string())) message.erase(0, path.string().size());
  for (const ordered_json& group : groups) {
    const bool found = std::any_of(group.begin(), group.end(), [&](const ordered_json& word) {
      return lower(message).find(lower(word.get<std::string>())) != std::string::npos;
    });
    M3_CHECK(found, "refused with '{}', which has none of the words {}", message, group.dump());
  }
}

std::string check_broken(const fs::path& path, const ordered_json& entry) {
  const auto start = std::chrono::steady_clock::now();
  std::string refusal;
  const bool refuse = entry.contains("refuse");
  try {
    (entry.at("as") == "video" ? load_broken_film : load_broken_picture)(path, entry);
  } catch (const Error& error) {
    if (!refuse) throw;
    refusal = error.what();
  }
  M3_CHECK(refuse == !refusal.empty(), "loaded, but must be refused");
  if (refuse) check_refusal(entry.at("refuse"), path, refusal);
  const double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  return fmt::format("{} in {:.1f} ms", refuse ? "refused" : "loaded", ms);
}

bool is_list_of(const ordered_json& document, std::initializer_list<const char*> keys) {
  if (!document.contains("cases") || !document.at("cases").is_array() || document.at("cases").empty()) return false;
  const ordered_json& first = document.at("cases")[0];
  return first.is_object() && std::all_of(keys.begin(), keys.end(), [&](const char* key) { return first.contains(key); });
}

bool is_map_of(const ordered_json& document, std::initializer_list<const char*> keys) {
  return !document.empty() && std::all_of(document.begin(), document.end(), [&](const ordered_json& entry) {
    return entry.is_object() && std::all_of(keys.begin(), keys.end(), [&](const char* key) { return entry.contains(key); });
  });
}

}  // namespace

bool verify_media(const fs::path& file, const ordered_json& document, Report& report) {
  if (!document.is_object()) return false;
  const fs::path folder = file.parent_path();
  if (is_list_of(document, {"in"}) && document.at("cases")[0].at("in").size() == 4) {
    report.run("media/smart_resize", [&] { return check_smart_resize(document.at("cases")); });
  } else if (is_list_of(document, {"file", "bounds", "resized", "out"})) {
    for (const ordered_json& entry : document.at("cases")) {
      report.run("media/resize/" + entry.at("file").get<std::string>(), [&] { return check_resize(folder, entry); });
    }
  } else if (is_list_of(document, {"fps", "frames", "target_fps", "indices"})) {
    report.run("media/sampling", [&] { return check_sampling(document); });
  } else if (is_map_of(document, {"kind", "size", "resized", "grid"})) {
    const SafetensorsFile tensors(fs::path(file).replace_extension(".safetensors"));
    for (const auto& [name, entry] : document.items()) {
      report.run("media/patches/" + name, [&, name = name, entry = entry] { return check_patches(tensors, name, entry); });
    }
  } else if (is_map_of(document, {"as"})) {
    for (const auto& [name, entry] : document.items()) {
      if (entry.at("as") == "video" && !video_supported()) {
        report.skip("media/broken/" + name, "this build lacks FFmpeg");
        continue;
      }
      report.run("media/broken/" + name, [&, name = name, entry = entry] { return check_broken(folder / name, entry); });
    }
  } else if (is_map_of(document, {"size", "resized"})) {
    for (const auto& [name, entry] : document.items()) {
      const bool film = entry.contains("sampled");
      if (film && !video_supported()) {
        report.skip("media/files/" + name, "this build lacks FFmpeg");
        continue;
      }
      report.run("media/files/" + name, [&, name = name, entry = entry] {
        return (film ? check_film_file : check_picture_file)(folder / name, entry);
      });
    }
  } else {
    return false;
  }
  return true;
}

}  // namespace m3::verify
