// Captioned pictures, picture sequences and films.
#include <algorithm>
#include <charconv>
#include <numeric>

#include "base/check.h"
#include "base/file.h"
#include "base/log.h"
#include "media/sampling.h"
#include "media/video.h"
#include "train/ingest/importer.h"

namespace m3::ingest {

namespace fs = std::filesystem;

namespace {

const std::vector<std::string> kPictures = {".png", ".jpg", ".jpeg", ".webp", ".gif"};
const std::vector<std::string> kFilms = {".mp4", ".mov", ".webm", ".mkv", ".avi", ".mpg", ".mpeg", ".ogv", ".ts", ".flv"};

// First line of the text beside a file; empty if there is none.
std::string caption_of(const fs::path& file) {
  const fs::path path = fs::path(file).replace_extension(".txt");
  if (!fs::is_regular_file(path)) return {};
  const std::string text = clean_text(to_utf8(read_file(path)));
  return text.substr(0, text.find('\n'));
}

// NAME and number of "NAME-12.png" or "NAME12.png"; number -1: none.
std::pair<std::string, int> split_number(const std::string& stem) {
  size_t digits = stem.size();
  while (digits > 0 && std::isdigit(static_cast<unsigned char>(stem[digits - 1]))) --digits;
  int number = -1;
  if (digits == stem.size() || digits == 0) return {stem, number};
  std::from_chars(stem.data() + digits, stem.data() + stem.size(), number);
  while (digits > 1 && (stem[digits - 1] == '-' || stem[digits - 1] == '_')) --digits;
  return {stem.substr(0, digits), number};
}

std::string words_of(std::string name) {
  std::replace_if(name.begin(), name.end(), [](char c) { return c == '-' || c == '_' || c == '+'; }, ' ');
  return name;
}

}  // namespace

void Importer::captions(const Source& source) {
  for (const fs::path& file : find_files(source.path, kPictures)) {
    const std::string caption = caption_of(file);
    if (caption.empty()) {
      drop("no caption");
      continue;
    }
    std::optional<data::Picture> picture = load_picture(file);
    if (!picture) continue;
    data::Document document;
    const std::string stem = fs::relative(file, source.path).replace_extension().string();
    document.id = fmt::format("{}:{}", source.name, stem);
    document.source = source.name;
    document.licence = source.licence;
    document.lang = source.lang;
    document.item = item_of(*picture, document.id);
    document.segments.push_back(data::Segment::of_image(std::move(*picture)));
    document.segments.push_back(data::Segment::of_text(caption, source.weight));
    add(std::move(document));
  }
}

void Importer::sequences(const Source& source) {
  std::map<fs::path, std::vector<std::pair<int, fs::path>>> groups;  // folder and name: number, file
  for (const fs::path& file : find_files(source.path, kPictures)) {
    const auto [name, number] = split_number(file.stem().string());
    if (number >= 0) groups[file.parent_path() / name].emplace_back(number, file);
  }
  for (auto& [name, files] : groups) {
    std::sort(files.begin(), files.end());
    if (static_cast<int>(files.size()) < options_.min_frames) {
      drop("sequence: too short");
      continue;
    }
    if (static_cast<int>(files.size()) > options_.max_frames) files.resize(options_.max_frames);
    std::vector<data::Picture> frames;
    for (const auto& [number, file] : files) {
      std::optional<data::Picture> picture = load_picture(file);
      if (!picture) break;
      frames.push_back(std::move(*picture));
    }
    const bool same = frames.size() == files.size() && std::all_of(frames.begin(), frames.end(), [&](const data::Picture& p) {
      return p.height == frames[0].height && p.width == frames[0].width;
    });
    if (!same) {
      drop("sequence: frames of different sizes");
      continue;
    }
    data::Document document;
    document.id = fmt::format("{}:{}", source.name, fs::relative(name, source.path).string());
    document.source = source.name;
    document.licence = source.licence;
    document.lang = source.lang;
    document.item = item_of(frames[0], document.id);
    std::vector<int64_t> numbers(frames.size());
    std::iota(numbers.begin(), numbers.end(), 0);
    document.segments.push_back(data::Segment::of_video(std::move(frames), options_.sequence_fps, std::move(numbers)));
    document.segments.push_back(data::Segment::of_text(words_of(name.filename().string()), source.weight));
    add(std::move(document));
  }
}

void Importer::films(const Source& source) {
  for (const fs::path& file : find_files(source.path, kFilms)) {
    const std::string caption = caption_of(file);
    if (caption.empty()) {
      drop("no caption");
      continue;
    }
    data::Document document;
    document.id = fmt::format("{}:{}", source.name, fs::relative(file, source.path).replace_extension().string());
    document.source = source.name;
    document.licence = source.licence;
    document.lang = source.lang;
    document.item = document.id;
    try {
      const MappedFile bytes(file);
      VideoReader reader(bytes.bytes(), options_.limits);
      const ImageSize size = smart_resize(reader.height(), reader.width(), kVideoBounds);
      std::vector<data::Picture> frames;
      std::vector<int64_t> numbers;
      int64_t wanted = 0;
      for (int64_t n = 0; static_cast<int>(frames.size()) < options_.max_frames && reader.next(); ++n) {
        if (n != wanted) continue;
        frames.push_back(data::Picture::of(resize_bicubic(reader.image(), size)));
        numbers.push_back(n);
        wanted = next_sampled_frame(n, reader.fps(), options_.film_fps);
      }
      document.segments.push_back(data::Segment::of_video(std::move(frames), reader.fps(), std::move(numbers)));
    } catch (const Error& error) {
      log_debug("{}: {}", file.string(), error.what());
      drop("film: cannot be read");
      continue;
    }
    document.segments.push_back(data::Segment::of_text(caption, source.weight));
    writer_.add(document);
  }
}

}  // namespace m3::ingest
