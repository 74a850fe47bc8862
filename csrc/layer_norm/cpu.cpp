#include "abi.h"

#include <cmath>

#include "../common/cpu/isa.h"
#include "../common/cpu/results.h"

namespace {

using llmctl::fetch;
using llmctl::store_row;
using llmctl::wide;

template <typename T>
struct Forward {
  using W = wide<T>;
  const T *hidden, *weight, *bias;
  T *normed;
  W *means, *scales;
  W epsilon;
  int64_t width;
  bool past_caches;

  void operator()(int64_t row) const {
    find_moments(row);
    const W mean = means[row], scale = scales[row];
    const T *const values = hidden + row * width, *const weights = weight, *const biases = bias;
    const T *const next = values + width;
    store_row(normed + row * width, width, past_caches, [=](int64_t start, int64_t count, W *result) {
      fetch(next + start);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        result[i] = (W(values[start + i]) - mean) * scale * W(weights[start + i]) + W(biases[start + i]);
      }
    });
  }

  /* The variance is summed around an estimate of the mean, because the difference of two large sums has few correct
   * digits. The same pass finds the estimate's own error (Chan, Golub and LeVeque 1983, equation 1.7). */
  void find_moments(int64_t row) const {
    const T *const values = hidden + row * width;
    W row_sum = 0;
#pragma omp simd reduction(+ : row_sum)
    for (int64_t i = 0; i < width; ++i) row_sum += W(values[i]);
    const W estimate = row_sum / W(width);
    W sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum, squares)
    for (int64_t i = 0; i < width; ++i) {
      const W rest = W(values[i]) - estimate;
      sum += rest;
      squares += rest * rest;
    }
    const W error = sum / W(width);
    means[row] = estimate + error;
    scales[row] = W(1) / std::sqrt(squares / W(width) - error * error + epsilon);
  }
};

/* The part of a row's gradient that has no effect, because the norm removes it: a constant, and a multiple of the
 * normed row. */
template <typename W>
struct Lost {
  W constant, along;
};

template <typename T>
struct Backward {
  using W = wide<T>;
  const T *grad_normed, *hidden, *weight;
  const W *means, *scales;
  T *grad_hidden;
  W *grad_weight, *grad_bias;
  int64_t width;
  bool past_caches;

  void operator()(int64_t row) const {
    const Lost<W> lost = sums(row);
    const T *const grads = grad_normed + row * width, *const values = hidden + row * width, *const weights = weight;
    const T *const next_grads = grads + width, *const next_values = values + width;
    const W mean = means[row], scale = scales[row];
    store_row(grad_hidden + row * width, width, past_caches, [=](int64_t start, int64_t count, W *result) {
      fetch(next_grads + start);
      fetch(next_values + start);
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) {
        const W unit = (W(values[start + i]) - mean) * scale;
        result[i] = (W(grads[start + i]) * W(weights[start + i]) - lost.constant - unit * lost.along) * scale;
      }
    });
  }

  Lost<W> sums(int64_t row) const {
    const T *const grads = grad_normed + row * width, *const values = hidden + row * width, *const weights = weight;
    const W mean = means[row], scale = scales[row];
    W *const weight_result = grad_weight, *const bias_result = grad_bias;
    W constant = 0, along = 0;
#pragma omp simd reduction(+ : constant, along)
    for (int64_t i = 0; i < width; ++i) {
      const W scaling = W(weights[i]), grad = W(grads[i]), product = grad * ((W(values[i]) - mean) * scale);
      bias_result[i] += grad;
      weight_result[i] += product;
      constant += grad * scaling;
      along += product * scaling;
    }
    return {constant / W(width), along / W(width)};
  }
};

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_layer_norm,
                  (int dtype, const void *hidden, const void *weight, const void *bias, void *normed, void *mean,
                   void *scale, int64_t width, double epsilon, int64_t first, int64_t stop, int past_caches),
                  (dtype, hidden, weight, bias, normed, mean, scale, width, epsilon, first, stop, past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    const Forward<T> norm{static_cast<const T *>(hidden), static_cast<const T *>(weight), static_cast<const T *>(bias),
                          static_cast<T *>(normed),       static_cast<W *>(mean),         static_cast<W *>(scale),
                          W(epsilon),                     width,
                          past_caches != 0};
    for (int64_t row = first; row < stop; ++row) norm(row);
  });
  llmctl::finish_stores(past_caches != 0);
}

LLMCTL_CPU_KERNEL(llmctl_cpu_layer_norm_backward,
                  (int dtype, const void *grad_normed, const void *hidden, const void *weight, const void *mean,
                   const void *scale, void *grad_hidden, void *grad_weight, void *grad_bias, int64_t width, int64_t first,
                   int64_t stop, int past_caches),
                  (dtype, grad_normed, hidden, weight, mean, scale, grad_hidden, grad_weight, grad_bias, width, first,
                   stop, past_caches)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    const Backward<T> norm{static_cast<const T *>(grad_normed), static_cast<const T *>(hidden),
                           static_cast<const T *>(weight),      static_cast<const W *>(mean),
                           static_cast<const W *>(scale),       static_cast<T *>(grad_hidden),
                           static_cast<W *>(grad_weight),       static_cast<W *>(grad_bias),
                           width,
                           past_caches != 0};
    for (int64_t row = first; row < stop; ++row) norm(row);
  });
  llmctl::finish_stores(past_caches != 0);
}
