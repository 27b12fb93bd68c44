// The prefix cache of one process in a file, for the next one with the same model: K, V and index keys of each page, all
// lanes together, with the keys that lead to it.
//
//   "m3 cache pages 1\n", u64 bytes of the layout, the layout (EngineModel::page_layout)
//   branches, least recently used first: u64 keys, u64 first page; the keys; pages from the first on that no earlier
//   branch holds, each padded to 8 bytes; u64 checksum of all that
//
// Little endian. The layout names each lane, its type and the order of its axes; equal sizes prove nothing, so a file is
// taken only where the whole text is equal.
#pragma once
#include <filesystem>
#include <string>

#include "engine/engine_model.h"
#include "engine/page_cache.h"

namespace m3 {

// Writes the pages in memory (atomically); returns how many. Throws if the disk does not take them.
int64_t save_pages(const std::filesystem::path& path, const std::string& layout, EngineModel& model, const PageCache& cache);

// Adds the file's pages as far as the cache has room for them, the most recently used if not for all; returns how many of
// the cache's pages hold something then. Throws, naming the first line that differs, if the layout is another; and if the file
// is damaged: what was read before stays.
int64_t load_pages(const std::filesystem::path& path, const std::string& layout, EngineModel& model, PageCache& cache);

}  // namespace m3
