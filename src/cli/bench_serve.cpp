// m3 bench serve: load on a running server, ours or another with /v1/completions, and what its
// clients see.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "base/rng.h"
#include "cli/bench.h"
#include "cli/load_client.h"
#include "cli/options.h"
#include "text/json_value.h"

namespace m3::cli {

namespace {

using nlohmann::ordered_json;

struct BenchServeFlags {
  std::string url = "http://127.0.0.1:8000", prompt = "256", answer = "64", trace;
  std::optional<std::string> api_key, model;
  int64_t requests = 64, concurrency = 8, shared_prefix = 0, prefix_groups = 1;
  std::optional<double> rate;
  uint64_t seed = 1;
  bool json = false;
};

// "256": always; "100-400": uniform; "~256": exponential with that mean, at least 1, at most 8
// times the mean.
class LengthRule {
 public:
  LengthRule(const std::string& flag, const std::string& text) {
    exponential_ = text.starts_with("~");
    const std::string body = exponential_ ? text.substr(1) : text;
    const size_t dash = body.find('-');
    const auto number = [&](const std::string& digits) {
      const bool fits = !digits.empty() && digits.size() < 9 &&
                        digits.find_first_not_of("0123456789") == std::string::npos;
      if (!fits || std::stoll(digits) < 1)
        throw UsageError{fmt::format("{} '{}': want N, A-B or ~MEAN", flag, text)};
      return int64_t{std::stoll(digits)};
    };
    least_ = number(body.substr(0, dash));
    most_ = dash == std::string::npos || exponential_ ? least_ : number(body.substr(dash + 1));
    if (most_ < least_) throw UsageError{fmt::format("{} '{}': want A-B with A <= B", flag, text)};
  }
  int64_t draw(Philox& rng) const {
    if (!exponential_)
      return least_ + static_cast<int64_t>(rng.below(static_cast<uint32_t>(most_ - least_ + 1)));
    const double value = -std::log(1 - rng.uniform()) * static_cast<double>(least_);
    return std::clamp<int64_t>(std::llround(value), 1, 8 * least_);
  }

 private:
  bool exponential_ = false;
  int64_t least_ = 0, most_ = 0;
};

BenchServeFlags parse(const Args& args) {
  BenchServeFlags flags;
  Options options(
      "bench serve",
      "Sends completions to a running server and measures what its clients see: time to first "
      "token, time per "
      "token, throughput. Prompts are random token ids, answers have their full length "
      "(ignore_eos). Lengths: N, A-B "
      "(uniform) or ~MEAN (exponential).\n\n"
      "--trace FILE replays requests instead, one JSON object a line: {\"at\": seconds, "
      "\"prompt_tokens\": n, "
      "\"answer_tokens\": n, \"prefix\": name, \"prefix_tokens\": n}; equal names have equal "
      "beginnings.",
      "m3 bench serve --requests 100 --rate 2 --prompt 1000 --answer 100 --shared-prefix 500");
  options.add("--url", flags.url, "server");
  options.add("--api-key", flags.api_key, "its key");
  options.add("--model", flags.model, "name in requests (default: the server's first)");
  options.add("--requests", flags.requests, "how many");
  options.add("--concurrency", flags.concurrency, "open at a time");
  options.add("--rate", flags.rate, "instead: arrivals a second (Poisson), however many are open");
  options.add("--prompt", flags.prompt, "tokens of a prompt, behind the shared prefix");
  options.add("--answer", flags.answer, "tokens of an answer");
  options.add("--shared-prefix", flags.shared_prefix,
              "tokens that prompts of a group have in common");
  options.add("--prefix-groups", flags.prefix_groups, "groups with different prefixes");
  options.add("--trace", flags.trace, "see above");
  options.add("--seed", flags.seed, "of lengths, ids and arrivals");
  options.flag("--json", flags.json, "one JSON object instead of a table");
  options.parse(args);
  if (flags.requests < 1 || flags.concurrency < 1)
    throw UsageError{"--requests and --concurrency must be at least 1"};
  if (flags.shared_prefix < 0 || flags.prefix_groups < 1)
    throw UsageError{"--shared-prefix must be 0 or more, --prefix-groups 1 or more"};
  if (flags.rate && !(*flags.rate > 0)) throw UsageError{"--rate must be above 0"};
  return flags;
}

// Makes bodies: random ids, the same for the same prefix name.
class BodyMaker {
 public:
  BodyMaker(std::string model, int64_t vocab, uint64_t seed)
      : model_(std::move(model)), vocab_(vocab), seed_(seed), rng_(seed) {}

