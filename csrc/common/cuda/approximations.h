/* Functions of one number in few instructions, exact to more digits than 16 bits hold. The exact functions of
 * scalar_math.h take longer than the memory accesses. The errors below are relative. Those of the instructions are in the
 * PTX ISA (ex2.approx.ftz, rcp.approx.ftz: https://docs.nvidia.com/cuda/parallel-thread-execution/). */
#ifndef LLMCTL_APPROXIMATIONS_H
#define LLMCTL_APPROXIMATIONS_H

#include "../activation_math.h"
#include "device.h"

namespace llmctl {

constexpr float kLog2OfE = 1.44269504f;

/* True if values of type T use the functions of this file. */
template <typename T>
constexpr bool kApproximates = sizeof(T) == 2;

/* 2^x, within 2^-22; 0 where 2^x would be subnormal. */
static __device__ __forceinline__ float power_of_two(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return x < -126.0f ? 0.0f : ::exp2f(x);
#endif
}

/* 1 / x, within 2^-23; 0 for x beyond 2^126. */
static __device__ __forceinline__ float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return x > 8.5070592e37f ? 0.0f : 1.0f / x;
#endif
}

/* exp(x) of x <= 0 for values of type T; of 16-bit ones within (1 + |x|) 2^-22. */
template <typename T>
static __device__ __forceinline__ wide<T> power_of(wide<T> x) {
  if constexpr (kApproximates<T>) {
    return power_of_two(x * kLog2OfE);
  } else {
    return exponential_of_negative(x);
  }
}

/* The functions that activations are made of (activation_math.h), for 16-bit values. */
struct Approximations {
  static __device__ __forceinline__ Logistic<float> logistic(float x) {
    const float power = power_of_two(x * -kLog2OfE);
    const float value = reciprocal(1.0f + power);
    /* An infinite power has the value 0, and their product would be NaN. */
    return {value, ::fminf(power, 3.4028235e38f) * value};
  }

  /* As in scalar_math.h, but of the 5th degree, in t = 1 / (1 + 3/8 a): within 2.8e-5. */
  static __device__ __forceinline__ Normal<float> normal(float x) {
    const float size = ::fabsf(x);
    const float power = power_of_two(x * x * (-0.5f * kLog2OfE));
    const float t = reciprocal(1.0f + 0.375f * size);
    float series = -0.0911275744f;
    series = series * t + 0.201359734f;
    series = series * t + 0.0827287212f;
    series = series * t + 0.157997668f;
    series = series * t + 0.149032786f;
    const float tail = power * (series * t);
    return {x < 0.0f ? tail : 1.0f - tail, 0.39894228f * power};
  }

  static __device__ __forceinline__ float bounded(float x, float bound) { return ::fmaxf(::fminf(x, bound), -bound); }
};

/* Functions for values of type T, for activate<>. */
template <bool approximates>
struct FunctionsOf {
  using type = Approximations;
};
template <>
struct FunctionsOf<false> {
  using type = ExactFunctions;
};
template <typename T>
using Functions = typename FunctionsOf<kApproximates<T>>::type;

}  // namespace llmctl

#endif
