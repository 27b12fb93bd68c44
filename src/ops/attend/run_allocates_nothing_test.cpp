// plan may allocate, run must not (msa.md §6): this file replaces the allocator of its test program by one that counts.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "base/threads.h"
#include "ops/attend/attend.h"
#include "ops/cache_append/cache_append.h"
#include "ops/common/msa_test_data.h"
#include "ops/dsa_select/dsa_select.h"
#include "ops/index_select/index_select.h"

namespace {
std::atomic<int64_t> num_allocations = 0;
}

// Not inlined: a compiler that sees free() behind delete, but not malloc() behind new, warns of a mismatch.
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++num_allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {  // of std::stable_sort
  ++num_allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace m3 {
namespace {

using namespace msa_test;

TEST(RunAllocatesNothing, index_select_attend_dsa_select_and_cache_append) {
  const MsaGeometry g{.groups = 2, .heads_per_group = 2, .head_dim = 32, .index_dim = 16, .block = 16, .topk = 4};
  const Data d = make_data(g, {{100, 150}, {2, 300}, {3, 0}}, DType::kBF16, 1);
  Buffer ids(DType::kI32, {2, d.T(), 4}), o(DType::kF32, {d.T(), 4, 32}), tokens(DType::kI32, {d.T(), 20});
  Buffer qx(DType::kBF16, {d.T(), 6, 16}), wx(DType::kF32, {d.T(), 6}), kv(DType::kBF16, {d.T(), 2, 32}), ki(DType::kBF16, {d.T(), 16});
  for (int threads : {1, 3}) {
    set_num_threads(threads);
    const IndexSelectPlan select_plan = index_select_plan(g, d.paged(), {});
    const AttendPlan blocks_plan = attend_plan(g, d.paged(), {});
    const AttendPlan full_plan = attend_plan(g, d.paged(), {.support = AttendSupport::full()});
    const DsaSelectPlan dsa_plan = dsa_select_plan({.heads = 6, .index_dim = 16, .block = 16, .budget = 20}, d.paged());
    const Workspace select_space(select_plan.workspace_bytes), blocks_space(blocks_plan.workspace_bytes),
        full_space(full_plan.workspace_bytes), dsa_space(dsa_plan.workspace_bytes);
    const MsaBatch batch = d.paged();
    const auto run = [&] {
      cache_append(batch, kv.tensor(), kv.tensor(), ki.tensor(), d.k_pages.tensor(), d.v_pages.tensor(), d.x_pages.tensor());
      index_select(select_plan, batch, d.qi.tensor(), d.x_pages.tensor(), ids.tensor(), {}, select_space.get());
      attend(blocks_plan, batch, d.q.tensor(), d.k_pages.tensor(), d.v_pages.tensor(), ids.tensor(), o.tensor(), {}, blocks_space.get());
      attend(full_plan, batch, d.q.tensor(), d.k_pages.tensor(), d.v_pages.tensor(), {}, o.tensor(), {}, full_space.get());
      dsa_select(dsa_plan, batch, qx.tensor(), d.x_pages.tensor(), wx.tensor(), tokens.tensor(), dsa_space.get());
    };
    run();  // the thread pool may start
    const int64_t before = num_allocations;
    run();
    EXPECT_EQ(num_allocations - before, 0) << threads << " threads";
  }
  set_num_threads(0);
}

}  // namespace
}  // namespace m3
