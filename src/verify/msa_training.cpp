// O, LSE and the ids are constants of the forward pass: the backward gets the ids of the golden,
// and O and LSE as attend gives them for these ids.
#include "verify/msa_training.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

#include "ops/attend/attend.h"
#include "ops/attend_backward/attend_backward.h"
#include "ops/index_kl/index_kl.h"

namespace m3::verify {
namespace {

// msa.md §14. All CPU arithmetic is fp32; in bf16 runs dO and the gradients are stored in bf16. O
// stays in fp32, as attend offers it (§6): the worst row of peaked data would reach 0.1003 of the
// 0.1 allowed with O in bf16, by delta = dO . O.
struct Limits {
  double mean, max;
};
Limits gradient_limits(bool bf16, bool peaked) {
  if (!bf16) return {2e-6, 2e-5};
  return peaked ? Limits{1e-2, 1e-1} : Limits{5e-3, 1e-2};
}

class TrainingCheck {
 public:
  TrainingCheck(const MsaCase& c, const nlohmann::ordered_json& document, const Options& options)
      : c_(c),
        g_(c.geometry),
        norms_(document.at("norms")),
        memory_(options.device),
        batch_(c.batch()) {
    bf16_ = options.dtype == DType::kBF16 && c.dtype == DType::kBF16;
    // Data with logits of standard deviation 4 say so by the rule of q.
    const auto& q = document.at("inputs").at("q");
    peaked_ = q.value("std", 1.0) > 1.5;
    const int64_t T = c.num_queries(), S = c.num_keys();
    q_ = memory_.upload(c.inputs.at("q"), c.dtype, {T, g_.heads(), g_.head_dim});
    k_ = memory_.upload(c.inputs.at("k"), c.dtype, {S, g_.groups, g_.head_dim});
    if (c.mode == "msa") lists_ = memory_.upload(c.expected_ints("ids"), {g_.groups, T, g_.topk});
    v_ = memory_.upload(c.inputs.at("v"), c.dtype, {S, g_.groups, g_.head_dim});
    o_ = memory_.poisoned(DType::kF32, {T, g_.heads(), g_.head_dim});
    lse_ = memory_.poisoned(DType::kF32, {T, g_.heads()});
    const AttendPlan plan = attend_plan(
        g_, batch_,
        {.support = c.support, .compute = bf16_ ? MsaCompute::kBF16 : MsaCompute::kF32});
    attend(plan, batch_, q_, k_, v_, lists_, o_, lse_, memory_.workspace(plan.workspace_bytes));
  }

  void backward() {
    const Tensor d_o = memory_.upload(c_.inputs.at("dO"), c_.dtype, q_.shape());
    const Tensor dq = memory_.poisoned(stored(), q_.shape()),
                 dk = memory_.poisoned(stored(), k_.shape()),
                 dv = memory_.poisoned(stored(), v_.shape());
    const AttendBackwardPlan plan = attend_backward_plan(g_, batch_, c_.support);
    attend_backward(plan, batch_, {q_, k_, v_, lists_, o_, lse_, d_o, {}}, dq, dk, dv,
                    memory_.workspace(plan.workspace_bytes));
    const int64_t q_width = int64_t{g_.heads()} * g_.head_dim,
                  k_width = int64_t{g_.groups} * g_.head_dim;
    compare("dq", dq, c_.stored_rows(), q_width, g_.head_dim);
    compare("dk", dk, stored_keys(), k_width, g_.head_dim);
    compare("dv", dv, stored_keys(), k_width, g_.head_dim);
  }

