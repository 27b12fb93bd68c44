// A second place for the contents of cache pages: when a page that nobody holds makes room, its contents go there, all
// lanes together, and come back on a hit as the same bits. Which slot holds what, the page cache knows (page_cache.h).
//
// FilePageTier keeps them in one file. A model on a GPU would put host memory behind the same interface.
#pragma once
#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "engine/engine_model.h"

namespace m3 {

// Of what is stored elsewhere. Any single changed word changes it.
uint64_t page_checksum(uint64_t seed, std::span<const uint64_t> words);

class PageTier {
 public:
  virtual ~PageTier() = default;
  virtual int64_t num_slots() const = 0;
  // false: the slot holds nothing. A full disk is no error of a request.
  virtual bool store(int32_t page, int32_t slot) = 0;
  // false: the slot cannot be read or does not hold what was stored; the page then holds anything.
  virtual bool load(int32_t slot, int32_t page) = 0;
};

// The file has no name: it goes with the process, however that ends, and nobody else opens it. It grows as slots are
// used, to at most max_bytes. Reads and writes are made by the calling thread; the system's file cache makes most of
// them copies in memory.
class FilePageTier : public PageTier {
 public:
  // Creates the folder if need be. Throws, naming it, if it takes no files, and if max_bytes hold no page.
  // The model must outlive the tier.
  FilePageTier(EngineModel& model, const std::filesystem::path& folder, int64_t max_bytes);
  ~FilePageTier() override;
  FilePageTier(const FilePageTier&) = delete;
  FilePageTier& operator=(const FilePageTier&) = delete;

  int64_t num_slots() const override { return static_cast<int64_t>(checksums_.size()); }
  bool store(int32_t page, int32_t slot) override;
  bool load(int32_t slot, int32_t page) override;

 private:
  void warn(const char* action);

  EngineModel& model_;
  std::string folder_;
  int64_t page_bytes_;
  int fd_ = -1;
  std::vector<uint64_t> buffer_;     // one page, as words
  std::vector<uint64_t> checksums_;  // of each slot
  bool warned_ = false;
};

}  // namespace m3
