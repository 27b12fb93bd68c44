// m3 data: material to shards, synthetic documents to shards, checks and statistics of a data folder.
#include <fmt/core.h>

#include "base/check.h"
#include "base/progress.h"
#include "cli/commands.h"
#include "cli/options.h"
#include "train/data/shard_set.h"
#include "train/ingest/importer.h"
#include "train/synthetic/clips.h"
#include "train/synthetic/pictures.h"
#include "train/synthetic/texts.h"
#include "train/tokenizer_recipe.h"

namespace m3::cli {
namespace {

// "name=value" of a repeatable flag.
std::pair<std::string, std::string> cut_pair(const std::string& flag, const std::string& text) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) {
    throw UsageError{fmt::format("{} wants NAME=VALUE, got '{}' (see --help)", flag, text)};
  }
  return {text.substr(0, at), text.substr(at + 1)};
}

void print_counts(const data::Manifest& manifest) {
  fmt::print("{:<8}{:<20}{:>11}{:>14}{:>9}{:>9}{:>9}\n", "split", "source", "documents", "text", "images", "clips", "frames");
  for (const auto& [split, sources] : manifest.counts) {
    data::DocumentCounts sum;
    const auto line = [&](const std::string& name, const data::DocumentCounts& c) {
      fmt::print("{:<8}{:<20}{:>11}{:>14}{:>9}{:>9}{:>9}\n", split, name, c.documents, format_bytes(static_cast<double>(c.text_bytes)),
                 c.images, c.videos, c.frames);
    };
    for (const auto& [source, counts] : sources) {
      line(source, counts);
      sum.add(counts);
    }
    if (sources.size() > 1) line("all", sum);
  }
  for (const auto& [reason, count] : manifest.dropped) fmt::print("left out  {:<34}{:>9}\n", reason, count);
  fmt::print("{} shards\n", manifest.shards.size());
}

struct Flags {
  std::string action, folder;
  std::vector<std::string> text, html, captions, sequences, films, chats, licences, weights;
  uint64_t seed = 0;
  double valid = .05, test = .05, near_duplicates = .8, film_fps = 1;
  int64_t shard_mib = 256, min_letters = 200, max_document_kib = 64, count = 1000;
  std::string family = "picture", draw = "train", corpus, layout;
};

data::WriterOptions writer_options(const Flags& flags) {
  data::WriterOptions options;
  options.rule = {flags.seed, flags.valid, flags.test};
  options.shard_bytes = flags.shard_mib << 20;
  options.tool = "m3 " M3_VERSION;
  return options;
}

int make(const Flags& flags) {
  std::map<std::string, std::string> licences, weights;
  for (const std::string& text : flags.licences) licences.insert(cut_pair("--licence", text));
  for (const std::string& text : flags.weights) weights.insert(cut_pair("--weight", text));
  using Import = void (ingest::Importer::*)(const ingest::Source&);
  const struct {
    const char* flag;
    const std::vector<std::string>& values;
    Import import;
  } kKinds[] = {{"--text", flags.text, &ingest::Importer::text},
                {"--html", flags.html, &ingest::Importer::html},
                {"--captions", flags.captions, &ingest::Importer::captions},
                {"--sequences", flags.sequences, &ingest::Importer::sequences},
                {"--films", flags.films, &ingest::Importer::films},
                {"--chats", flags.chats, &ingest::Importer::chats}};
  std::vector<std::pair<Import, ingest::Source>> jobs;
  for (const auto& kind : kKinds) {
    for (const std::string& text : kind.values) {
      const auto [name, path] = cut_pair(kind.flag, text);
      ingest::Source source{.name = name, .path = path, .licence = licences[name]};
      if (weights.count(name)) {
        try {
          source.weight = std::stof(weights[name]);
        } catch (const std::exception&) {
          throw UsageError{fmt::format("--weight {}={}: not a number", name, weights[name])};
        }
      }
      jobs.emplace_back(kind.import, std::move(source));
    }
  }
  if (jobs.empty()) throw UsageError{"make needs at least one source, e.g. --text NAME=PATH (see --help)"};

  data::ShardWriter writer(flags.folder, writer_options(flags));
  ingest::ImportOptions options;
  options.clean.min_letters = flags.min_letters;
  options.max_document_bytes = flags.max_document_kib << 10;
  options.near_duplicates = flags.near_duplicates;
  options.film_fps = flags.film_fps;
  ingest::Importer importer(writer, options);
  Progress progress("sources", static_cast<int64_t>(jobs.size()), "sources");
  int64_t done = 0;
  for (const auto& [import, source] : jobs) {
    (importer.*import)(source);
    progress.update(++done, source.name);
  }
  const data::Manifest manifest = writer.finish();
  progress.finish();
  print_counts(manifest);
  return 0;
}