  void kl() {
    const int64_t T = c_.num_queries(), S = c_.num_keys();
    const Tensor qi = memory_.upload(c_.inputs.at("qi"), c_.dtype, {T, g_.groups, g_.index_dim});
    const Tensor ki = memory_.upload(c_.inputs.at("ki"), c_.dtype, {S, g_.index_dim});
    const Tensor dqi = memory_.poisoned(stored(), qi.shape()),
                 dki = memory_.poisoned(stored(), ki.shape());
    const Tensor rows = memory_.poisoned(DType::kF32, {g_.groups, T}),
                 lse_x = memory_.poisoned(DType::kF32, {g_.groups, T});
    const AttendSupport support = c_.kl == "warmup" ? AttendSupport::full() : c_.support;
    const IndexKlPlan plan = index_kl_plan(g_, batch_, support);
    index_kl(plan, batch_, c_.kl_weight, {q_, k_, lse_, qi, ki, lists_}, {dqi, dki, rows, lse_x},
             memory_.workspace(plan.workspace_bytes));
    compare("dqi", dqi, c_.stored_rows(), int64_t{g_.groups} * g_.index_dim, g_.index_dim);
    compare("dki", dki, stored_keys(), g_.index_dim, g_.index_dim);
    const std::vector<float> got = memory_.download(rows);
    limit("KL", worst_ratio(got, c_.expected("KL"), 1e-6, 1e-3));
    limit("LSE_x",
          worst_ratio(memory_.download(lse_x), c_.expected("LSE_x"), bf16_ ? 5e-4 : 1e-4, 0x1p-21));
    double sum = 0;
    for (float x : got) sum += x;
    check_norm("kl_sum", sum, 1e-3);
  }

  std::string detail() const { return detail_; }

 private:
  DType stored() const { return bf16_ ? DType::kBF16 : DType::kF32; }
  std::vector<int32_t> stored_keys() const {
    std::vector<int32_t> rows;
    for (int64_t s = 0; s < c_.num_keys(); s += c_.key_row_stride)
      rows.push_back(static_cast<int32_t>(s));
    return rows;
  }

  // Rows of `width` elements, each made of error rows of `dim`.
  void compare(const char* what, const Tensor& tensor, const std::vector<int32_t>& rows,
               int64_t width, int64_t dim) {
    const std::vector<float> all = memory_.download(tensor);
    const RowErrors errors = row_errors(pick_rows(all, rows, width), c_.expected(what), dim);
    const bool index = std::string_view(what).ends_with('i');  // dqi, dki
    const Limits limits = gradient_limits(bf16_, peaked_ && !index);
    M3_CHECK(errors.mean <= limits.mean && errors.max <= limits.max,
             "{} is off by {:.2e} mean, {:.2e} max (limits {:.0e}, {:.0e})", what, errors.mean,
             errors.max, limits.mean, limits.max);
    detail_ += fmt::format("{}{} {:.1e}/{:.1e}", detail_.empty() ? "" : ", ", what, errors.mean,
                           errors.max);
    double square = 0;
    for (float x : all) square += double{x} * x;
    check_norm(what, std::sqrt(square), limits.max);
  }

  void check_norm(const std::string& what, double got, double relative) const {
    const double want = norms_.at(what);
    M3_CHECK(std::abs(got - want) <= relative * want, "norm of {} is {:.8g}, want {:.8g}", what,
             got, want);
  }
  void limit(const char* what, double ratio) {
    M3_CHECK(ratio <= 1, "{} is off by {:.2f} times its tolerance", what, ratio);
    detail_ += fmt::format(", {} {:.2f} of its tolerance", what, ratio);
  }

  const MsaCase& c_;
  const MsaGeometry& g_;
  const nlohmann::ordered_json& norms_;
  MsaMemory memory_;
  const MsaBatch batch_;
  bool bf16_ = false, peaked_ = false;
  Tensor q_, k_, v_, lists_, o_, lse_;
  std::string detail_;
};

}  // namespace

std::string check_msa_training(const MsaCase& c, const nlohmann::ordered_json& document,
                               const Options& options) {
  TrainingCheck check(c, document, options);
  if (c.backward) check.backward();
  if (!c.kl.empty()) check.kl();
  return check.detail();
}

}  // namespace m3::verify
