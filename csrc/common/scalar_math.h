/* Functions of one number, for g++, nvcc and NVRTC. On a CPU those of float consist of arithmetic and conversions, so that
 * loops over them are vectorised for any instruction set; those of double are the C library's. */
#ifndef LLMCTL_SCALAR_MATH_H
#define LLMCTL_SCALAR_MATH_H

#ifndef __CUDACC__
#include <cmath>
#endif

#include "number.h"

namespace llmctl {

/* exp(x) of x <= 0, within 1 unit in the last place; 0 below -87.3, NaN of NaN. */
LLMCTL_FN float exponential_of_negative(float x) {
#ifdef __CUDA_ARCH__
  return ::expf(x);
#else
  const float below = -87.33654f;
  const float inside = below > x ? below : x;
  /* Added to 1.5 x 2^23 a float has no fraction: the sum is rounded, and its last bits are the power's exponent. */
  const float rounder = 12582912.0f + 127.0f;
  const float shifted = inside * 1.44269504f + rounder;
  const float whole = shifted - rounder;
  /* ln 2 in two parts, of which the first times a whole number is exact (Cody and Waite 1980). */
  const float rest = (inside - whole * 0.693359375f) + whole * 2.12194440e-4f;
  /* 1 + rest + rest^2 series, whose coefficients make the relative error, 3e-9, least over [-ln 2 / 2, ln 2 / 2]. */
  float series = 1.3814598e-3f;
  series = series * rest + 8.3687169e-3f;
  series = series * rest + 4.1668388e-2f;
  series = series * rest + 1.6666521e-1f;
  series = series * rest + 4.9999993e-1f;
  const float near = (series * rest) * rest + rest + 1.0f;
  const float result = near * float_of_bits(bits_of(shifted) << 23);
  return x < below ? 0.0f : result;
#endif
}
LLMCTL_FN double exponential_of_negative(double x) {
#ifdef __CUDACC__
  return ::exp(x);
#else
  return std::exp(x);
#endif
}

/* 1 / (1 + exp(-x)), and its complement to 1. */
template <typename W>
struct Logistic {
  W value, rest;
};

/* Both to full precision: the smaller one is not what subtraction leaves of the larger. */
template <typename W>
LLMCTL_FN Logistic<W> logistic(W x) {
  const W power = exponential_of_negative(x < W(0) ? x : -x);
  const W large = W(1) / (W(1) + power), small = power * large;
  return {x < W(0) ? small : large, x < W(0) ? large : small};
}

/* The normal distribution Phi(x) and its density Phi'(x). */
template <typename W>
struct Normal {
  W distribution, density;
};

LLMCTL_FN Normal<double> normal(double x) {
#ifdef __CUDACC__
  const double twice = ::erfc(x * -0.70710678118654752440);
#else
  const double twice = std::erfc(x * -0.70710678118654752440);
#endif
  return {0.5 * twice, 0.39894228040143267794 * exponential_of_negative(-0.5 * x * x)};
}

/* The density, and the smaller one of Phi(x) and 1 - Phi(x), within 4 units in the last place, and x^2 / 4 units more, since
 * the exponent is rounded. */
LLMCTL_FN Normal<float> normal(float x) {
  const float size = x < 0.0f ? -x : x;
  const float power = exponential_of_negative(-0.5f * size * size);
  /* 1 - Phi(a) = exp(-a^2 / 2) P(t), t = 1 / (1 + 5/16 a), the form of Hastings 1955 (in Abramowitz and Stegun, 7.1.26), of
   * the 10th degree: a least-maximum fit over 0 <= a <= 14, whose relative error is 1.0e-8. */
  const float t = 1.0f / (1.0f + 0.3125f * size);
  float series = -0.0188173112f;
  series = series * t + 0.0902958214f;
  series = series * t - 0.148392975f;
  series = series * t + 0.0706701726f;
  series = series * t + 0.000488727121f;
  series = series * t + 0.0539094061f;
  series = series * t + 0.0906535462f;
  series = series * t + 0.111763321f;
  series = series * t + 0.124764644f;
  series = series * t + 0.124664634f;
  const float tail = power * (series * t);
  return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * power};
}

}  // namespace llmctl

#endif