synthetic::Draw read_draw(const std::string& name) {
  return name == "held-out" ? synthetic::Draw::kHeldOut : name == "strong" ? synthetic::Draw::kStrong : synthetic::Draw::kTrain;
}

data::Document make_synthetic(const Flags& flags, uint64_t index) {
  const synthetic::Draw draw = read_draw(flags.draw);
  if (flags.family == "clip") return synthetic::clip_document(flags.seed, index, {.draw = draw});
  if (flags.family == "repeat") return synthetic::repeat_document(flags.seed, index);
  if (flags.family == "chat") return synthetic::chat_document(flags.seed, index, draw);
  synthetic::PictureOptions options{.draw = draw};
  if (flags.family == "card") options.kind = synthetic::PictureKind::kCard;
  return synthetic::picture_document(flags.seed, index, options);
}

int synthesise(const Flags& flags) {
  data::ShardWriter writer(flags.folder, writer_options(flags));
  const data::Split split = flags.draw == "train" ? data::Split::kTrain : data::Split::kTest;
  Progress progress("documents", flags.count, "documents");
  for (int64_t i = 0; i < flags.count; ++i) {
    writer.add_to(split, make_synthetic(flags, static_cast<uint64_t>(i)));
    progress.update(i + 1);
  }
  const data::Manifest manifest = writer.finish();
  progress.finish();
  print_counts(manifest);
  return 0;
}

// Reads and decodes everything; true if all is sound.
int check(const Flags& flags) {
  const data::Manifest manifest = data::Manifest::load(flags.folder);
  print_counts(manifest);
  std::map<std::string, std::map<std::string, data::DocumentCounts>> counts;
  int64_t num_broken = 0;
  for (data::Split split : {data::Split::kTrain, data::Split::kValid, data::Split::kTest}) {
    const data::ShardSet set(flags.folder, split);
    Progress progress(data::split_name(split), set.num_documents(), "documents");
    for (int64_t i = 0; i < set.num_documents(); ++i) {
      try {
        const data::Document document = set.read(i);
        for (const data::Segment& segment : document.segments) {
          for (const data::Picture& picture : segment.pictures) picture.decode();
        }
        counts[data::split_name(split)][document.source].add(document);
      } catch (const Error& error) {
        ++num_broken;
        fmt::print(stderr, "{} {}: {}\n", data::split_name(split), set.entry(i).key, error.what());
      }
      progress.update(i + 1);
    }
  }
  M3_CHECK(num_broken == 0, "{}: {} documents are broken", flags.folder, num_broken);
  M3_CHECK(counts == manifest.counts, "{}: the documents' counts differ from those of the manifest", flags.folder);
  fmt::print("all documents are sound\n");
  return 0;
}

}  // namespace

