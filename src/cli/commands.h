// The commands of m3: one small file each. A command gets the words after its name and returns its
// exit code: 0 done, 1 failed. Wrong usage is thrown as UsageError and becomes 2.
#pragma once
#include <string>
#include <vector>

namespace m3::cli {

using Args = std::vector<std::string>;

int command_attention_map(const Args& args);
int command_bench(const Args& args);
int command_data(const Args& args);
int command_eval(const Args& args);
int command_init(const Args& args);
int command_inspect(const Args& args);
int command_plot(const Args& args);
int command_run(const Args& args);
int command_serve(const Args& args);  // absent in builds without Boost
int command_tokenize(const Args& args);
int command_train(const Args& args);
int command_verify(const Args& args);

struct Command {
  const char* name;
  const char* summary;
  int (*run)(const Args& args);
};

inline const std::vector<Command>& commands() {
  static const std::vector<Command> list = {
      {"run", "answer a prompt, or chat on a terminal", command_run},
#ifdef M3_SERVER
      {"serve", "serve a model over HTTP: OpenAI and Anthropic interfaces, web page", command_serve},
#endif
      {"inspect", "architecture, tensors, parameters and memory plan of a model", command_inspect},
      {"init", "write a randomly initialised checkpoint from a config", command_init},
      {"bench", "measure operators, whole models and a running server", command_bench},
      {"train", "train a model by a configuration, resumable", command_train},
      {"eval", "what a trained model can do, with chance beside it", command_eval},
      {"plot", "curves of training runs", command_plot},
      {"attention-map", "how much text attends to pictures, and where", command_attention_map},
      {"data", "make and check training data", command_data},
      {"tokenize", "text to token ids and back", command_tokenize},
      {"verify", "replay the goldens and report the measured errors", command_verify},
  };
  return list;
}

}  // namespace m3::cli
