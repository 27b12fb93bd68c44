#include "engine/page_file.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "base/file.h"
#include "engine/page_tier.h"

namespace m3 {

namespace {

constexpr std::string_view kMagic = "m3 cache pages 1\n";
using Head = std::array<uint64_t, 2>;  // of a branch: keys, first page

std::string_view chars(std::span<const uint64_t> words) {
  return {reinterpret_cast<const char*>(words.data()), words.size_bytes()};
}

std::span<std::byte> page_bytes(std::vector<uint64_t>& page, const EngineModel& model) {
  return {reinterpret_cast<std::byte*>(page.data()), static_cast<size_t>(model.sizes().page_bytes)};
}

std::vector<uint64_t> page_buffer(const EngineModel& model) { return std::vector<uint64_t>((model.sizes().page_bytes + 7) / 8); }

// Reads what a file says it holds, never more than it has.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path)
      : path_(path.string()), in_(path, std::ios::binary), left_(std::filesystem::file_size(path)) {
    M3_CHECK(in_, "{}: cannot open", path_);
  }
  uint64_t left() const { return left_; }
  void read(void* to, uint64_t bytes) {
    M3_CHECK(bytes <= left_, "{}: ends {} bytes too early", path_, bytes - left_);
    M3_CHECK(in_.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes)), "{}: cannot be read", path_);
    left_ -= bytes;
  }
  uint64_t read_word() {
    uint64_t word = 0;
    read(&word, sizeof word);
    return word;
  }
  std::string read_text(uint64_t bytes) {
    M3_CHECK(bytes <= left_, "{}: a text of {} bytes, {} are left", path_, bytes, left_);
    std::string text(bytes, '\0');
    read(text.data(), bytes);
    return text;
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::ifstream in_;
  uint64_t left_;
};

void check_layout(const Reader& reader, const std::string& file, const std::string& own) {
  if (file == own) return;
  const auto line_at = [](const std::string& text, size_t begin) { return text.substr(begin, text.find('\n', begin) - begin); };
  const auto differs = std::ranges::mismatch(file, own).in1 - file.begin();
  size_t begin = differs == 0 ? std::string::npos : file.rfind('\n', differs - 1);
  begin = begin == std::string::npos ? 0 : begin + 1;
  M3_FAIL("{}: its pages are of another kind: '{}', here '{}'", reader.path(), line_at(file, begin),
          begin < own.size() ? line_at(own, begin) : "");
}

void load_branch(Reader& reader, EngineModel& model, PageCache& cache, std::vector<uint64_t>& buffer) {
  Head head;
  reader.read(head.data(), sizeof head);
  const auto [num_keys, first] = head;
  M3_CHECK(num_keys > 0 && num_keys <= reader.left() / sizeof(uint64_t), "{}: a branch of {} keys in {} bytes", reader.path(),
           num_keys, reader.left());
  std::vector<PageCache::Key> keys(num_keys);
  reader.read(keys.data(), num_keys * sizeof(uint64_t));
  uint64_t sum = page_checksum(page_checksum(0, head), keys);

  PageCache::Pages pages;
  const int64_t known = cache.attach(pages, keys, [&](int32_t from, int32_t to) { model.copy_page(from, to); });
  const int64_t num_pages = cache.pages_for(static_cast<int64_t>(num_keys));
  const bool fits = known >= static_cast<int64_t>(first) * cache.page_tokens() && cache.grow(pages, static_cast<int64_t>(num_keys));
  const size_t shared = pages.nodes.size();
  try {
    for (auto i = static_cast<int64_t>(first); i < num_pages; ++i) {
      reader.read(buffer.data(), buffer.size() * sizeof(uint64_t));
      sum = page_checksum(sum, buffer);
      if (fits && i >= static_cast<int64_t>(shared)) model.write_page(pages.ids[i], page_bytes(buffer, model));
    }
    M3_CHECK(reader.read_word() == sum, "{}: damaged", reader.path());
  } catch (...) {
    cache.release(pages, std::span(keys).first(shared * cache.page_tokens()));
    throw;
  }
  cache.release(pages, std::span(keys).first(fits ? num_keys : shared * cache.page_tokens()));
}

}  // namespace

int64_t save_pages(const std::filesystem::path& path, const std::string& layout, EngineModel& model, const PageCache& cache) {
  AtomicFile file(path, AtomicFile::Readers::kOwner);  // prompts can be read out of keys and values
  file.write(kMagic);
  const uint64_t layout_bytes = layout.size();
  file.write(chars({&layout_bytes, 1}));
  file.write(layout);
  std::set<int32_t> written;
  std::vector<uint64_t> buffer = page_buffer(model);
  cache.for_each_branch([&](std::span<const PageCache::Key> keys, std::span<const int32_t> pages) {
    Head head = {keys.size(), 0};
    while (head[1] < pages.size() && written.contains(pages[head[1]])) ++head[1];
    uint64_t sum = page_checksum(page_checksum(0, head), keys);
    file.write(chars(head));
    file.write(chars(keys));
    for (const int32_t page : pages.subspan(head[1])) {
      model.read_page(page, page_bytes(buffer, model));
      sum = page_checksum(sum, buffer);
      file.write(chars(buffer));
      written.insert(page);
    }
    file.write(chars({&sum, 1}));
  });
  file.commit();
  return static_cast<int64_t>(written.size());
}

int64_t load_pages(const std::filesystem::path& path, const std::string& layout, EngineModel& model, PageCache& cache) {
  Reader reader(path);
  M3_CHECK(reader.left() >= kMagic.size() && reader.read_text(kMagic.size()) == kMagic, "{}: no file of cache pages", path.string());
  check_layout(reader, reader.read_text(reader.read_word()), layout);
  std::vector<uint64_t> buffer = page_buffer(model);
  while (reader.left() > 0) load_branch(reader, model, cache, buffer);
  return cache.num_idle();
}

}  // namespace m3
