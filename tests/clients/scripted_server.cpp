// A server for the client tests: a small golden model behind the real protocol, with answers that a
// file may prescribe. Usage: scripted_server MODEL SCRIPT.json; prints its port, ends when stdin
// ends.
//
// SCRIPT.json: [{"when": "text of the rendered prompt", "answer":
// "<mm:think>...</mm:think>...[e~["}, ...]. The last entry whose text occurs in the prompt decides;
// without one the model speaks. Markers in answers are tokens.
#include <fmt/core.h>

#include <cstdio>

#include "base/file.h"
#include "engine/session.h"
#include "server/api_server.h"
#include "server/file_store.h"

namespace {

using namespace m3;

struct Line {
  std::string when;
  std::vector<int32_t> answer;
};

std::vector<Line> read_script(const std::string& path, const Tokenizer& tokenizer) {
  std::vector<Line> lines;
  const JsonValue script = JsonValue::parse(read_file(path), path);
  for (const JsonValue& item : script.items()) {
    lines.push_back({item.find("when")->text(), tokenizer.encode(item.find("answer")->text())});
  }
  return lines;
}

int run(const std::string& model, const std::string& script) {
  const Checkpoint checkpoint = Checkpoint::open(model);
  const Tokenizer tokenizer = Tokenizer::load(model);
  SessionOptions options;
  options.dtype = DType::kF32;
  options.longest_sequence = 65'536;
  options.context_tokens = 131'072;
  options.max_requests = 8;
  options.max_vision_patches = 4096;
  options.progress = Progress::Mode::kOff;
  Session session(checkpoint, tokenizer, options);
  EngineThread engine(session.engine());

  FileStore files(std::filesystem::temp_directory_path() / fmt::format("m3-files-{}", getpid()));
  ModelInfo info;
  info.id = "tiny";
  info.max_model_len = options.longest_sequence;
  info.num_ids = tokenizer.size();
  info.has_vision = true;
  info.files = &files;
  ApiServerOptions api;
  api.port = 0;
  api.api_keys = {"test-key"};
  const std::vector<Line> lines = read_script(script, tokenizer);
  api.script = [&](const std::string& prompt) -> std::optional<std::vector<int32_t>> {
    for (auto line = lines.rbegin(); line != lines.rend(); ++line) {
      if (prompt.find(line->when) != std::string::npos) return line->answer;
    }
    return std::nullopt;
  };
  ApiServer server(info, tokenizer, {tokenizer.require_added_id(chat_token::kTurnEnd)}, api);
  server.ready(engine);
  fmt::print("{}\n", server.port());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  server.shut_down(1);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print(stderr, "usage: scripted_server MODEL SCRIPT.json\n");
    return 2;
  }
  try {
    return run(argv[1], argv[2]);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 1;
  }
}
