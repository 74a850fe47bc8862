#include "../include/layer_norm.h"

#include <cmath>

#include "isa.h"
#include "row_passes.h"

namespace {

using llmctl::Halves;
using llmctl::kFirst;
using llmctl::kLast;
using llmctl::wide;

template <typename W>
struct Moments {
  W mean, scale;
};

template <typename T>
struct Forward {
  using W = wide<T>;
  using Found = Moments<W>;
  const T *hidden, *weight, *bias;
  T *normed;
  W *means, *scales;
  W epsilon;
  int64_t width;

  /* From an estimate of the mean, and of what is left without it, because the difference of two large sums has few right
   * digits; the estimate's own error is found on the way (Chan, Golub and LeVeque 1983, equation 1.7). */
  Moments<W> found(int64_t row, W row_sum) const {
    const T *const values = hidden + row * width;
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
    return {means[row], scales[row]};
  }

  template <Halves kHalves>
  W pass(int64_t last, const Moments<W> &moments, int64_t next) const {
    const T *const values = hidden + last * width, *const next_values = hidden + next * width;
    const T *const weights = weight, *const biases = bias;
    T *const result = normed + last * width;
    const W mean = moments.mean, scale = moments.scale;
    W sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < width; ++i) {
      if constexpr (kHalves != kFirst) result[i] = (W(values[i]) - mean) * scale * W(weights[i]) + W(biases[i]);
      if constexpr (kHalves != kLast) sum += W(next_values[i]);
    }
    return sum;
  }
};

/* What of a row's gradient is lost, because the norm does not see it: a constant, and a multiple of the normed row. */
template <typename W>
struct Lost {
  W constant, along;
};

template <typename T>
struct Backward {
  using W = wide<T>;
  using Found = Lost<W>;
  const T *grad_normed, *hidden, *weight;
  const W *means, *scales;
  T *grad_hidden;
  W *grad_weight, *grad_bias;
  int64_t width;

  Lost<W> found(int64_t, const Lost<W> &sums) const { return {sums.constant / W(width), sums.along / W(width)}; }

  template <Halves kHalves>
  Lost<W> pass(int64_t last, const Lost<W> &lost, int64_t next) const {
    const T *const grads = grad_normed + last * width, *const values = hidden + last * width, *const weights = weight;
    const T *const next_grads = grad_normed + next * width, *const next_values = hidden + next * width;
    T *const result = grad_hidden + last * width;
    const W mean = means[last], scale = scales[last], next_mean = means[next], next_scale = scales[next];
    const W lost_constant = lost.constant, lost_along = lost.along;
    W *const weight_result = grad_weight, *const bias_result = grad_bias;
    W constant = 0, along = 0;
#pragma omp simd reduction(+ : constant, along)
    for (int64_t i = 0; i < width; ++i) {
      const W scaling = W(weights[i]);
      if constexpr (kHalves != kFirst) {
        const W unit = (W(values[i]) - mean) * scale;
        result[i] = (W(grads[i]) * scaling - lost_constant - unit * lost_along) * scale;
      }
      if constexpr (kHalves != kLast) {
        const W grad = W(next_grads[i]), product = grad * ((W(next_values[i]) - next_mean) * next_scale);
        bias_result[i] += grad;
        weight_result[i] += product;
        constant += grad * scaling;
        along += product * scaling;
      }
    }
    return {constant, along};
  }
};

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_layer_norm,
                  (int dtype, const void *hidden, const void *weight, const void *bias, void *normed, void *mean,
                   void *scale, int64_t width, double epsilon, int64_t first, int64_t stop),
                  (dtype, hidden, weight, bias, normed, mean, scale, width, epsilon, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    const Forward<T> norm{static_cast<const T *>(hidden), static_cast<const T *>(weight), static_cast<const T *>(bias),
                          static_cast<T *>(normed),       static_cast<W *>(mean),         static_cast<W *>(scale),
                          W(epsilon),                     width};
    llmctl::pass_over_rows(norm, first, stop);
  });
}

LLMCTL_CPU_KERNEL(llmctl_cpu_layer_norm_backward,
                  (int dtype, const void *grad_normed, const void *hidden, const void *weight, const void *mean,
                   const void *scale, void *grad_hidden, void *grad_weight, void *grad_bias, int64_t width, int64_t first,
                   int64_t stop),
                  (dtype, grad_normed, hidden, weight, mean, scale, grad_hidden, grad_weight, grad_bias, width, first,
                   stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    const Backward<T> norm{static_cast<const T *>(grad_normed), static_cast<const T *>(hidden),
                           static_cast<const T *>(weight),      static_cast<const W *>(mean),
                           static_cast<const W *>(scale),       static_cast<T *>(grad_hidden),
                           static_cast<W *>(grad_weight),       static_cast<W *>(grad_bias),
                           width};
    llmctl::pass_over_rows(norm, first, stop);
  });
}
