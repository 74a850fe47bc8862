#include "abi.h"

#include <algorithm>

#include "../common/cpu/isa.h"

namespace {

using llmctl::wide;

/* Channels at a time: their sums stay in the first-level cache. */
constexpr int64_t kBlock = 1024;

template <typename T>
void combine(const T *rows, const int64_t *places, const wide<T> *weights, T *token, int64_t chosen, int64_t topk,
             int64_t width) {
  using W = wide<T>;
  W sums[kBlock];
  for (int64_t start = 0; start < width; start += kBlock) {
    const int64_t count = std::min(kBlock, width - start);
    for (int64_t i = 0; i < count; ++i) sums[i] = W(0);
    for (int64_t k = 0; k < topk; ++k) {
      if (places[k] == chosen) continue;
      const T *row = rows + places[k] * width + start;
      const W weight = weights == nullptr ? W(1) : weights[k];
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) sums[i] += weight * W(row[i]);
    }
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) token[start + i] = sums[i];
  }
}

template <typename T>
wide<T> combine_backward(const T *grad_token, const T *row, wide<T> weight, T *grad_row, int64_t width) {
  using W = wide<T>;
  W along = 0;
#pragma omp simd reduction(+ : along)
  for (int64_t i = 0; i < width; ++i) {
    along += W(row[i]) * W(grad_token[i]);
    grad_row[i] = weight * W(grad_token[i]);
  }
  return along;
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_moe_combine,
                  (int dtype, const void *rows, const int64_t *places, const void *weights, void *tokens, int64_t chosen,
                   int64_t topk, int64_t width, int64_t first, int64_t stop),
                  (dtype, rows, places, weights, tokens, chosen, topk, width, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    for (int64_t token = first; token < stop; ++token) {
      const auto *own = weights == nullptr ? nullptr : static_cast<const wide<T> *>(weights) + token * topk;
      combine(static_cast<const T *>(rows), places + token * topk, own, static_cast<T *>(tokens) + token * width, chosen,
              topk, width);
    }
  });
}

LLMCTL_CPU_KERNEL(llmctl_cpu_moe_combine_backward,
                  (int dtype, const void *grad_tokens, const void *rows, const int64_t *choices, const void *weights,
                   void *grad_rows, void *grad_weights, int64_t topk, int64_t width, int64_t first, int64_t stop),
                  (dtype, grad_tokens, rows, choices, weights, grad_rows, grad_weights, topk, width, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    for (int64_t row = first; row < stop; ++row) {
      const int64_t choice = choices[row];
      static_cast<wide<T> *>(grad_weights)[choice] = combine_backward(
          static_cast<const T *>(grad_tokens) + choice / topk * width, static_cast<const T *>(rows) + row * width,
          static_cast<const wide<T> *>(weights)[choice], static_cast<T *>(grad_rows) + row * width, width);
    }
  });
}
