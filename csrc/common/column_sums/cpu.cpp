#include "abi.h"

#include <algorithm>

#include "../cpu/isa.h"

namespace {

using llmctl::wide;

/* Columns at a time: their sums stay in the first-level cache. */
constexpr int64_t kBlock = 512;

template <typename T>
void sums_of_columns(const wide<T> *partial, T *sums, int64_t rows, int64_t width) {
  double totals[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t count = std::min(kBlock, width - start);
    for (int64_t i = 0; i < count; ++i) totals[i] = 0;
    for (int64_t row = 0; row < rows; ++row) {
      const wide<T> *const summands = partial + row * width + start;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) totals[i] += summands[i];
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) sums[start + i] = static_cast<wide<T>>(totals[i]);
  }
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_column_sums,
                  (int dtype, const void *partial, void *sums, int64_t rows, int64_t width),
                  (dtype, partial, sums, rows, width)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    sums_of_columns(static_cast<const wide<T> *>(partial), static_cast<T *>(sums), rows, width);
  });
}
