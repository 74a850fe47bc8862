#include "../include/rms_norm.h"

#include <cmath>
#include <type_traits>

#include "isa.h"
#include "row_passes.h"

namespace {

using llmctl::Halves;
using llmctl::kFirst;
using llmctl::kLast;
using llmctl::wide;

/* Of `hidden`, or with kAdds of hidden + residual, which is stored as `sum`. */
template <typename T, bool kAdds>
struct Forward {
  using W = wide<T>;
  using Found = W;
  const T *hidden, *residual, *weight;
  T *sum, *normed;
  W *scale;
  W epsilon;
  int64_t width;

  W found(int64_t row, W squares) const { return scale[row] = W(1) / std::sqrt(squares / W(width) + epsilon); }

  template <Halves kHalves>
  W pass(int64_t last, W factor, int64_t next) const {
    const T *const values = (kAdds ? sum : hidden) + last * width, *const weights = weight;
    const T *const left = hidden + next * width, *const right = kAdds ? residual + next * width : nullptr;
    T *const total = kAdds ? sum + next * width : nullptr, *const result = normed + last * width;
    W squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < width; ++i) {
      if constexpr (kHalves != kFirst) result[i] = W(values[i]) * factor * W(weights[i]);
      if constexpr (kHalves != kLast) {
        W value = left[i];
        if constexpr (kAdds) {
          total[i] = value + W(right[i]);
          /* What is normed is what is stored: backward reads no other. */
          value = total[i];
        }
        squares += value * value;
      }
    }
    return squares;
  }
};

/* Along a row, the gradient of its norm is lost, because the norm does not see how long the row is. */
template <typename T, bool kAdds>
struct Backward {
  using W = wide<T>;
  using Found = W;
  const T *grad_normed, *grad_sum, *hidden, *weight;
  T *grad_hidden;
  const W *scale;
  W *grad_weight;
  int64_t width;

  W found(int64_t row, W along) const { return along * scale[row] * scale[row] / W(width); }

  template <Halves kHalves>
  W pass(int64_t last, W lost, int64_t next) const {
    const T *const grads = grad_normed + last * width, *const values = hidden + last * width, *const weights = weight;
    const T *const sums = kAdds ? grad_sum + last * width : nullptr;
    const T *const next_grads = grad_normed + next * width, *const next_values = hidden + next * width;
    T *const result = grad_hidden + last * width;
    W *const weight_result = grad_weight;
    const W factor = scale[last], next_factor = scale[next];
    W next_along = 0;
#pragma omp simd reduction(+ : next_along)
    for (int64_t i = 0; i < width; ++i) {
      const W scaling = W(weights[i]);
      if constexpr (kHalves != kFirst) {
        W grad = W(grads[i]) * scaling * factor - W(values[i]) * lost;
        if constexpr (kAdds) grad += W(sums[i]);
        result[i] = grad;
      }
      if constexpr (kHalves != kLast) {
        const W product = W(next_grads[i]) * W(next_values[i]) * next_factor;
        weight_result[i] += product;
        next_along += product * scaling;
      }
    }
    return next_along;
  }
};

/* visit(true or false as a type). */
template <typename Visitor>
void with_bool(bool value, Visitor visit) {
  if (value) return visit(std::true_type{});
  visit(std::false_type{});
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_rms_norm,
                  (int dtype, const void *hidden, const void *residual, const void *weight, void *sum, void *normed,
                   void *scale, int64_t width, double epsilon, int64_t first, int64_t stop),
                  (dtype, hidden, residual, weight, sum, normed, scale, width, epsilon, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    with_bool(residual != nullptr, [=](auto adds) {
      const Forward<T, adds.value> norm{static_cast<const T *>(hidden), static_cast<const T *>(residual),
                                        static_cast<const T *>(weight), static_cast<T *>(sum),
                                        static_cast<T *>(normed),       static_cast<W *>(scale),
                                        W(epsilon),                     width};
      llmctl::pass_over_rows(norm, first, stop);
    });
  });
}

LLMCTL_CPU_KERNEL(llmctl_cpu_rms_norm_backward,
                  (int dtype, const void *grad_normed, const void *grad_sum, const void *hidden, const void *weight,
                   const void *scale, void *grad_hidden, void *grad_weight, int64_t width, int64_t first, int64_t stop),
                  (dtype, grad_normed, grad_sum, hidden, weight, scale, grad_hidden, grad_weight, width, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    with_bool(grad_sum != nullptr, [=](auto adds) {
      const Backward<T, adds.value> norm{static_cast<const T *>(grad_normed), static_cast<const T *>(grad_sum),
                                         static_cast<const T *>(hidden),      static_cast<const T *>(weight),
                                         static_cast<T *>(grad_hidden),       static_cast<const W *>(scale),
                                         static_cast<W *>(grad_weight),       width};
      llmctl::pass_over_rows(norm, first, stop);
    });
  });
}
