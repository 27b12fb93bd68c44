// Folders of real material to a data folder: what `m3 data make` does. Everything that is left out is counted
// by its reason in the manifest.
#pragma once
#include <filesystem>
#include <map>
#include <string>
#include <unordered_set>
#include <vector>

#include "media/resize.h"
#include "train/data/shard_writer.h"
#include "train/ingest/clean.h"
#include "train/ingest/dedup.h"

namespace m3::ingest {

struct Source {
  std::string name;
  std::filesystem::path path;  // a folder (searched with all below it, in the order of names) or one file
  std::string licence, lang = "en";
  float weight = 1;            // of its text as targets
};

struct ImportOptions {
  CleanOptions clean;
  int64_t max_document_bytes = 64 << 10;  // longer texts are cut at empty lines
  double near_duplicates = 0.8;           // share of equal MinHash values
  int min_picture_side = 24;              // smaller ones are icons
  int max_picture_uses = 50;              // of one file in a source of pages: more often is decoration
  int min_frames = 4, max_frames = 32;    // of a clip
  double sequence_fps = 8, film_fps = 1;
  MediaLimits limits;
};

class Importer {
 public:
  Importer(data::ShardWriter& writer, ImportOptions options);

  // .txt, .md, .rst, .tex, .c, .h, .cpp, .py: one document a file, cut where it is too long.
  void text(const Source& source);
  // .html, .htm, .xhtml: text and local pictures in their order.
  void html(const Source& source);
  // Pictures with a text of the same stem; its first line is the caption. Lines "xx.utf8=caption" hold other
  // languages (as Tux Paint has them) and are left out.
  void captions(const Source& source);
  // Pictures NAME-1.png, NAME-2.png, ... of one folder: a clip, captioned by the words of its name.
  void sequences(const Source& source);
  // Films with a text of the same stem, sampled at film_fps.
  void films(const Source& source);
  // .jsonl, one conversation a line: {"messages": [...], "tools": [...], "thinking_mode": "..."}; the targets
  // are the assistant's turns.
  void chats(const Source& source);

 private:
  void add(data::Document document);
  void add_text(const Source& source, const std::string& id, const std::string& text);
  void drop(const std::string& reason) { writer_.note_dropped(reason); }
  // Reads, checks and decodes once; empty with a counted reason if it cannot be used.
  std::optional<data::Picture> load_picture(const std::filesystem::path& path);
  std::string item_of(const data::Picture& picture, const std::string& item);

  data::ShardWriter& writer_;
  ImportOptions options_;
  TextDedup texts_;
  std::unordered_set<uint64_t> with_media_;  // hashes of whole documents with media
  PictureIndex pictures_;
  std::vector<std::string> picture_items_;
};

// Files below a path with one of these extensions (".png"), sorted.
std::vector<std::filesystem::path> find_files(const std::filesystem::path& path, const std::vector<std::string>& extensions);

// A conversation as segments: what the assistant writes, up to its end of turn, is a target, all else input.
// `weight`: of the targets. Throws Error for messages that the chat protocol refuses.
std::vector<data::Segment> chat_segments(const JsonValue& conversation, float weight);

}  // namespace m3::ingest
