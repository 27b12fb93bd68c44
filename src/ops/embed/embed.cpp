#include "ops/embed/embed.h"

#include <algorithm>
#include <vector>

#include "ops/common/checks.h"
#include "ops/common/rows.h"
#include "ops/common/values.h"

namespace m3 {
namespace {

// to[to_rows[n]] = from[from_rows[n]]; null rows mean n itself.
void copy_rows(const Tensor& from_NC, const int32_t* from_rows, const Tensor& to_NC,
               const int32_t* to_rows, int64_t count) {
  const int64_t C = from_NC.dim(1);
  with_float(from_NC, [&](const auto* from) {
    mutable_float(to_NC, [&](auto* to) {
      parallel_rows(count, C, [&](int64_t begin, int64_t end) {
        for (int64_t n = begin; n < end; ++n) {
          const auto* source = from + (from_rows ? from_rows[n] : n) * C;
          auto* target = to + (to_rows ? to_rows[n] : n) * C;
          for (int64_t c = 0; c < C; ++c) round_to(to_float(source[c]), target + c);
        }
      });
    });
  });
}

const int32_t* checked_rows(const char* name, const Tensor& rows_N, int64_t limit) {
  const int32_t* rows = rows_N.ptr<int32_t>();
  for (int64_t n = 0; n < rows_N.numel(); ++n) {
    M3_CHECK(0 <= rows[n] && rows[n] < limit, "{}[{}] is {}, want 0 to {}", name, n, rows[n],
             limit - 1);
  }
  return rows;
}

}  // namespace

void embed(const Tensor& ids_T, const Tensor& table_VC, const Tensor& y_TC, Stream) {
  M3_CHECK(table_VC.rank() == 2, "table_VC must be [V, C], got {}", table_VC.shape().str());
  check_float("table_VC", table_VC);
  check_float("y_TC", y_TC, {ids_T.numel(), table_VC.dim(1)});
  copy_rows(table_VC, checked_rows("ids_T", ids_T, table_VC.dim(0)), y_TC, nullptr, ids_T.numel());
}

void embed_replace(const Tensor& rows_N, const Tensor& features_NC, const Tensor& x_TC, Stream) {
  M3_CHECK(x_TC.rank() == 2, "x_TC must be [T, C], got {}", x_TC.shape().str());
  check_float("x_TC", x_TC);
  check_float("features_NC", features_NC, {rows_N.numel(), x_TC.dim(1)});
  copy_rows(features_NC, nullptr, x_TC, checked_rows("rows_N", rows_N, x_TC.dim(0)),
            rows_N.numel());
}

void gather_rows(const Tensor& rows_N, const Tensor& x_TC, const Tensor& y_NC, Stream) {
  M3_CHECK(x_TC.rank() == 2, "x_TC must be [T, C], got {}", x_TC.shape().str());
  check_float("x_TC", x_TC);
  check_float("y_NC", y_NC, {rows_N.numel(), x_TC.dim(1)});
  copy_rows(x_TC, checked_rows("rows_N", rows_N, x_TC.dim(0)), y_NC, nullptr, rows_N.numel());
}

void embed_backward(const Tensor& ids_T, const Tensor& skip_T, const Tensor& dy_TC,
                    const Tensor& dtable_VC, Stream) {
  M3_CHECK(dtable_VC.rank() == 2, "dtable_VC must be [V, C], got {}", dtable_VC.shape().str());
  const int64_t T = ids_T.numel(), C = dtable_VC.dim(1);
  check_float("dy_TC", dy_TC, {T, C});
  if (skip_T.defined()) check_shape("skip_T", skip_T, {T});
  const int32_t* ids = checked_rows("ids_T", ids_T, dtable_VC.dim(0));
  const uint8_t* skip = skip_T.defined() ? skip_T.ptr<uint8_t>() : nullptr;
  std::vector<int64_t> tokens;
  for (int64_t t = 0; t < T; ++t) {
    if (skip == nullptr || skip[t] == 0) tokens.push_back(t);
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  float* dtable = dtable_VC.ptr<float>();
  with_float(dy_TC, [&](const auto* dy) {
    parallel_rows(C, static_cast<int64_t>(tokens.size()),
                  [&](int64_t begin, int64_t end) {  // columns: no two threads
                    for (int64_t t : tokens) {       // meet in one element
                      float* row = dtable + int64_t{ids[t]} * C;
                      for (int64_t c = begin; c < end; ++c) row[c] += to_float(dy[t * C + c]);
                    }
                  });
  });
}

void embed_backward_ref(const Tensor& ids_T, const Tensor& skip_T, const Tensor& dy_TC,
                        const Tensor& dtable_VC) {
  const int64_t C = dtable_VC.dim(1);
  for (int64_t t = 0; t < ids_T.numel(); ++t) {
    if (skip_T.defined() && skip_T.ptr<uint8_t>()[t] != 0) continue;
    for (int64_t c = 0; c < C; ++c) {
      const int64_t at = ids_T.ptr<int32_t>()[t] * C + c;
      set_value(dtable_VC, at, value_at(dtable_VC, at) + value_at(dy_TC, t * C + c));
    }
  }
}

}  // namespace m3
