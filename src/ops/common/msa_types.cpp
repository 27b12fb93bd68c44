#include "ops/common/msa_types.h"

#include <cmath>

namespace m3 {

double MsaGeometry::logit_scale() const { return scale != 0 ? scale : 1.0 / std::sqrt(head_dim); }
double MsaGeometry::index_scale() const { return scale_x != 0 ? scale_x : 1.0 / std::sqrt(index_dim); }

void MsaGeometry::check() const {
  const auto in_range = [](const char* name, int value, int low, int high) {
    M3_CHECK(value >= low && value <= high, "MSA geometry: {} is {}, supported are {} to {}", name, value, low, high);
  };
  in_range("groups", groups, 1, 1024);
  in_range("heads_per_group", heads_per_group, 1, 1024);
  in_range("head_dim", head_dim, 1, 1024);
  in_range("index_dim", index_dim, 0, 1024);
  in_range("block", block, 1, 4096);
  in_range("topk", topk, 1, 128);
  in_range("local", local, 0, topk);
  in_range("init", init, 0, topk);
  M3_CHECK(local + init <= topk, "MSA geometry: local {} + init {} exceed topk {}", local, init, topk);
  M3_CHECK(std::isfinite(scale) && std::isfinite(scale_x), "MSA geometry: scale {} and scale_x {} must be finite",
           scale, scale_x);
}

MsaGeometry msa_geometry_m3() {
  return {.groups = 4, .heads_per_group = 16, .head_dim = 128, .index_dim = 128, .block = 128, .topk = 16};
}

void MsaBatch::check(int block) const {
  M3_CHECK(num_seqs >= 0 && num_queries >= 0, "batch: num_seqs {} and num_queries {} must not be negative", num_seqs,
           num_queries);
  if (num_seqs == 0) {
    M3_CHECK(num_queries == 0, "batch: {} query rows but no sequence", num_queries);
    return;
  }
  const bool paged = layout == KvLayout::kPaged;
  M3_CHECK(cu_q != nullptr && cu_q[0] == 0, "batch: cu_q is absent or does not start at 0");
  M3_CHECK(paged ? seq_lens != nullptr && page_table != nullptr : cu_k != nullptr, "batch: {} absent",
           paged ? "seq_lens or page_table" : "cu_k");
  M3_CHECK(!paged || lead == nullptr, "batch: fragments (lead) of a paged cache are not supported; pass packed keys");
  M3_CHECK(paged || cu_k[0] == 0, "batch: cu_k starts at {}, want 0", cu_k[0]);
  for (int n = 0; n < num_seqs; ++n) {
    M3_CHECK(q_len(n) >= 0, "batch: cu_q descends at sequence {}", n);
    M3_CHECK(paged || cu_k[n + 1] >= cu_k[n], "batch: cu_k descends at sequence {}", n);
    M3_CHECK(lead == nullptr || (lead[n] >= 0 && lead[n] <= n), "batch: lead[{}] is {}, want 0 to {}", n, lead[n], n);
    const int64_t keys = k_len(n);
    M3_CHECK(keys >= 0, "batch: sequence {} has {} keys", n, keys);
    M3_CHECK(keys == 0 || keys >= q_len(n), "batch: sequence {} has {} query rows but only {} keys", n, q_len(n), keys);
    M3_CHECK(!paged || keys <= max_pages * block, "batch: sequence {} has {} keys, its {} pages of {} hold fewer", n,
             keys, max_pages, block);
  }
  M3_CHECK(cu_q[num_seqs] == num_queries, "batch: cu_q ends at {}, num_queries is {}", cu_q[num_seqs], num_queries);
}

}  // namespace m3
