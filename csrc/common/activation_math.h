/* The activations of activation/abi.h and their slopes, for g++, nvcc and NVRTC. */
#ifndef LLMCTL_ACTIVATION_MATH_H
#define LLMCTL_ACTIVATION_MATH_H

#include "activation_kind.h"
#include "scalar_math.h"

namespace llmctl {

/* f(x) and f'(x). */
template <typename W>
struct Activated {
  W value, slope;
};

/* The functions that activations are made of, as in scalar_math.h. */
struct ExactFunctions {
  template <typename W>
  LLMCTL_FN static W exponential_of_negative(W x) {
    return llmctl::exponential_of_negative(x);
  }
  template <typename W>
  LLMCTL_FN static Logistic<W> logistic(W x) {
    return llmctl::logistic(x);
  }
  template <typename W>
  LLMCTL_FN static Normal<W> normal(W x) {
    return llmctl::normal(x);
  }
  /* Within [-bound, bound]; NaN stays NaN, or becomes any value within. */
  template <typename W>
  LLMCTL_FN static W bounded(W x, W bound) {
    return x < -bound ? -bound : x > bound ? bound : x;
  }
};

/* `Functions`: functions of the same names, which may be less exact. */
template <int kind, typename Functions = ExactFunctions, typename W>
LLMCTL_FN Activated<W> activate(W x) {
  if constexpr (kind == LLMCTL_GELU) {
    const Normal<W> at = Functions::normal(x);
    return {x * at.distribution, at.distribution + x * at.density};
  } else if constexpr (kind == LLMCTL_GELU_TANH) {
    /* (1 + tanh(u)) / 2 is the logistic function of 2u, which beyond 2u = +-40 is exactly 0 or 1. */
    const W bounded = Functions::bounded(x, W(40));
    const W twice_root = W(1.5957691216057307118), cubic = twice_root * W(0.044715);
    const W square = bounded * bounded;
    const Logistic<W> at = Functions::logistic(bounded * (twice_root + cubic * square));
    const W value = x * at.value;
    return {value, at.value + value * at.rest * (twice_root + W(3) * cubic * square)};
  } else if constexpr (kind == LLMCTL_RELU) {
    /* As in torch, NaN stays NaN, and its slope is 1. */
    return {x < W(0) ? W(0) : x, x <= W(0) ? W(0) : W(1)};
  } else if constexpr (kind == LLMCTL_SQUARED_RELU) {
    const W positive = x < W(0) ? W(0) : x;
    return {positive * positive, W(2) * positive};
  } else {
    const Logistic<W> at = Functions::logistic(x);
    const W value = x * at.value;
    return {value, at.value + value * at.rest};
  }
}

}  // namespace llmctl

#endif
