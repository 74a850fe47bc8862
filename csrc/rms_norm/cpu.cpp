#include "abi.h"

#include <cmath>
#include <type_traits>

#include "../common/cpu/isa.h"
#include "../common/cpu/results.h"

namespace {

using llmctl::fetch;
using llmctl::store_row;
using llmctl::wide;

/* Forward of rows of `hidden`, or with kAdds of hidden + residual, which is stored as `sum`. */
template <typename T, bool kAdds>
struct Forward {
  using W = wide<T>;
  const T *hidden, *residual, *weight;
  T *sum, *normed;
  W *scale;
  W epsilon, one;
  int64_t width;
  bool past_caches;

  void operator()(int64_t row) const {
    scale[row] = W(1) / std::sqrt(squares(row * width) / W(width) + epsilon);
    const W factor = scale[row], plus = one;
    const T *const values = (kAdds ? sum : hidden) + row * width, *const weights = weight;
    const T *const next = hidden + (row + 1) * width, *const next_residual = residual + (row + 1) * width;
    store_row(normed + row * width, width, past_caches, [=](int64_t start, int64_t count, W *result) {
      fetch(next + start);
      if constexpr (kAdds) fetch(next_residual + start);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) result[i] = W(values[start + i]) * factor * (plus + W(weights[start + i]));
    });
  }

  W squares(int64_t first) const {
    const T *const left = hidden + first, *const right = kAdds ? residual + first : nullptr;
    T *const total = kAdds ? sum + first : nullptr;
    W result = 0;
#pragma omp simd reduction(+ : result)
    for (int64_t i = 0; i < width; ++i) {
      W value = left[i];
      if constexpr (kAdds) {
        total[i] = value + W(right[i]);
        /* The norm is of the stored, rounded sum: backward reads no other. */
        value = total[i];
      }
      result += value * value;
    }
    return result;
  }
};

/* The gradient along the row has no effect, because the norm does not depend on the length of the row. */
template <typename T, bool kAdds>
struct Backward {
  using W = wide<T>;
  const T *grad_normed, *grad_sum, *hidden, *weight;
  T *grad_hidden;
  const W *scale;
  W *grad_weight;
  W one;
  int64_t width;
  bool past_caches;

  void operator()(int64_t row) const {
    const int64_t first = row * width;
    const W plus = one, factor = scale[row], lost = along(first, factor) * factor * factor / W(width);
    const T *const grads = grad_normed + first, *const values = hidden + first, *const weights = weight;
    const T *const sums = kAdds ? grad_sum + first : nullptr;
    const int64_t row_width = width;
    store_row(grad_hidden + first, width, past_caches, [=](int64_t start, int64_t count, W *result) {
      fetch(grads + row_width + start);
      fetch(values + row_width + start);
      if constexpr (kAdds) fetch(sums + row_width + start);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const W grad = W(grads[start + i]) * (plus + W(weights[start + i])) * factor - W(values[start + i]) * lost;
        result[i] = kAdds ? grad + W(sums[start + i]) : grad;
      }
    });
  }

  W along(int64_t first, W factor) const {
    const T *const grads = grad_normed + first, *const values = hidden + first, *const weights = weight;
    W *const weight_result = grad_weight;
    const W plus = one;
    W result = 0;
#pragma omp simd reduction(+ : result)
    for (int64_t i = 0; i < width; ++i) {
      const W product = W(grads[i]) * W(values[i]) * factor;
      weight_result[i] += product;
      result += product * (plus + W(weights[i]));
    }
    return result;
  }
};

/* Calls body with true or false as a type. */
template <typename Body>
void with_bool(bool value, Body body) {
  if (value) return body(std::true_type{});
  body(std::false_type{});
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_rms_norm,
                  (int dtype, const void *hidden, const void *residual, const void *weight, void *sum, void *normed,
                   void *scale, int64_t width, double epsilon, int adds_one, int64_t first, int64_t stop,
                   int past_caches),
                  (dtype, hidden, residual, weight, sum, normed, scale, width, epsilon, adds_one, first, stop,
                   past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    with_bool(residual != nullptr, [=](auto adds) {
      const Forward<T, adds.value> norm{static_cast<const T *>(hidden), static_cast<const T *>(residual),
                                        static_cast<const T *>(weight), static_cast<T *>(sum),
                                        static_cast<T *>(normed),       static_cast<W *>(scale),
                                        W(epsilon),                     W(adds_one),
                                        width,                          past_caches != 0};
      for (int64_t row = first; row < stop; ++row) norm(row);
    });
  });
  llmctl::finish_stores(past_caches != 0);
}

LLMCTL_CPU_KERNEL(llmctl_cpu_rms_norm_backward,
                  (int dtype, const void *grad_normed, const void *grad_sum, const void *hidden, const void *weight,
                   const void *scale, void *grad_hidden, void *grad_weight, int64_t width, int adds_one, int64_t first,
                   int64_t stop, int past_caches),
                  (dtype, grad_normed, grad_sum, hidden, weight, scale, grad_hidden, grad_weight, width, adds_one, first, stop,
                   past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    with_bool(grad_sum != nullptr, [=](auto adds) {
      const Backward<T, adds.value> norm{static_cast<const T *>(grad_normed), static_cast<const T *>(grad_sum),
                                         static_cast<const T *>(hidden),      static_cast<const T *>(weight),
                                         static_cast<T *>(grad_hidden),       static_cast<const W *>(scale),
                                         static_cast<W *>(grad_weight),       W(adds_one),
                                         width,                               past_caches != 0};
      for (int64_t row = first; row < stop; ++row) norm(row);
    });
  });
  llmctl::finish_stores(past_caches != 0);
}
