// m3 run: answers a prompt, or chats on a terminal. The answer goes to stdout as it comes; reasoning, progress
// and measurements go to stderr.
#include <fmt/core.h>
#include <unistd.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <random>

#include "base/file.h"
#include "base/threads.h"
#include "cli/commands.h"
#include "cli/line_editor.h"
#include "cli/options.h"
#include "engine/chat_prompt.h"
#include "engine/session.h"
#include "text/output_parser.h"
#include "text/utf8.h"

namespace m3::cli {

namespace {

using nlohmann::ordered_json;

volatile std::sig_atomic_t interrupted = 0;

// The first Ctrl-C ends the answer, a second one the program.
class InterruptScope {
 public:
  InterruptScope() {
    interrupted = 0;
    previous_ = std::signal(SIGINT, [](int) {
      interrupted = 1;
      std::signal(SIGINT, SIG_DFL);
    });
  }
  ~InterruptScope() { std::signal(SIGINT, previous_); }
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

 private:
  void (*previous_)(int);
};

struct RunFlags {
  std::string model, dtype = "bf16", attention = "msa", thinking = "adaptive";
  std::optional<std::string> prompt, system;
  std::vector<std::string> images, videos, files;
  std::optional<double> temperature, top_p;
  std::optional<int64_t> top_k, seed, context;
  int64_t max_tokens = 1024, chunk = SessionOptions::kDefaultStepTokens;
  int threads = 0;
  bool json = false;
};

RunFlags parse(const Args& args) {
  RunFlags flags;
  Options options("run",
                  "Answers a prompt with a model, or chats on a terminal if no prompt is given. The answer is written to "
                  "stdout as it comes; reasoning, progress and speed to stderr. Ctrl-C ends an answer early.\n\n"
                  "--attention replaces the block-sparse attention of the layers that have it, for comparisons; the "
                  "model was not trained for the replacements. full: all keys. window: the first block and the newest "
                  "tokens, as many as msa reads. dsa: one list of so many single tokens for all heads, chosen by the "
                  "model's own index heads with equal weights.",
                  "m3 run tests/golden/models/tiny-vl -p 'What is this?' --image photo.jpg --max-tokens 64");
  options.positional("MODEL", flags.model, "checkpoint folder with tokenizer.json");
  options.add("-p,--prompt", flags.prompt, "what to answer; without it: chat on a terminal, or the text on stdin");
  options.add("--system", flags.system, "system prompt");
  options.add("--image", flags.images, "picture shown before the prompt (repeatable)");
  options.add("--video", flags.videos, "film shown before the prompt (repeatable)");
  options.add("--file", flags.files, "text file shown as a document before the prompt (repeatable)");
  options.choice("--thinking", flags.thinking, {"enabled", "disabled", "adaptive"}, "whether the model thinks first");
  options.add("--temperature", flags.temperature, "0: always the likeliest token (default: generation_config.json, 1)");
  options.add("--top-p", flags.top_p, "smallest set of tokens with this probability (default: the same file, 0.95)");
  options.add("--top-k", flags.top_k, "so many likeliest tokens, 0: all (default: the same file, 40)");
  options.add("--seed", flags.seed, "of sampling (default: random)");
  options.add("--max-tokens", flags.max_tokens, "most tokens of an answer");
  options.add("--context", flags.context, "most tokens of prompt and answer (default: what is needed; chat: 32768)");
  options.choice("--attention", flags.attention, {"msa", "full", "window", "dsa"}, "see above");
  options.choice("--dtype", flags.dtype, {"bf16", "f32"}, "arithmetic and cache");
  options.add("--chunk", flags.chunk, "prompt tokens computed at a time");
  options.threads(flags.threads);
  options.flag("--json", flags.json, "one JSON object on stdout instead of text");
  options.parse(args);
  if (flags.max_tokens < 1) throw UsageError{"--max-tokens must be at least 1"};
  if (flags.chunk < 1) throw UsageError{"--chunk must be at least 1"};
  if (flags.context && *flags.context < 2) throw UsageError{"--context must be at least 2"};
  if (flags.temperature && !(*flags.temperature >= 0)) throw UsageError{"--temperature must be 0 or more"};
  if (flags.top_p && !(*flags.top_p > 0 && *flags.top_p <= 1)) throw UsageError{"--top-p must be above 0, at most 1"};
  if (flags.top_k && (*flags.top_k < 0 || *flags.top_k > INT32_MAX)) {
    throw UsageError{fmt::format("--top-k must be between 0 and {}", INT32_MAX)};
  }
  if (flags.seed && *flags.seed < 0) throw UsageError{"--seed must be 0 or more"};
  return flags;
}

AttentionMode attention_of(const std::string& name) {
  for (const AttentionMode mode : {AttentionMode::kMsa, AttentionMode::kFull, AttentionMode::kWindow}) {
    if (name == attention_mode_name(mode)) return mode;
  }
  return AttentionMode::kDsa;
}

SamplingParams sampling_of(const RunFlags& flags, const GenerationConfig& defaults) {
  SamplingParams sampling;
  sampling.temperature = static_cast<float>(flags.temperature.value_or(defaults.do_sample ? defaults.temperature : 0));
  sampling.top_p = static_cast<float>(flags.top_p.value_or(defaults.top_p));
  sampling.top_k = static_cast<int>(flags.top_k.value_or(defaults.top_k));
  sampling.seed = flags.seed ? static_cast<uint64_t>(*flags.seed) : std::random_device{}();
  return sampling;
}

// Told here, where the byte is one of the user's own text.
void check_text(const std::string& name, const std::string& text) {
  const size_t invalid = utf8_find_invalid(text);
  M3_CHECK(invalid == text.npos, "{}: not valid UTF-8 at byte {}", name, invalid);
}

std::string document(const std::string& path) {
  const std::string text = read_file(path);
  check_text(path, text);
  return fmt::format("Document {}:\n{}\n\n", std::filesystem::path(path).filename().string(), text);
}

// One answer: where its pieces go while they come, and what is left at the end.
struct Answer {
  ParsedOutput parsed;
  FinishReason reason = FinishReason::kStop;
  std::string error;  // of FinishReason::kFailed
  GenerationTimings timings;
};

class Runner {
 public:
  explicit Runner(RunFlags flags)
      : flags_(std::move(flags)),
        checkpoint_(Checkpoint::open(flags_.model)),
        tokenizer_(Tokenizer::load(flags_.model)),
        sampling_(sampling_of(flags_, checkpoint_.generation())) {
    for (const int id : checkpoint_.generation().eos_token_ids) stop_ids_.push_back(id);
    if (const auto id = tokenizer_.added_id(chat_token::kTurnEnd)) stop_ids_.push_back(*id);
    if (flags_.system) {
      check_text("the system prompt", *flags_.system);
      messages_.push_back({.role = "system", .content = {ContentPart::of_text(*flags_.system)}});
    }
  }

