// Endless sequences of samples. A source gives the sample of any position; a stream makes samples ahead in
// worker threads, hands them out in order, skips what is broken and remembers one number: the position.
#pragma once
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/check.h"
#include "train/data/order.h"
#include "train/data/prefetch.h"
#include "train/data/sample.h"
#include "train/data/shard_set.h"

namespace m3::data {

// document(position) depends on the position alone and may be called from any thread.
class DocumentSource {
 public:
  virtual ~DocumentSource() = default;
  virtual std::string name() const = 0;
  virtual Document document(int64_t position) const = 0;
};

// sample(position) depends on the position alone and may be called from any thread. Throws ContentError for
// a document whose content is broken, Error for one that cannot be read.
class SampleSource {
 public:
  virtual ~SampleSource() = default;
  virtual std::string name() const = 0;
  virtual Sample sample(int64_t position) const = 0;
};

class ContentError : public Error {
 public:
  using Error::Error;
};

// Documents built into samples.
class DocumentSamples : public SampleSource {
 public:
  DocumentSamples(std::shared_ptr<const DocumentSource> source, std::shared_ptr<const SampleBuilder> builder)
      : source_(std::move(source)), builder_(std::move(builder)) {}
  std::string name() const override { return source_->name(); }
  Sample sample(int64_t position) const override;

 private:
  std::shared_ptr<const DocumentSource> source_;
  std::shared_ptr<const SampleBuilder> builder_;
};

// The documents of a split, shuffled anew every epoch.
class ShardSource : public DocumentSource {
 public:
  ShardSource(std::shared_ptr<const ShardSet> set, std::string name, uint64_t seed, int64_t window = ShuffledOrder::kWindow);
  std::string name() const override { return name_; }
  Document document(int64_t position) const override;
  int64_t num_documents() const { return set_->num_documents(); }

 private:
  std::shared_ptr<const ShardSet> set_;
  std::string name_;
  mutable std::mutex mutex_;  // guards order_
  mutable ShuffledOrder order_;
};

// What a checkpoint keeps of a stream.
struct StreamState {
  int64_t position = 0;                    // of the next sample
  std::map<std::string, int64_t> skipped;  // broken documents, by reason
  bool operator==(const StreamState&) const = default;

  int64_t num_skipped() const;
  JsonValue to_json() const;
  static StreamState from_json(const JsonValue& value, const std::string& where);
};

struct StreamOptions {
  int workers = 1;
  int64_t depth = 16;  // samples made ahead
  // The run stops when more than this share of the positions (and more than the allowance) is broken.
  double max_broken_share = 0.001;
  int64_t broken_allowance = 10;
};

class SampleStream {
 public:
  explicit SampleStream(std::shared_ptr<const SampleSource> source, StreamState state = {}, StreamOptions options = {});

  // The next sound sample. A broken document is logged with its place and reason, counted and skipped; above
  // the limit an Error names the counts and the last reason.
  Sample next();
  const StreamState& state() const { return state_; }
  const std::string& name() const { return name_; }

 private:
  struct Outcome {
    std::optional<Sample> sample;
    std::string reason, message;
  };
  void skip(const Outcome& outcome, int64_t position);

  std::string name_;
  StreamState state_;
  StreamOptions options_;
  Prefetcher<Outcome> prefetcher_;
};

}  // namespace m3::data