int command_data(const Args& args) {
  Flags flags;
  Options options("data",
                  "Makes and checks training data: tar shards with an index and a manifest of hashes and counts. Actions: 'make' reads "
                  "folders of text, pages, captioned pictures and films; 'synthetic' writes generated documents; 'check' reads a data "
                  "folder whole, decodes every picture and prints its statistics; 'tokenizer' trains the byte-pair vocabulary of "
                  "m3-nano on a corpus and on the strings of generated documents.",
                  "m3 data make corpus --html handbook=/usr/share/doc/debian-handbook/html/en-US --licence handbook=GPL-2+\n"
                  "  m3 data synthetic cards --family card --count 1000 --seed 1\n"
                  "  m3 data check corpus\n"
                  "  m3 data tokenizer runs/nano-tokenizer --corpus corpus --layout tests/golden/tokenizer/tiny");
  options.positional("ACTION", flags.action, "make, synthetic, check or tokenizer");
  options.positional("FOLDER", flags.folder, "the data folder");
  options.add("--text", flags.text, "NAME=PATH: text files, one document each");
  options.add("--html", flags.html, "NAME=PATH: pages with their local pictures in place");
  options.add("--captions", flags.captions, "NAME=PATH: pictures with a .txt of the same stem");
  options.add("--sequences", flags.sequences, "NAME=PATH: numbered pictures as clips");
  options.add("--films", flags.films, "NAME=PATH: films with a .txt of the same stem");
  options.add("--chats", flags.chats, "NAME=PATH: .jsonl, one conversation a line; assistant turns are targets");
  options.add("--licence", flags.licences, "NAME=TEXT: licence kept with each document of the source");
  options.add("--weight", flags.weights, "NAME=NUMBER: weight of the source's text as targets (0: input only)");
  options.add("--seed", flags.seed, "seed of the split, or of synthetic documents");
  options.add("--valid", flags.valid, "share of the items for validation");
  options.add("--test", flags.test, "share of the items for tests");
  options.add("--shard-size", flags.shard_mib, "MiB after which a shard is closed");
  options.add("--min-letters", flags.min_letters, "shorter texts without pictures are left out");
  options.add("--max-document", flags.max_document_kib, "KiB above which a text is cut at an empty line");
  options.add("--near-duplicates", flags.near_duplicates, "texts this alike are left out (share of equal MinHash values)");
  options.add("--film-fps", flags.film_fps, "frames kept of a second of film");
  options.choice("--family", flags.family, {"picture", "card", "clip", "repeat", "chat"}, "of synthetic documents");
  options.choice("--draw", flags.draw, {"train", "held-out", "strong"}, "items of synthetic documents: see nano.md §3");
  options.add("--count", flags.count, "number of synthetic documents");
  options.add("--corpus", flags.corpus, "tokenizer: data folder of running text");
  options.add("--layout", flags.layout, "tokenizer: folder of a tokenizer.json whose added tokens, pattern and size are kept");
  options.parse(args);
  if (flags.valid < 0 || flags.test < 0 || flags.valid + flags.test > 1) throw UsageError{"--valid and --test must be shares that sum to at most 1"};
  if (flags.count < 1) throw UsageError{"--count must be at least 1 (see m3 data --help)"};
  constexpr int64_t kMostMib = 1 << 20;  // a shard of a terabyte
  if (flags.shard_mib < 1 || flags.shard_mib > kMostMib) {
    throw UsageError{fmt::format("--shard-size must be between 1 and {} (see m3 data --help)", kMostMib)};
  }
  if (flags.max_document_kib < 1 || flags.max_document_kib > kMostMib) {
    throw UsageError{fmt::format("--max-document must be between 1 and {} (see m3 data --help)", kMostMib)};
  }
  if (!(flags.film_fps > 0)) throw UsageError{"--film-fps must be above 0 (see m3 data --help)"};
  if (flags.action == "make") return make(flags);
  if (flags.action == "synthetic") return synthesise(flags);
  if (flags.action == "check") return check(flags);
  if (flags.action == "tokenizer") {
    if (flags.corpus.empty() || flags.layout.empty()) throw UsageError{"tokenizer needs --corpus and --layout (see --help)"};
    train::train_nano_tokenizer(flags.corpus, flags.layout, flags.folder, flags.seed);
    return 0;
  }
  throw UsageError{fmt::format("unknown action '{}' (want make, synthetic, check or tokenizer; see --help)", flags.action)};
}

}  // namespace m3::cli
