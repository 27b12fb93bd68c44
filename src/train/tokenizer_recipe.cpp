#include "train/tokenizer_recipe.h"

#include "base/file.h"
#include "base/log.h"
#include "train/batch.h"
#include "train/ingest/bpe_trainer.h"
#include "train/synthetic/clips.h"
#include "train/synthetic/pictures.h"

namespace m3::train {

namespace fs = std::filesystem;

namespace {

constexpr int64_t kPictures = 6000, kClips = 3000, kChats = 3000, kFacts = 2000, kFullPrompts = 150;
constexpr int64_t kTimesOfName = 1500, kTimesOfWord = 250;
constexpr int64_t kCorpusShare = 3;  // every third page

void add_document(ingest::BpeTrainer& trainer, const data::Document& document) {
  for (const data::Segment& segment : document.segments) {
    if (!segment.text.empty()) trainer.add(segment.text);
  }
}

void add_corpus(ingest::BpeTrainer& trainer, const fs::path& corpus) {
  int64_t num_bytes = 0;
  const data::ShardSet set(corpus, data::Split::kTrain);
  for (int64_t i = 0; i < set.num_documents(); i += kCorpusShare) {
    const data::Document document = set.read(i);
    add_document(trainer, document);
    for (const data::Segment& segment : document.segments)
      num_bytes += static_cast<int64_t>(segment.text.size());
  }
  log_info("tokenizer: {} bytes of {}", num_bytes, corpus.string());
}

}  // namespace

void train_nano_tokenizer(const fs::path& corpus, const fs::path& layout_folder,
                          const fs::path& out, uint64_t seed) {
  using namespace synthetic;
  const std::string layout = read_file(layout_folder / "tokenizer.json");
  ingest::BpeTrainer trainer(layout);
  add_corpus(trainer, corpus);
  const Tokenizer tokenizer = Tokenizer::from_json(layout);
  const TextPool no_text({}, false, tokenizer);
  FactOptions facts;
  facts.num_tokens = 0;
  for (int64_t i = 0; i < kPictures; ++i) add_document(trainer, picture_document(seed, i, {}));
  for (int64_t i = 0; i < kClips; ++i) add_document(trainer, clip_document(seed, i, {}));
  for (int64_t i = 0; i < kChats; ++i) add_document(trainer, chat_document(seed, i, Draw::kTrain));
  for (int64_t i = 0; i < kFacts; ++i)
    add_document(trainer, fact_document(seed, i, facts, no_text));
  for (int64_t i = 0; i < kFullPrompts; ++i) {
    add_document(trainer, behind_full_prompt(picture_document(seed, kPictures + i, {})));
  }
  for (const std::string_view name : kFirstNames)
    trainer.add(" " + std::string(name), kTimesOfName);
  for (const std::string_view word : kFactWords) trainer.add(" " + std::string(word), kTimesOfWord);

  fs::create_directories(out);
  for (const char* name : {"tokenizer_config.json", "special_tokens_map.json"}) {
    if (fs::exists(layout_folder / name))
      write_file_atomic(out / name, read_file(layout_folder / name));
  }
  write_file_atomic(out / "tokenizer.json", trainer.train() + "\n");
}

}  // namespace m3::train
