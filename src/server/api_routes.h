// The table of paths, and the small endpoints that need neither an engine request nor a stream.
#pragma once
#include <span>
#include <string>
#include <string_view>

#include "server/api_request.h"
#include "server/api_server.h"

namespace m3 {

enum class RouteKind : uint8_t {
  kPage,
  kHealth,
  kVersion,
  kMetrics,
  kModels,
  kRequests,
  kProps,
  kFiles,
  kTokenize,
  kDetokenize,
  kTemplate,
  kCountMessages,
  kCountResponses,
  kChat,
  kCompletions,
  kResponses,
  kMessages,
};

struct Route {
  const char* path;
  RouteKind what;
  const char* methods;    // "GET, POST"
  bool open = false;      // needs no key
  bool has_tail = false;  // path/ID belongs to it too
  // Length of the part of `request_path` that names the route, the slash before a tail included.
  size_t matched(std::string_view request_path) const;
};

const Route* find_route(std::string_view path);  // null pointer: none

JsonValue models_json(const ModelInfo& info, const std::string& id);  // id empty: the list
JsonValue requests_json(std::span<const RequestInfo> requests);
JsonValue props_json(const ModelInfo& info, const ApiServerOptions& options,
                     const EngineThread& engine);
JsonValue files_json(const ModelInfo& info, const HttpRequest& request, const std::string& id);

// {prompt | content | messages, ...}: a plain prompt or a conversation.
ApiRequest read_tokenize_request(const JsonValue& body, const ModelInfo& info);
JsonValue tokenize_json(const ApiRequest& request, const std::vector<int32_t>& ids,
                        const Tokenizer& tokenizer, const ModelInfo& info);
JsonValue detokenize_json(const JsonValue& body, const Tokenizer& tokenizer, const ModelInfo& info);

}  // namespace m3