  Philox& rng() { return rng_; }
  std::string make(const std::string& prefix, int64_t prefix_tokens, int64_t prompt_tokens,
                   int64_t answer_tokens) {
    std::string ids;
    Philox prefix_rng(seed_ ^ std::hash<std::string>{}(prefix));
    append(ids, prefix_rng, prefix_tokens);
    append(ids, rng_, prompt_tokens);
    return fmt::format(
        R"({{"model":{},"prompt":[{}],"max_tokens":{},"ignore_eos":true,"stream":true,"stream_options":{{"include_usage":true}}}})",
        JsonValue::string(model_).dump(), ids, answer_tokens);
  }

 private:
  void append(std::string& ids, Philox& rng, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) {
      if (!ids.empty()) ids += ',';
      ids += std::to_string(rng.below(static_cast<uint32_t>(vocab_)));
    }
  }

  const std::string model_;
  const int64_t vocab_;
  const uint64_t seed_;
  Philox rng_;
};

std::vector<LoadRequest> generated(const BenchServeFlags& flags, BodyMaker& maker) {
  const LengthRule prompt("--prompt", flags.prompt), answer("--answer", flags.answer);
  std::vector<LoadRequest> requests;
  double time = 0;
  for (int64_t i = 0; i < flags.requests; ++i) {
    const std::string prefix =
        fmt::format("group {}", maker.rng().below(static_cast<uint32_t>(flags.prefix_groups)));
    const int64_t prompt_tokens = prompt.draw(maker.rng()),
                  answer_tokens = answer.draw(maker.rng());
    requests.push_back(
        {time, maker.make(prefix, flags.shared_prefix, prompt_tokens, answer_tokens)});
    if (flags.rate) time += -std::log(1 - maker.rng().uniform()) / *flags.rate;
  }
  return requests;
}

std::vector<LoadRequest> traced(const std::string& path, BodyMaker& maker) {
  std::vector<LoadRequest> requests;
  const std::string text = read_file(path);
  int64_t line_number = 0;
  for (size_t from = 0; from < text.size();) {
    const size_t end = std::min(text.find('\n', from), text.size());
    const std::string line = text.substr(from, end - from);
    from = end + 1;
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const JsonValue json = JsonValue::parse(line, fmt::format("{}:{}", path, line_number));
    const auto number = [&](const char* key, double other) {
      const JsonValue* value = json.find(key);
      M3_CHECK(value == nullptr || (value->is_number() && value->as_double() >= 0),
               "{}:{}: {} is no number", path, line_number, key);
      return value == nullptr ? other : value->as_double();
    };
    const JsonValue* prefix = json.find("prefix");
    requests.push_back(
        {number("at", 0), maker.make(prefix == nullptr ? "" : prefix->text(),
                                     static_cast<int64_t>(number("prefix_tokens", 0)),
                                     static_cast<int64_t>(number("prompt_tokens", 256)),
                                     static_cast<int64_t>(number("answer_tokens", 64)))});
  }
  std::ranges::stable_sort(requests, {}, &LoadRequest::at_seconds);
  M3_CHECK(!requests.empty(), "{}: no request", path);
  return requests;
}

ordered_json spread_ms(std::vector<double> seconds) {
  if (seconds.empty()) return nullptr;
  std::ranges::sort(seconds);
  const auto at = [&](double share) {
    return 1e3 *
           seconds[static_cast<size_t>(share * static_cast<double>(seconds.size() - 1) + 0.5)];
  };
  double sum = 0;
  for (const double value : seconds) sum += value;
  return {{"mean", 1e3 * sum / static_cast<double>(seconds.size())},
          {"p50", at(0.5)},
          {"p90", at(0.9)},
          {"p99", at(0.99)},
          {"max", at(1)}};
}

ordered_json summary(const std::vector<LoadResult>& results) {
  std::vector<double> first, per_token, gaps, whole;
  int64_t complete = 0, prompt_tokens = 0, cached_tokens = 0, answer_tokens = 0;
  double end = 0;
  ordered_json failures = ordered_json::object(), first_failure;
  for (const LoadResult& r : results) {
    if (!r.complete || r.first_seconds == 0) {
      const std::string kind = r.status == 200 ? "stream cut"
                               : r.status == 0 ? "no answer"
                                               : std::to_string(r.status);
      failures[kind] = failures.value(kind, 0) + 1;
      if (first_failure.is_null()) first_failure = r.error;
      continue;
    }
    ++complete;
    prompt_tokens += r.prompt_tokens;
    cached_tokens += r.cached_tokens;
    answer_tokens += r.answer_tokens;
    end = std::max(end, r.last_seconds);
    first.push_back(r.first_seconds - r.start_seconds);
    whole.push_back(r.last_seconds - r.start_seconds);
    if (r.answer_tokens > 1)
      per_token.push_back((r.last_seconds - r.first_seconds) /
                          static_cast<double>(r.answer_tokens - 1));
    gaps.insert(gaps.end(), r.gaps_seconds.begin(), r.gaps_seconds.end());
  }
  const double span = std::max(end, 1e-9);
  return {{"requests", results.size()},
          {"complete", complete},
          {"failures", failures},
          {"first_failure", first_failure},
          {"seconds", end},
          {"prompt_tokens", prompt_tokens},
          {"cached_tokens", cached_tokens},
          {"answer_tokens", answer_tokens},
          {"requests_per_second", static_cast<double>(complete) / span},
          {"prompt_tokens_per_second", static_cast<double>(prompt_tokens) / span},
          {"answer_tokens_per_second", static_cast<double>(answer_tokens) / span},
          {"time_to_first_token_ms", spread_ms(first)},
          {"time_per_token_ms", spread_ms(per_token)},
          {"gap_between_pieces_ms", spread_ms(gaps)},
          {"whole_request_ms", spread_ms(whole)}};
}

void print_table(const ordered_json& s) {
  fmt::print(
      "{} of {} requests complete in {:.2f} s: {:.2f} requests/s, {:.1f} prompt tok/s ({} of {} "
      "cached), {:.1f} answer tok/s\n",
      s["complete"].get<int64_t>(), s["requests"].get<int64_t>(), s["seconds"].get<double>(),
      s["requests_per_second"].get<double>(), s["prompt_tokens_per_second"].get<double>(),
      s["cached_tokens"].get<int64_t>(), s["prompt_tokens"].get<int64_t>(),
      s["answer_tokens_per_second"].get<double>());
  for (const auto& [kind, count] : s["failures"].items())
    fmt::print("failed, {}: {}\n", kind, count.get<int64_t>());
  if (!s["first_failure"].is_null())
    fmt::print("first failure: {}\n", s["first_failure"].get<std::string>());
  fmt::print("{:<24} {:>10} {:>10} {:>10} {:>10} {:>10}\n", "ms", "mean", "p50", "p90", "p99",
             "max");
  for (const char* key : {"time_to_first_token_ms", "time_per_token_ms", "gap_between_pieces_ms",
                          "whole_request_ms"}) {
    if (s[key].is_null()) continue;
    std::string name(key, std::string_view(key).size() - 3);
    std::ranges::replace(name, '_', ' ');
    fmt::print("{:<24} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f} {:>10.2f}\n", name,
               s[key]["mean"].get<double>(), s[key]["p50"].get<double>(),
               s[key]["p90"].get<double>(), s[key]["p99"].get<double>(),
               s[key]["max"].get<double>());
  }
}

}  // namespace

