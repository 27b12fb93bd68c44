#include "train/data/stream.h"

#include "base/check.h"
#include "base/log.h"

namespace m3::data {

ShardSource::ShardSource(std::shared_ptr<const ShardSet> set, std::string name, uint64_t seed, int64_t window)
    : set_(std::move(set)), name_(std::move(name)), order_(set_->num_documents(), seed, window) {}

Document ShardSource::document(int64_t position) const {
  int64_t idx;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    idx = order_.document(position);
  }
  return set_->read(idx);
}

int64_t StreamState::num_skipped() const {
  int64_t sum = 0;
  for (const auto& [reason, count] : skipped) sum += count;
  return sum;
}

JsonValue StreamState::to_json() const {
  JsonValue out = JsonValue::object();
  out.append_member("position", JsonValue::integer(position));
  JsonValue reasons = JsonValue::object();
  for (const auto& [reason, count] : skipped) reasons.append_member(reason, JsonValue::integer(count));
  out.append_member("skipped", std::move(reasons));
  return out;
}

StreamState StreamState::from_json(const JsonValue& value, const std::string& where) {
  const auto count = [&](const JsonValue* number) {
    M3_CHECK(number != nullptr && number->is_integer() && number->as_double() >= 0, "{}: not the state of a data stream", where);
    return static_cast<int64_t>(std::stoll(number->text()));
  };
  StreamState state;
  state.position = count(value.find("position"));
  const JsonValue* skipped = value.find("skipped");
  M3_CHECK(skipped != nullptr && skipped->is_object(), "{}: not the state of a data stream", where);
  for (const std::string& reason : skipped->keys()) state.skipped[reason] = count(skipped->find(reason));
  return state;
}

Sample DocumentSamples::sample(int64_t position) const {
  const Document document = source_->document(position);
  try {
    return builder_->build(document);
  } catch (const Error& error) {
    throw ContentError(fmt::format("document {}: {}", document.id, error.what()), __FILE__, __LINE__);
  }
}

SampleStream::SampleStream(std::shared_ptr<const SampleSource> source, StreamState state, StreamOptions options)
    : name_(source->name()),
      state_(std::move(state)),
      options_(options),
      prefetcher_(
          [source](int64_t position) {
            Outcome outcome;
            try {
              outcome.sample = source->sample(position);
            } catch (const ContentError& error) {
              outcome.reason = "content";
              outcome.message = error.what();
            } catch (const Error& error) {
              outcome.reason = "read";
              outcome.message = error.what();
            }
            return outcome;
          },
          state_.position, options.workers, options.depth) {}

void SampleStream::skip(const Outcome& outcome, int64_t position) {
  ++state_.skipped[outcome.reason];
  log_warn("data {}: position {} skipped ({}): {}", name_, position, outcome.reason, outcome.message);
  const int64_t skipped = state_.num_skipped();
  const bool too_many = skipped > options_.broken_allowance &&
                        static_cast<double>(skipped) > options_.max_broken_share * static_cast<double>(position + 1);
  M3_CHECK(!too_many, "data {}: {} of {} documents are broken, the limit is {} and {} %; the last: {}", name_, skipped,
           position + 1, options_.broken_allowance, 100 * options_.max_broken_share, outcome.message);
}

Sample SampleStream::next() {
  for (;;) {
    const int64_t position = prefetcher_.position();
    Outcome outcome = prefetcher_.next();
    state_.position = position + 1;
    if (outcome.sample) return std::move(*outcome.sample);
    skip(outcome, position);
  }
}

}  // namespace m3::data
