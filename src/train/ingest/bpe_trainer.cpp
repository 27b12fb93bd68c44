#include "train/ingest/bpe_trainer.h"

#include <algorithm>
#include <array>
#include <set>
#include <vector>

#include "base/check.h"

namespace m3::ingest {
namespace {

constexpr int kNumBytes = 256;

// The layout with single digits in its pattern.
std::string with_single_digits(std::string_view layout) {
  const std::string runs = "\\\\p{N}{1,3}", one = "\\\\p{N}";  // as JSON spells them
  std::string text(layout);
  for (size_t at = text.find(runs); at != std::string::npos; at = text.find(runs, at))
    text.replace(at, runs.size(), one);
  return text;
}

using Pair = std::pair<int32_t, int32_t>;

struct PairHash {
  size_t operator()(const Pair& pair) const {
    return std::hash<uint64_t>()(uint64_t{static_cast<uint32_t>(pair.first)} << 32 |
                                 static_cast<uint32_t>(pair.second));
  }
};

struct Word {
  std::vector<int32_t> ids;
  int64_t count;
};

// Counts of neighbouring pairs, kept up to date as words are merged.
class PairCounts {
 public:
  explicit PairCounts(std::vector<Word> words) : words_(std::move(words)) {
    for (size_t i = 0; i < words_.size(); ++i) change(i, +1);
  }

  Pair most_frequent() const {
    Pair best = {-1, -1};
    int64_t most = 0;
    for (const auto& [pair, entry] : pairs_) {
      if (entry.count > most || (entry.count == most && most > 0 && pair < best)) {
        best = pair;
        most = entry.count;
      }
    }
    return best;
  }

  void merge(Pair pair, int32_t result) {
    const std::set<size_t> words = pairs_.at(pair).words;  // copied: it changes below
    for (const size_t i : words) {
      change(i, -1);
      std::vector<int32_t>& ids = words_[i].ids;
      size_t out = 0;
      for (size_t in = 0; in < ids.size(); ++in, ++out) {
        const bool found =
            in + 1 < ids.size() && ids[in] == pair.first && ids[in + 1] == pair.second;
        ids[out] = found ? result : ids[in];
        in += found;
      }
      ids.resize(out);
      change(i, +1);
    }
  }

 private:
  struct Entry {
    int64_t count = 0;
    std::set<size_t> words;
  };
  void change(size_t word, int sign) {
    const std::vector<int32_t>& ids = words_[word].ids;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      Entry& entry = pairs_[{ids[i], ids[i + 1]}];
      entry.count += sign * words_[word].count;
      if (sign > 0) entry.words.insert(word);
      if (sign < 0) entry.words.erase(word);
    }
  }

  std::vector<Word> words_;
  std::unordered_map<Pair, Entry, PairHash> pairs_;
};

}  // namespace

BpeTrainer::BpeTrainer(std::string_view layout)
    : layout_(JsonValue::parse(layout, "tokenizer.json")),
      cutter_(Tokenizer::from_json(with_single_digits(layout))) {
  const JsonValue* model = layout_.find("model");
  const JsonValue* vocab = model ? model->find("vocab") : nullptr;
  M3_CHECK(vocab != nullptr && vocab->size() >= kNumBytes,
           "the layout has no vocabulary of at least {} entries", kNumBytes);
  for (int32_t id = 0; id < kNumBytes; ++id) {
    M3_CHECK(cutter_.bytes(id).size() == 1 && !cutter_.is_added(id),
             "the layout's id {} is not a single byte", id);
  }
}

void BpeTrainer::add(std::string_view text, int64_t times) {
  for (std::string& piece : cutter_.split(text)) {
    if (!cutter_.added_id(piece)) pieces_[std::move(piece)] += times;
  }
}

std::string BpeTrainer::train() const {
  std::array<int32_t, kNumBytes> id_of_byte = {};
  std::vector<std::string> names(kNumBytes);  // of entries, in the file's alphabet
  const JsonValue& vocab = *layout_.find("model")->find("vocab");
  for (const std::string& name : vocab.keys()) {
    const int32_t id = static_cast<int32_t>(vocab.find(name)->as_double());
    if (id < kNumBytes) names[id] = name;
  }
  for (int32_t id = 0; id < kNumBytes; ++id)
    id_of_byte[static_cast<uint8_t>(cutter_.bytes(id)[0])] = id;

  std::vector<Word> words;
  std::vector<std::pair<std::string, int64_t>> sorted(pieces_.begin(), pieces_.end());
  std::sort(sorted.begin(), sorted.end());
  for (const auto& [piece, count] : sorted) {
    Word word{{}, count};
    for (const char c : piece) word.ids.push_back(id_of_byte[static_cast<uint8_t>(c)]);
    words.push_back(std::move(word));
  }
  PairCounts counts(std::move(words));
  JsonValue merges = JsonValue::array();
  while (names.size() < vocab.size()) {
    const Pair pair = counts.most_frequent();
    M3_CHECK(pair.first >= 0, "the texts hold only {} different entries; the layout has {}",
             names.size(), vocab.size());
    counts.merge(pair, static_cast<int32_t>(names.size()));
    merges.push_back(JsonValue::array(
        {JsonValue::string(names[pair.first]), JsonValue::string(names[pair.second])}));
    names.push_back(names[pair.first] + names[pair.second]);
  }
  JsonValue entries = JsonValue::object();
  for (size_t id = 0; id < names.size(); ++id)
    entries.append_member(names[id], JsonValue::integer(static_cast<int64_t>(id)));
  JsonValue file = layout_;
  JsonValue model = *file.find("model");
  model.set("vocab", std::move(entries));
  model.set("merges", std::move(merges));
  file.set("model", std::move(model));
  return file.dump();
}

}  // namespace m3::ingest
