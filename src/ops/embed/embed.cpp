#include "ops/embed/embed.h"

#include "ops/common/checks.h"
#include "ops/common/rows.h"

namespace m3 {
namespace {

// to[to_rows[n]] = from[from_rows[n]]; null rows mean n itself.
void copy_rows(const Tensor& from_NC, const int32_t* from_rows, const Tensor& to_NC, const int32_t* to_rows,
               int64_t count) {
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
    M3_CHECK(0 <= rows[n] && rows[n] < limit, "{}[{}] is {}, want 0 to {}", name, n, rows[n], limit - 1);
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
  copy_rows(features_NC, nullptr, x_TC, checked_rows("rows_N", rows_N, x_TC.dim(0)), rows_N.numel());
}

void gather_rows(const Tensor& rows_N, const Tensor& x_TC, const Tensor& y_NC, Stream) {
  M3_CHECK(x_TC.rank() == 2, "x_TC must be [T, C], got {}", x_TC.shape().str());
  check_float("x_TC", x_TC);
  check_float("y_NC", y_NC, {rows_N.numel(), x_TC.dim(1)});
  copy_rows(x_TC, checked_rows("rows_N", rows_N, x_TC.dim(0)), y_NC, nullptr, rows_N.numel());
}

}  // namespace m3
