/* 16-bit floating-point numbers, and the type in which each element type is computed. For g++, nvcc and NVRTC, with
 * headers of this folder only: NVRTC has no others.
 *
 * In `#pragma omp simd` loops write `result[i] = value`, not `result[i] = T(value)`, and keep no local variable of a
 * 16-bit type: g++ 12 makes an array of lanes of every object there, and then does not vectorise the loop. */
#ifndef LLMCTL_NUMBER_H
#define LLMCTL_NUMBER_H

#ifdef __CUDACC__
#define LLMCTL_FN __host__ __device__ __forceinline__
#else
#define LLMCTL_FN inline __attribute__((always_inline))
#endif

namespace llmctl {

LLMCTL_FN unsigned bits_of(float value) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(value);
#else
  unsigned bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

LLMCTL_FN float float_of_bits(unsigned bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

/* The upper half of a float. */
struct bfloat16 {
  unsigned short bits;

  bfloat16() = default;
  LLMCTL_FN explicit bfloat16(float value) : bits(rounded(value)) {}
  LLMCTL_FN bfloat16 &operator=(float value) {
    bits = rounded(value);
    return *this;
  }
  LLMCTL_FN operator float() const { return float_of_bits(static_cast<unsigned>(bits) << 16); }

 private:
  /* To nearest, ties to even; NaN stays NaN. */
  LLMCTL_FN static unsigned short rounded(float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const unsigned bits = bits_of(value);
    const unsigned nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : nearest);
#endif
  }
};

/* IEEE 754 binary16. */
struct float16 {
  unsigned short bits;

  float16() = default;
  LLMCTL_FN explicit float16(float value) : bits(rounded(value)) {}
  LLMCTL_FN float16 &operator=(float value) {
    bits = rounded(value);
    return *this;
  }
  LLMCTL_FN operator float() const {
#ifdef __CUDA_ARCH__
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
#else
    const unsigned sign = (bits & 0x8000u) << 16;
    const unsigned magnitude = static_cast<unsigned>(bits & 0x7fffu) << 13;
    /* The exponent's bias changes from 15 to 127. A subnormal's fraction is added to 2^-14, which is then subtracted, so
     * that no float in between is subnormal: processors may flush these to zero. Infinity and NaN have all bits of the
     * exponent set. */
    const unsigned subnormal = bits_of(float_of_bits(magnitude + (113u << 23)) - float_of_bits(113u << 23));
    const unsigned normal = magnitude + (112u << 23);
    const unsigned finite = magnitude < (1u << 23) ? subnormal : normal;
    const unsigned special = magnitude >= (31u << 23) ? 0x7f800000u : 0u;
    return float_of_bits(finite | special | sign);
#endif
  }

 private:
  LLMCTL_FN static unsigned short rounded(float value) {
#ifdef __CUDA_ARCH__
    unsigned short result;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result) : "f"(value));
    return result;
#else
    const unsigned bits = bits_of(value);
    const unsigned sign = (bits >> 16) & 0x8000u;
    const unsigned magnitude = bits & 0x7fffffffu;
    /* A sum with a number whose last place is that of a subnormal half: the addition rounds. */
    const unsigned subnormal = bits_of(float_of_bits(magnitude) + 0.5f) - bits_of(0.5f);
    const unsigned normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const unsigned finite = magnitude < (113u << 23) ? subnormal : normal;
    const unsigned too_large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return static_cast<unsigned short>((magnitude >= 0x477ff000u ? too_large : finite) | sign);
#endif
  }
};

/* What an element type is computed and accumulated in. */
template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};
template <typename T>
using wide = typename Wide<T>::type;

}  // namespace llmctl

#endif
