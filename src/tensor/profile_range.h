// A named range on the timeline of a profiler (NVTX; Nsight Systems shows it): from here to the end of the scope, on the
// calling thread. It spans the launches of an operation, not their work on the device. Without a profiler it costs a
// load and a branch.
//   const ProfileRange range("attend");
// Only included where CUDA headers are: NVTX is headers of the toolkit.
#pragma once
#include <nvtx3/nvToolsExt.h>

namespace m3 {

class ProfileRange {
 public:
  explicit ProfileRange(const char* name) { nvtxRangePushA(name); }
  ~ProfileRange() { nvtxRangePop(); }
  ProfileRange(const ProfileRange&) = delete;
  ProfileRange& operator=(const ProfileRange&) = delete;
};

}  // namespace m3
