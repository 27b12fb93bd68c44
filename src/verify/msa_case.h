// One operator golden (tests/golden/README.md, msa/NAME.json): its description, inputs and expected
// results, and the error measures of msa.md §14. Shared by the checks of the forward and backward parts.
#pragma once
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "formats/safetensors.h"
#include "ops/common/msa_types.h"
#include "tensor/arena.h"

namespace m3::verify {

struct MsaCase {
  std::string name, mode;     // mode: msa, full, window, dsa
  MsaGeometry geometry;
  DType dtype = DType::kF32;  // of the inputs
  std::vector<int32_t> cu_q, cu_k;
  AttendSupport support;      // of the attention (kTokens: dsa)
  int dsa_heads = 0;
  bool has_selection = false; // ids, gap
  bool backward = false;
  std::string kl;             // "", "sparse" or "warmup"
  double kl_weight = 0;
  int64_t key_row_stride = 1;
  std::map<std::string, std::vector<float>> inputs;  // q, k, v, ...: row-major, shapes as in the README
  std::unique_ptr<SafetensorsFile> file;

  int64_t num_queries() const { return cu_q.back(); }
  int64_t num_keys() const { return cu_k.back(); }
  int num_seqs() const { return static_cast<int>(cu_q.size()) - 1; }
  MsaBatch batch() const {  // packed, arrays on the host
    return {.num_seqs = num_seqs(), .num_queries = num_queries(), .cu_q = cu_q.data(), .cu_k = cu_k.data()};
  }
  bool expects(const std::string& output) const { return file->contains("out." + output); }
  std::vector<float> expected(const std::string& output) const;
  std::vector<int32_t> expected_ints(const std::string& output) const;
  // Query rows whose O, dq and dqi are stored: `out.rows`, else all.
  std::vector<int32_t> stored_rows() const;
};

MsaCase load_msa_case(const std::filesystem::path& file, const nlohmann::ordered_json& document);

// Memory of one run on the device under test.
class MsaMemory {
 public:
  explicit MsaMemory(Device device);
  Device device() const { return device_; }
  Tensor upload(const std::vector<float>& values, DType dtype, Shape shape);
  Tensor upload(const std::vector<int32_t>& values, Shape shape);
  Tensor poisoned(DType dtype, Shape shape);  // filled with bits that read as NaN (floats)
  void* workspace(int64_t bytes);
  std::vector<float> download(const Tensor& tensor);
  std::vector<int32_t> download_ints(const Tensor& tensor);

 private:
  Device device_;
  Arena arena_, staging_;
};

// Errors of rows of `width` elements: |x - ref| / max(|ref|, 0.1 RMS of the row norms) (msa.md §14).
struct RowErrors {
  double mean = 0, max = 0;
};
RowErrors row_errors(const std::vector<float>& got, const std::vector<float>& want, int64_t width);
// Largest |x - ref| / (absolute + relative |ref|); equal infinities count as 0, NaN as infinite.
double worst_ratio(const std::vector<float>& got, const std::vector<float>& want, double absolute, double relative);

// Rows of `width` elements picked from a row-major array.
std::vector<float> pick_rows(const std::vector<float>& values, const std::vector<int32_t>& rows, int64_t width);

}  // namespace m3::verify
