/* Functions for results of 16 bits, within 4e-6 of the exact value: 16 bits do not have the last digits of float32. */
#ifndef LLMCTL_ROUGH_FUNCTIONS_H
#define LLMCTL_ROUGH_FUNCTIONS_H

#include <algorithm>
#include <type_traits>

#include "../activation_math.h"

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

struct RoughFunctions : ExactFunctions {
  /* exp(x) of x <= 0, within 3e-7, plus |x| 6e-8 because the exponent is rounded; exactly 0 below -88, NaN of NaN. */
  LLMCTL_FN static float exponential_of_negative(float x) {
    const float exponent = x * 1.44269504f, low = -127.0f;
    /* With a biased exponent of 0 the power is 0. */
    const float inside = low > exponent ? low : exponent;
    /* As in exponential_of_negative(float), but of base 2. */
    const float rounder = 12582912.0f + 127.0f;
    const float shifted = inside + rounder;
    const float rest = inside - (shifted - rounder);
    /* 2^rest: coefficients with the least relative error, 8e-8, over [-1/2, 1/2]. */
    float series = 1.32764725e-3f;
    series = series * rest + 9.67554096e-3f;
    series = series * rest + 5.55071309e-2f;
    series = series * rest + 2.40221202e-1f;
    series = series * rest + 6.93146944e-1f;
    series = series * rest + 1.0f;
    return series * float_of_bits(bits_of(shifted) << 23);
  }

  /* 1 / (1 + exp(-x)), exactly 0 left of -89. The complement is 1 minus the value: its absolute error is that of
   * float32. NaN may become any value of the range. */
  LLMCTL_FN static Logistic<float> logistic(float x) {
    /* Clamped to 2^-126 .. 2^128, which is infinity. The clamp compares bits as integers: compilers have a vector minimum
     * of integers, but would use masks for floats. */
    const unsigned exponent = bits_of(x * -1.44269504f);
    const int above = static_cast<int>(std::min(exponent, bits_of(-126.0f)));
    const float inside = float_of_bits(static_cast<unsigned>(std::min(above, static_cast<int>(bits_of(128.0f)))));
    /* As in exponential_of_negative(float), but of base 2. */
    const float rounder = 12582912.0f + 127.0f;
    const float shifted = inside + rounder;
    const float rest = inside - (shifted - rounder);
    /* 2^rest: coefficients with the least relative error, 2.6e-6, over [-1/2, 1/2]. */
    float series = 9.5701017e-3f;
    series = series * rest + 5.59178603e-2f;
    series = series * rest + 2.40247448e-1f;
    series = series * rest + 6.93121815e-1f;
    series = series * rest + 9.99999261e-1f;
    const float value = 1.0f / (1.0f + series * float_of_bits(bits_of(shifted) << 23));
    return {value, 1.0f - value};
  }
};

/* Functions for elements of type T. */
template <typename T>
using FunctionsFor = std::conditional_t<sizeof(T) == 2, RoughFunctions, ExactFunctions>;

}  // namespace
}  // namespace llmctl

#endif