int bench_serve(const Args& args) {
  const BenchServeFlags flags = parse(args);
  LoadTarget target = parse_url(flags.url);
  target.api_key = flags.api_key.value_or("");
  const JsonValue models = JsonValue::parse(http_get(target, "/v1/models"), "/v1/models");
  const JsonValue* list = models.find("data");
  M3_CHECK(list != nullptr && list->size() > 0, "{}: /v1/models lists no model", flags.url);
  const JsonValue& model = list->items()[0];
  const JsonValue* vocab = model.find("vocab_size");
  // Special tokens stand at the end of the vocabulary, and a placeholder of a picture would be
  // refused. Servers that do not say how many ids there are get the first thousand.
  const int64_t num_ids = vocab != nullptr ? static_cast<int64_t>(0.9 * vocab->as_double()) : 1000;
  BodyMaker maker(flags.model.value_or(model.find("id")->text()), num_ids, flags.seed);
  const auto requests = flags.trace.empty() ? generated(flags, maker) : traced(flags.trace, maker);
  const bool by_time = flags.rate || !flags.trace.empty();
  const ordered_json result = summary(run_load(target, requests, by_time ? 0 : flags.concurrency));
  if (flags.json) {
    const ordered_json load = {{"url", flags.url},
                               {"prompt", flags.prompt},
                               {"answer", flags.answer},
                               {"shared_prefix", flags.shared_prefix},
                               {"prefix_groups", flags.prefix_groups},
                               {"trace", flags.trace},
                               {"seed", flags.seed},
                               {"concurrency", by_time ? 0 : flags.concurrency},
                               {"rate", flags.rate.value_or(0)}};
    fmt::print("{}\n", ordered_json{{"load", load}, {"result", result}}.dump(1));
  } else {
    print_table(result);
  }
  return result["complete"].get<size_t>() == requests.size() ? 0 : 1;
}

}  // namespace m3::cli
