/* Rounding of float32 results to 16-bit elements, many at a time. */
#ifndef LLMCTL_ROUNDING_H
#define LLMCTL_ROUNDING_H

#include <cstdint>
#include <type_traits>

#include "../number.h"
#include "isa.h"

/* Compilers that support AVX512_BF16. */
#if defined(__AVX512VL__) && (defined(__clang__) || __GNUC__ >= 10)
#define LLMCTL_HAS_BFLOAT16_ROUNDING
#include <immintrin.h>
#endif

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

/* True if an instruction rounds to T here: results then stay in float32 until all are rounded, which is faster. */
template <typename T>
bool rounds_by_instruction() {
#ifdef LLMCTL_HAS_BFLOAT16_ROUNDING
  if constexpr (std::is_same_v<T, bfloat16>) return llmctl_cpu_level() == LLMCTL_V4_BFLOAT16;
#endif
  return false;
}

#ifdef LLMCTL_HAS_BFLOAT16_ROUNDING
/* Rounds as bfloat16(float) does, except that subnormal numbers become 0. */
__attribute__((target("avx512bf16"))) inline void round_by_instruction(bfloat16 *to, const float *from, int64_t count) {
  int64_t i = 0;
  for (; i + 32 <= count; i += 32) {
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    _mm512_storeu_si512(to + i, (__m512i)both);
  }
  if (i == count) return;
  const uint32_t rest = (1u << (count - i)) - 1u;
  const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(rest), from + i);
  const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(rest >> 16), from + i + 16);
  _mm512_mask_storeu_epi16(to + i, rest, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}
#endif

template <typename T>
void round_all(T *to, const wide<T> *from, int64_t count) {
#ifdef LLMCTL_HAS_BFLOAT16_ROUNDING
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (rounds_by_instruction<T>()) return round_by_instruction(to, from, count);
  }
#endif
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

/* A line of 64 bytes; `by_instruction`: the result of rounds_by_instruction<T>(). */
template <typename T>
LLMCTL_FN void round_line(T *to, const wide<T> *from, bool by_instruction) {
#ifdef LLMCTL_HAS_BFLOAT16_ROUNDING
  if constexpr (std::is_same_v<T, bfloat16>) {
    if (by_instruction) {
      /* Not a function for that instruction set: it could not be inlined into a loop for another one. */
      __m512i both;
      asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(both) : "v"(_mm512_loadu_ps(from)), "v"(_mm512_loadu_ps(from + 16)));
      return _mm512_storeu_si512(to, both);
    }
  }
#endif
  (void)by_instruction;
#pragma omp simd
  for (int64_t i = 0; i < int64_t{64 / sizeof(T)}; ++i) to[i] = from[i];
}

}  // namespace
}  // namespace llmctl

#endif
