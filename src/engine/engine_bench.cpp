// What the engine adds to a decode step besides the model: planning, page tables, draws, text, events, metrics. The
// model is a fake; its time is taken off. Processor time of the engine's thread, which does all of it here: other
// programs on the machine do not show. Results: docs/benchmarks.md.
#include <benchmark/benchmark.h>
#include <time.h>

#include <cmath>

#include "engine/engine.h"
#include "engine/fake_engine_model.h"

namespace m3 {
namespace {

const Checkpoint& checkpoint() {
  static const Checkpoint opened = Checkpoint::open(M3_SOURCE_DIR "/tests/golden/models/tiny-vl");
  return opened;
}
const Tokenizer& tokenizer() {
  static const Tokenizer loaded = Tokenizer::load(M3_SOURCE_DIR "/tests/golden/models/tiny-vl");
  return loaded;
}

double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

class TimedModel : public FakeEngineModel {
 public:
  using FakeEngineModel::FakeEngineModel;
  Tensor step(const StepInput& input) override {
    const double start = thread_seconds();
    const Tensor logits = FakeEngineModel::step(input);
    seconds += thread_seconds() - start;
    return logits;
  }
  double seconds = 0;
};

// Steps in which so many requests get a token each, 1,024 tokens behind them.
void decode_step(benchmark::State& state) {
  const int64_t batch = state.range(0), prompt_tokens = 1024, most = prompt_tokens + state.max_iterations + 100;
  const int64_t num_pages = batch * (most / 128 + 2);
  TimedModel model(checkpoint().config(), {num_pages, 128, 1 << 20, 4096, batch, batch, most + 1});
  Engine engine(model, tokenizer(), {});
  int64_t tokens = 0;
  for (int64_t i = 0; i < batch; ++i) {
    GenerationRequest request;
    for (int64_t t = 0; t < prompt_tokens; ++t) request.prompt.push_back(static_cast<int32_t>((i * 37 + t) % 900));
    request.max_tokens = most - prompt_tokens;
    request.sampling.temperature = 0;
    request.stop = {"a string that does not come"};
    engine.submit(std::move(request), [&](const GenerationEvent& event) { tokens += event.kind == GenerationEvent::Kind::kToken; });
  }
  while (tokens < batch) engine.step();
  model.fast_logits = true;
  const auto seconds = [&] { return thread_seconds() - model.seconds; };
  for (auto _ : state) {
    const double before = seconds();
    engine.step();
    state.SetIterationTime(seconds() - before);
  }
}
BENCHMARK(decode_step)->Arg(1)->Arg(16)->Arg(64)->UseManualTime()->Iterations(2000)->Unit(benchmark::kMicrosecond);

// One draw from a row of M3's vocabulary, which the step above does not contain: its vocabulary is small.
void draw(benchmark::State& state) {
  // Probabilities that fall with the rank to the power of 1.5.
  std::vector<float> logits(200064);
  for (size_t i = 0; i < logits.size(); ++i) logits[i * 7919 % logits.size()] = -1.5f * std::log1p(static_cast<float>(i));
  SamplingParams params;
  params.temperature = state.range(0) == 0 ? 0 : 1;
  params.top_k = state.range(0) == 1 ? 40 : 0;
  params.top_p = state.range(0) == 0 ? 1 : 0.95f;
  for (auto _ : state) {
    SamplingState at;
    at.position = static_cast<uint64_t>(state.iterations());
    at.num_ids = 200061;
    benchmark::DoNotOptimize(sample(logits, params, at));
  }
  state.SetLabel(state.range(0) == 0 ? "greedy" : state.range(0) == 1 ? "top_k 40, top_p 0.95" : "top_p 0.95");
}
BENCHMARK(draw)->DenseRange(0, 2)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace m3
