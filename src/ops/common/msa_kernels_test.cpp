#include "ops/common/msa_kernels.h"

#include <gtest/gtest.h>

#include "ops/common/msa_test_data.h"
#include "ops/common/testing.h"

namespace m3 {
namespace {

using namespace msa_test;

// The value that word `s` of a packed column stands for, at step c of the summed axis.
float unpacked(const MsaKernels& kernels, const std::vector<uint32_t>& words, int64_t panel_base, int c, int column) {
  const int64_t at = panel_base + int64_t{kernels.bf16_dot ? c / 2 : c} * kernels.panel + column;
  if (!kernels.bf16_dot) return std::bit_cast<float>(words[at]);
  return std::bit_cast<float>(c % 2 == 0 ? words[at] << 16 : words[at] & 0xffff0000u);
}

TEST(MsaKernels, packed_keys_and_values_hold_every_element_and_zeros_elsewhere) {
  testing::for_each_isa([&] {
    for (bool bf16_dot : {false, true}) {
      const MsaKernels& kernels = msa_kernels(bf16_dot);
      for (DType dtype : {DType::kF32, DType::kBF16}) {
        if (kernels.bf16_dot && dtype == DType::kF32) continue;
        for (int dim : {1, 2, 16, 31, 32, 37, 48, 128, 160}) {
          for (int num_keys : {1, 7, 16, 63, 64, 65, 127, 128}) {
            Buffer data(dtype, {num_keys, dim});
            fill_normal(data, dim * 1000 + num_keys, 0);
            std::vector<const void*> rows(num_keys);
            for (int j = 0; j < num_keys; ++j) rows[j] = data.tensor().rows(j, j + 1).data();
            const int steps = kernels.steps(dim), key_steps = kernels.steps(num_keys);
            std::vector<uint32_t> keys(kernels.padded(num_keys) * steps + 1, 0x7fc07fc0), values(kernels.padded(dim) * key_steps + 1, 0x7fc07fc0);
            kernels.pack_keys(rows.data(), num_keys, dim, dtype, keys.data(), {});
            kernels.pack_values(rows.data(), num_keys, dim, dtype, values.data());
            EXPECT_EQ(keys.back(), 0x7fc07fc0u);
            EXPECT_EQ(values.back(), 0x7fc07fc0u);
            for (int j = 0; j < kernels.padded(num_keys); ++j) {
              for (int c = 0; c < kernels.padded(dim); ++c) {
                const float want = j < num_keys && c < dim ? data.get(int64_t{j} * dim + c) : 0.0f;
                if (c < (kernels.bf16_dot ? 2 * steps : dim)) {
                  const int64_t base = int64_t{j / kernels.panel} * steps * kernels.panel;
                  ASSERT_EQ(unpacked(kernels, keys, base, c, j % kernels.panel), want) << "key " << j << " channel " << c << " dim " << dim;
                }
                if (j < (kernels.bf16_dot ? 2 * key_steps : num_keys)) {
                  const int64_t base = int64_t{c / kernels.panel} * key_steps * kernels.panel;
                  ASSERT_EQ(unpacked(kernels, values, base, j, c % kernels.panel), want) << "value " << j << " channel " << c;
                }
              }
            }
          }
        }
      }
    }
  });
}

// The bits of a product depend on its two vectors alone: not on the rows beside it nor on its place in a tile (msa.md §10).
TEST(MsaKernels, score_of_a_pair_does_not_depend_on_its_tile) {
  testing::for_each_isa([&] {
    for (bool bf16_dot : {false, true}) {
      const MsaKernels& kernels = msa_kernels(bf16_dot);
      const int dim = 100, num_rows = 23, num_keys = 77, steps = kernels.steps(dim);
      Buffer q(DType::kBF16, {num_rows, dim}), k(DType::kBF16, {num_keys, dim});
      fill_normal(q, 1, 0);
      fill_normal(k, 1, 1);
      std::vector<uint32_t> a(num_rows * steps), b(kernels.padded(num_keys) * steps), one(kernels.panel * steps);
      std::vector<const void*> rows(num_keys);
      for (int i = 0; i < num_rows; ++i) kernels.pack_row(q.tensor().rows(i, i + 1).data(), dim, DType::kBF16, &a[i * steps]);
      for (int j = 0; j < num_keys; ++j) rows[j] = k.tensor().rows(j, j + 1).data();
      const MsaAhead ahead{static_cast<const char*>(k.tensor().data()), 1000};  // prefetching shows in no result
      for (int j : {0, 5, 33, 76}) {
        kernels.pack_keys(&rows[j], 1, dim, DType::kBF16, one.data(), {});
        std::vector<float> alone(num_rows, -kInf), shared(num_rows, -kInf), lanes(num_rows * kMsaMaxLanes);
        for (int i = 0; i < num_rows; ++i) kernels.score_max(&a[i * steps], 1, steps, one.data(), 1, nullptr, lanes.data(), &alone[i], {});
        // In the shared tile all keys before j are NaN and all behind are hidden by the limit.
        std::vector<const void*> masked = rows;
        Buffer nan(DType::kBF16, {1, dim});
        nan.fill(kNan);
        std::fill_n(masked.begin(), j, nan.tensor().data());
        kernels.pack_keys(masked.data(), num_keys, dim, DType::kBF16, b.data(), ahead);
        const std::vector<int32_t> last(num_rows, j + 1);
        kernels.score_max(a.data(), num_rows, steps, b.data(), num_keys, last.data(), lanes.data(), shared.data(), ahead);
        EXPECT_EQ(alone, shared) << kernels.name << " key " << j;
        if (kernels.pack_key_pairs == nullptr) continue;
        std::vector<float> paired(num_rows, -kInf);
        kernels.pack_key_pairs(masked.data(), num_keys, dim, b.data(), ahead);
        kernels.score_max_pairs(a.data(), num_rows, steps, b.data(), num_keys, last.data(), lanes.data(), paired.data(), ahead);
        EXPECT_EQ(alone, paired) << kernels.name << " pairs, key " << j;
      }
    }
  });
}

}  // namespace
}  // namespace m3
