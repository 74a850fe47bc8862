/* Maximum and sum of exponentials of a row in one pass over it, for softmax and cross entropy. Exponents are relative to
 * a thread's largest value so far, and the threads' results are combined in the end. Milakov and Gimelshein 2018
 * (arXiv:1805.02867), algorithm 3 and section 3.1. */
#ifndef LLMCTL_ONLINE_SUMS_H
#define LLMCTL_ONLINE_SUMS_H

#include "approximations.h"

namespace llmctl {

template <typename W>
__device__ __forceinline__ W minus_infinity() {
  return W(float_of_bits(0xff800000u));
}

/* The number that is subtracted from exponents with this maximum; 0 for -infinity: exp(-infinity - -infinity) is NaN. */
template <typename W>
__device__ __forceinline__ W reference(W maximum) {
  return maximum == minus_infinity<W>() ? W(0) : maximum;
}

/* The larger value, or the value that is not NaN. */
static __device__ __forceinline__ float larger(float left, float right) { return ::fmaxf(left, right); }
static __device__ __forceinline__ double larger(double left, double right) { return ::fmax(left, right); }

/* Maximum and sum of the values that a thread, and in the end all threads of a row, have added. Only the sum has NaN. */
template <typename T>
struct OnlineSums {
  using W = wide<T>;
  W maximum = minus_infinity<W>();
  W exp_sum = 0;

  template <int N>
  __device__ __forceinline__ void add(const W (&values)[N]) {
    W top = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) top = larger(top, values[i]);
    if (top > maximum) {
      exp_sum *= power_of<T>(maximum - top);
      maximum = top;
    }
    const W from = reference(maximum);
#pragma unroll
    for (int i = 0; i < N; ++i) exp_sum += power_of<T>(values[i] - from);
  }

  /* The combined result for all threads of the row, which must call this together. */
  __device__ __forceinline__ void combine() {
    const W own = maximum;
    maximum = row_reduce(own, minus_infinity<W>(), Max());
    exp_sum = row_sum(own == minus_infinity<W>() ? exp_sum : exp_sum * exponential_of_negative(own - maximum));
  }
};

}  // namespace llmctl

#endif