  int one_shot(const std::string& prompt);
  int chat();

 private:
  void add_user_turn(const std::string& text);
  ChatPrompt build() const;
  void open(int64_t context, int64_t vision_patches, int64_t total_patches);
  Answer answer(const ChatPrompt& prompt);
  void show(const OutputEvent& event);
  void print_measurements(const Answer& answer) const;
  void print_json(const Answer& answer) const;
  Progress::Mode progress() const { return flags_.json ? Progress::Mode::kOff : Progress::Mode::kAuto; }

  RunFlags flags_;
  Checkpoint checkpoint_;
  Tokenizer tokenizer_;
  SamplingParams sampling_;
  std::vector<int32_t> stop_ids_;
  std::unique_ptr<Session> session_;
  std::vector<Message> messages_;
  std::vector<ChatMedia> media_;
  bool in_reasoning_ = false;
};

// Pictures and films first, then the documents; the question comes last, as models are trained to read it.
void Runner::add_user_turn(const std::string& text) {
  check_text("the prompt", text);
  Message message{.role = "user"};
  const bool has_tower = checkpoint_.config().vision.has_value();
  M3_CHECK(has_tower || (flags_.images.empty() && flags_.videos.empty()),
           "{} has no vision tower: it cannot take --image or --video", flags_.model);
  for (const std::string& path : flags_.images) {
    media_.push_back(chat_image(preprocess_image_file(path)));
    message.content.push_back(ContentPart::image());
  }
  for (const std::string& path : flags_.videos) {
    media_.push_back(chat_video(preprocess_video_file(path)));
    message.content.push_back(ContentPart::video());
  }
  std::string whole;
  for (const std::string& path : flags_.files) whole += document(path);
  whole += text;
  message.content.push_back(ContentPart::of_text(std::move(whole)));
  messages_.push_back(std::move(message));
  flags_.images.clear();
  flags_.videos.clear();
  flags_.files.clear();
}

ChatPrompt Runner::build() const {
  RenderOptions options;
  options.thinking_mode = flags_.thinking;
  return build_chat_prompt(tokenizer_, messages_, {}, options, media_);
}

void Runner::open(int64_t context, int64_t vision_patches, int64_t total_patches) {
  const int64_t limit = checkpoint_.config().text.max_position_embeddings;
  M3_CHECK(context <= limit, "a context of {} tokens is asked for, the model has positions for {}", context, limit);
  SessionOptions options;
  options.dtype = flags_.dtype == "f32" ? DType::kF32 : DType::kBF16;
  options.attention = attention_of(flags_.attention);
  options.context_tokens = context;
  options.max_step_tokens = std::min(flags_.chunk, context);
  options.max_vision_patches = vision_patches;
  options.total_patches = total_patches;
  options.progress = progress();
  session_ = std::make_unique<Session>(checkpoint_, tokenizer_, options);
  if (flags_.json) return;
  if (options.attention != AttentionMode::kMsa) {
    fmt::print(stderr, "attention: {} instead of the model's own in {} of {} layers\n", flags_.attention,
               checkpoint_.config().text.num_sparse_layers(), checkpoint_.config().text.num_layers);
  }
  fmt::print(stderr, "memory plan\n{}", session_->plan().str());
}

void Runner::show(const OutputEvent& event) {
  if (flags_.json) return;
  const bool styled = ::isatty(STDERR_FILENO) != 0;
  const bool reasoning = event.kind == OutputEvent::Kind::kReasoning;
  if (reasoning != in_reasoning_) {
    if (styled) fmt::print(stderr, "{}", reasoning ? "\033[2m" : "\033[0m\n\n");
    in_reasoning_ = reasoning;
  }
  switch (event.kind) {
    case OutputEvent::Kind::kReasoning: fmt::print(stderr, "{}", event.text); break;
    case OutputEvent::Kind::kContent:
    case OutputEvent::Kind::kCallArguments: fmt::print("{}", event.text); break;
    case OutputEvent::Kind::kCallBegin: fmt::print("\n{} ", event.text); break;
    case OutputEvent::Kind::kCallEnd: fmt::print("\n"); break;
  }
  std::fflush(reasoning ? stderr : stdout);
}

Answer Runner::answer(const ChatPrompt& prompt) {
  GenerationRequest request;
  request.prompt = prompt.ids;
  for (const ChatMedia& media : media_) request.media.push_back(media.input);
  request.sampling = sampling_;
  request.max_tokens = flags_.max_tokens;
  request.stop_ids = stop_ids_;

  Answer answer;
  std::vector<OutputEvent> events;
  TokenOutputParser parser(tokenizer_, {}, prompt.text);
  auto flush = [&] {
    for (const OutputEvent& event : events) show(event);
    events.clear();
  };
  Progress progress("prefill", static_cast<int64_t>(prompt.ids.size()), "tok", this->progress());
  const InterruptScope interrupt;
  const RequestId id = session_->engine().submit(std::move(request), [&](const GenerationEvent& event) {
    switch (event.kind) {
      case GenerationEvent::Kind::kPrefill: progress.update(event.prompt_done); break;
      case GenerationEvent::Kind::kToken:
        progress.finish();
        parser.push(event.token, events);
        flush();
        break;
      case GenerationEvent::Kind::kFinish:
        answer.reason = event.reason;
        answer.error = event.error;
        answer.timings = event.timings;
        break;
    }
  });
  while (session_->engine().step()) {
    if (interrupted) session_->engine().cancel(id);
  }
  parser.finish(events);
  flush();
  answer.parsed = parser.result();
  if (in_reasoning_) show({OutputEvent::Kind::kContent, -1, ""});  // ends the style
  return answer;
}

void Runner::print_measurements(const Answer& answer) const {
  const GenerationTimings& t = answer.timings;
  fmt::print("\n");
  std::fflush(stdout);
  fmt::print(stderr, "prompt {} tokens, {:.1f} tok/s | answer {} tokens, {:.1f} tok/s | {} | peak memory {} of {} planned\n",
             t.prompt_tokens, t.prefill_rate(), t.answer_tokens, t.decode_rate(), finish_reason_name(answer.reason),
             format_bytes(static_cast<double>(peak_resident_bytes())),
             format_bytes(static_cast<double>(session_->plan().total_bytes())));
}

void Runner::print_json(const Answer& answer) const {
  const GenerationTimings& t = answer.timings;
  ordered_json calls = ordered_json::array();
  for (const ToolCall& call : answer.parsed.tool_calls) {
    calls.push_back({{"name", call.name}, {"arguments", ordered_json::parse(call.arguments.dump())}});
  }
  ordered_json plan = ordered_json::object();
  for (const auto& entry : session_->plan().entries()) plan[entry.name] = entry.bytes;
  const ordered_json document = {
      {"text", answer.parsed.content.value_or("")},
      {"reasoning", answer.parsed.reasoning ? ordered_json(*answer.parsed.reasoning) : ordered_json()},
      {"tool_calls", calls},
      {"prompt_tokens", t.prompt_tokens},
      {"generated_tokens", t.answer_tokens},
      {"finish_reason", finish_reason_name(answer.reason)},
      {"seed", sampling_.seed},
      {"timings",
       {{"load_seconds", session_->load_seconds()},
        {"media_seconds", t.media_seconds},
        {"prefill_seconds", t.prefill_seconds},
        {"prefill_tokens_per_second", t.prefill_rate()},
        {"decode_seconds", t.decode_seconds},
        {"decode_tokens_per_second", t.decode_rate()}}},
      {"memory",
       {{"plan", plan}, {"plan_bytes", session_->plan().total_bytes()}, {"peak_bytes", peak_resident_bytes()}}}};
  fmt::print("{}\n", document.dump(1, ' ', false, ordered_json::error_handler_t::replace));
}

int Runner::one_shot(const std::string& text) {
  add_user_turn(text);
  const ChatPrompt prompt = build();
  const auto prompt_tokens = static_cast<int64_t>(prompt.ids.size());
  const int64_t limit = flags_.context.value_or(checkpoint_.config().text.max_position_embeddings);
  M3_CHECK(prompt_tokens < limit, "the prompt has {} tokens and the answer needs at least one, the context holds {}{}",
           prompt_tokens, limit, flags_.context ? " (--context)" : " (the model's limit)");
  int64_t vision_patches = 0, total_patches = 0;
  for (const ChatMedia& media : media_) {
    total_patches += media.input.grid.num_patches();
    vision_patches = std::max(vision_patches, vision_pass_patches(*checkpoint_.config().vision, media.input.grid));
  }
  open(prompt_tokens + std::min(limit - prompt_tokens, flags_.max_tokens), vision_patches, total_patches);
  const Answer result = answer(prompt);
  if (flags_.json) {
    print_json(result);
  } else {
    print_measurements(result);
  }
  M3_CHECK(result.reason != FinishReason::kFailed, "the answer failed: {}", result.error);
  return 0;
}

int Runner::chat() {
  constexpr int64_t kChatContext = 32768;
  const int64_t limit = checkpoint_.config().text.max_position_embeddings;
  // Room for the largest segment of a film; memory that no film touches is not taken.
  const int64_t vision_patches =
      checkpoint_.config().vision
          ? checkpoint_.config().vision->segment_max_frames * (kVideoBounds.max_pixels / (kPatchSize * kPatchSize))
          : 0;
  open(flags_.context.value_or(std::min(kChatContext, limit)), vision_patches, 0);
  fmt::print(stderr, "Chat with {}. /image F, /video F and /file F add to the next message, /clear forgets, "
                     "/exit or Ctrl-D ends.\n", flags_.model);
  LineEditor editor;
  while (const auto line = editor.read("> ")) {
    const size_t space = line->find(' ');
    const std::string word = line->substr(0, space), rest = space == std::string::npos ? "" : line->substr(space + 1);
    if (line->empty()) continue;
    if (word == "/exit" || word == "/quit") break;
    if (word == "/image") {
      flags_.images.push_back(rest);
    } else if (word == "/video") {
      flags_.videos.push_back(rest);
    } else if (word == "/file") {
      flags_.files.push_back(rest);
    } else if (word == "/clear") {
      std::erase_if(messages_, [](const Message& message) { return message.role != "system"; });
      media_.clear();
    } else {
      const size_t num_messages = messages_.size(), num_media = media_.size();
      try {
        add_user_turn(*line);
        const Answer result = answer(build());
        print_measurements(result);
        M3_CHECK(result.reason != FinishReason::kFailed, "the answer failed: {}", result.error);
        Message reply{.role = "assistant", .reasoning = result.parsed.reasoning, .tool_calls = result.parsed.tool_calls};
        if (result.parsed.content) reply.content.push_back(ContentPart::of_text(*result.parsed.content));
        messages_.push_back(std::move(reply));
      } catch (const Error& error) {  // a missing file or a full context must not end the conversation
        fmt::print(stderr, "{}\n", error.what());
        messages_.resize(num_messages);
        media_.resize(num_media);
        flags_.images.clear();
        flags_.videos.clear();
        flags_.files.clear();
      }
    }
  }
  return 0;
}

}  // namespace

int command_run(const Args& args) {
  const RunFlags flags = parse(args);
  set_num_threads(flags.threads);
  const bool terminal = ::isatty(STDIN_FILENO) != 0;
  if (!flags.prompt && terminal && flags.json) throw UsageError{"--json needs a prompt (-p)"};
  Runner runner(flags);
  if (flags.prompt) return runner.one_shot(*flags.prompt);
  return terminal ? runner.chat() : runner.one_shot(read_stdin());
}

}  // namespace m3::cli
