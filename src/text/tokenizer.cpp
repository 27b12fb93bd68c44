#include "text/tokenizer.h"

#include <mutex>

#include "base/check.h"
#include "base/file.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/encode_cache.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace m3 {

namespace {

constexpr size_t kMaxTextBytes = INT32_MAX;  // positions inside a piece are 32 bits

}  // namespace

struct Tokenizer::Impl {
  Impl(TokenizerFile file, std::string file_name)
      : name(std::move(file_name)),
        pretokenizer(std::move(file.pretokenizer)),
        bpe(file.byte_ids, file.merges, std::move(file.whole)),
        flags(file.bytes.size()) {
    for (const AddedToken& token : file.added) {
      flags[static_cast<size_t>(token.id)] = token.special ? kAdded | kSpecial : kAdded;
      added_ids.emplace(token.content, token.id);
      (token.normalized ? second_pass : first_pass).add(token);
    }
    for (const std::string& bytes : file.bytes) {
      starts.push_back(text.size());
      text += bytes;
    }
    starts.push_back(text.size());
  }

  // Calls on_text(stretch) and on_token(token) in order.
  template <typename OnText, typename OnToken>
  void cut_added(std::string_view text, const EncodeOptions& options, OnText on_text, OnToken on_token) const {
    const size_t invalid = utf8_find_invalid(text);
    M3_CHECK(invalid == text.npos, "the text to encode is not valid UTF-8 at byte {}", invalid);
    if (!options.added_tokens) return on_text(text);
    std::vector<AddedTokenMatcher::Part> parts, rest;
    first_pass.cut(text, parts, options.plain);
    for (const auto& part : parts) {
      if (part.token != nullptr) {
        on_token(part);
        continue;
      }
      rest.clear();
      second_pass.cut(part.text, rest, options.plain, static_cast<size_t>(part.text.data() - text.data()));
      for (const auto& piece : rest) {
        if (piece.token != nullptr) {
          on_token(piece);
        } else {
          on_text(piece.text);
        }
      }
    }
  }

  std::unique_ptr<BpeScratch> take_scratch() {
    const std::lock_guard lock(mutex);
    if (idle_scratch.empty()) return std::make_unique<BpeScratch>();
    auto scratch = std::move(idle_scratch.back());
    idle_scratch.pop_back();
    return scratch;
  }
  void give_scratch(std::unique_ptr<BpeScratch> scratch) {
    const std::lock_guard lock(mutex);
    idle_scratch.push_back(std::move(scratch));
  }

  enum Flag : uint8_t { kAdded = 1, kSpecial = 2 };

  std::string name;
  std::unique_ptr<Pretokenizer> pretokenizer;
  Bpe bpe;
  AddedTokenMatcher first_pass, second_pass;
  std::unordered_map<std::string, int32_t> added_ids;
  std::string text;            // bytes of all tokens, one behind the other
  std::vector<size_t> starts;  // by id, and the end
  std::vector<uint8_t> flags;  // by id
  std::mutex mutex;            // guards idle_scratch
  std::vector<std::unique_ptr<BpeScratch>> idle_scratch;
};

Tokenizer::Tokenizer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Tokenizer::~Tokenizer() = default;
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  const auto file = std::filesystem::is_directory(path) ? path / "tokenizer.json" : path;
  constexpr uint64_t kMaxFileBytes = uint64_t{1} << 28;  // M3's is about 10 MB
  return from_json(read_file(file, kMaxFileBytes), file.string());
}

Tokenizer Tokenizer::from_json(std::string_view json, std::string_view name) {
  const std::string owned_name(name);
  return Tokenizer(std::make_unique<Impl>(read_tokenizer_json(json, owned_name), owned_name));
}

bool Tokenizer::can_encode() {
  return has_regex_library();
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  M3_CHECK(text.size() <= kMaxTextBytes, "the text to encode has {} bytes, want at most {}",
           text.size(), kMaxTextBytes);
  std::vector<int32_t> ids;
  auto scratch = impl_->take_scratch();
  const Pretokenizer::Sink sink = [&](std::string_view piece) {
    impl_->bpe.encode(piece, *scratch, ids);
  };
  const auto encode_stretch = [&](std::string_view stretch) {
    if (options.cache != nullptr && options.cache->find(stretch, ids)) return;
    const size_t first = ids.size();
    impl_->pretokenizer->cut(stretch, sink);
    if (options.cache != nullptr) options.cache->add(stretch, std::span(ids).subspan(first));
  };
  impl_->cut_added(
      text, options, encode_stretch,
      [&](const AddedTokenMatcher::Part& part) { ids.push_back(part.token->id); });
  impl_->give_scratch(std::move(scratch));
  return ids;
}

std::vector<std::string> Tokenizer::split(std::string_view text) const {
  std::vector<std::string> pieces;
  const Pretokenizer::Sink sink = [&](std::string_view piece) { pieces.emplace_back(piece); };
  impl_->cut_added(
      text, {}, [&](std::string_view stretch) { impl_->pretokenizer->cut(stretch, sink); },
      [&](const AddedTokenMatcher::Part& part) { pieces.emplace_back(part.text); });
  return pieces;
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  StreamDecoder decoder(*this, skip_special);
  std::string text;
  for (int32_t id : ids) text += decoder.push(id);
  return text + decoder.finish();
}

int32_t Tokenizer::size() const {
  return static_cast<int32_t>(impl_->flags.size());
}

std::string_view Tokenizer::bytes(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  const size_t start = impl_->starts[static_cast<size_t>(id)];
  return std::string_view(impl_->text)
      .substr(start, impl_->starts[static_cast<size_t>(id) + 1] - start);
}

bool Tokenizer::is_added(int32_t id) const {
  return id >= 0 && id < size() && (impl_->flags[static_cast<size_t>(id)] & Impl::kAdded) != 0;
}
bool Tokenizer::is_special(int32_t id) const {
  return id >= 0 && id < size() && (impl_->flags[static_cast<size_t>(id)] & Impl::kSpecial) != 0;
}

std::optional<int32_t> Tokenizer::added_id(std::string_view content) const {
  const auto at = impl_->added_ids.find(std::string(content));
  return at == impl_->added_ids.end() ? std::nullopt : std::optional(at->second);
}

int32_t Tokenizer::require_added_id(std::string_view content) const {
  const auto id = added_id(content);
  M3_CHECK(id.has_value(), "{}: no added token '{}', which the chat protocol needs", impl_->name,
           content);
  return *id;
}

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  return push_bytes(tokenizer_->bytes(id));
}

std::string StreamDecoder::push_bytes(std::string_view bytes) {
  std::string joined;
  if (!held_.empty()) {
    joined = held_ + std::string(bytes);
    bytes = joined;
    held_.clear();
  }
  std::string out;
  while (!bytes.empty()) {
    const Utf8Step step = utf8_step(bytes);
    if (step.kind == Utf8Kind::kIncomplete) {
      held_ = bytes;
      break;
    }
    out += step.kind == Utf8Kind::kValid ? bytes.substr(0, step.length) : kReplacementCharacter;
    bytes.remove_prefix(step.length);
  }
  return out;
}

std::string StreamDecoder::finish() {
  if (held_.empty()) return {};
  held_.clear();
  return std::string(kReplacementCharacter);
}

}  // namespace m3
