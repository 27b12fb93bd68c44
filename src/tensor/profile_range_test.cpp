// What a profiler sees. The test is one: at the first range NVTX calls the tool at its pointer for tools that are linked
// in, which gets the table of functions and puts its own there. No GPU is needed.
#if M3_CUDA
#include "tensor/profile_range.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace {

std::vector<std::string> events;

int push(const char* name) {
  events.push_back(std::string("begin ") + name);
  return 0;
}

int pop() {
  events.push_back("end");
  return 0;
}

int attach(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (callbacks == nullptr || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  if (size <= NVTX_CBID_CORE_RangePop) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

}  // namespace

TEST(ProfileRange, ranges_nest_and_end_with_their_scopes) {
  InitializeInjectionNvtx2_fnptr = attach;
  {
    const m3::ProfileRange outer("attend");
    const m3::ProfileRange inner("plan");
  }
  EXPECT_EQ(events, (std::vector<std::string>{"begin attend", "begin plan", "end", "end"}));
}
#endif
