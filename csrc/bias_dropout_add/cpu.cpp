#include "abi.h"

#include <algorithm>

#include "../common/cpu/isa.h"
#include "philox.h"

namespace {

using llmctl::wide;

/* Elements at a time: their random numbers stay in the first-level cache. */
constexpr int64_t kBlock = 1024;

void draw(uint64_t counter, int64_t count, uint64_t seed, uint32_t *numbers) {
  for (int64_t i = 0; i < count; ++i) {
    const llmctl::Philox4 four = llmctl::philox(counter + static_cast<uint64_t>(i), seed);
    for (int lane = 0; lane < 4; ++lane) numbers[4 * i + lane] = four.lanes[lane];
  }
}

template <bool has_bias, bool has_residual, typename T>
void apply(const T *input, const T *bias, const T *residual, T *output, const uint32_t *numbers, uint32_t threshold,
           wide<T> scale, int64_t count) {
  using W = wide<T>;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const W factor = numbers[i] >= threshold ? scale : W(0);
    W value = W(input[i]);
    if constexpr (has_bias) value += W(bias[i]);
    value *= factor;
    if constexpr (has_residual) value += W(residual[i]);
    output[i] = value;
  }
}

/* `count` elements of one row; the first has the number `place` in the global tensor. */
template <typename T>
void segment(const T *input, const T *bias, const T *residual, T *output, const llmctl_dropout &dropout, uint64_t place,
             int64_t count) {
  uint32_t numbers[kBlock + 4];
  const int64_t skipped = static_cast<int64_t>(place % 4);
  draw(place / 4, (skipped + count + 3) / 4, dropout.seed, numbers);
  const uint32_t *own = numbers + skipped;
  const wide<T> scale = static_cast<wide<T>>(dropout.scale);
  if (bias != nullptr && residual != nullptr) {
    apply<true, true>(input, bias, residual, output, own, dropout.threshold, scale, count);
  } else if (bias != nullptr) {
    apply<true, false>(input, bias, residual, output, own, dropout.threshold, scale, count);
  } else if (residual != nullptr) {
    apply<false, true>(input, bias, residual, output, own, dropout.threshold, scale, count);
  } else {
    apply<false, false>(input, bias, residual, output, own, dropout.threshold, scale, count);
  }
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_bias_dropout_add,
                  (int dtype, const void *input, const void *bias, const void *residual, void *output,
                   const int64_t *positions, int64_t inner, int64_t width, const llmctl_dropout *dropout, int64_t first,
                   int64_t stop),
                  (dtype, input, bias, residual, output, positions, inner, width, dropout, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    for (int64_t row = first; row < stop; ++row) {
      for (int64_t column = 0; column < inner;) {
        /* Not beyond the end of the bias. */
        const int64_t channel = column % width;
        const int64_t count = std::min(kBlock, width - channel);
        const int64_t element_number = row * inner + column;
        const uint64_t place = static_cast<uint64_t>(positions[row] * inner + column);
        segment(static_cast<const T *>(input) + element_number,
                bias == nullptr ? nullptr : static_cast<const T *>(bias) + channel,
                residual == nullptr ? nullptr : static_cast<const T *>(residual) + element_number,
                static_cast<T *>(output) + element_number, *dropout, place, count);
        column += count;
      }
    }
  });
}
