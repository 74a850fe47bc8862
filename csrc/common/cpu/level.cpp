/* The choice of the level of the instruction set that the kernels run on. Compiled once, for the compiler's own
 * target. */
#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "isa.h"

namespace {

#ifdef LLMCTL_WITHOUT_V3
constexpr bool kHasV3 = false;
#else
constexpr bool kHasV3 = true;
#endif
#ifdef LLMCTL_WITHOUT_V4
constexpr bool kHasV4 = false;
#else
constexpr bool kHasV4 = true;
#endif

#if defined(__x86_64__)
/* Instructions of x86-64-v3 that compilers have no name for until gcc 11 and clang 14: MOVBE and F16C are bits 22
 * and 29 of ecx of CPUID's leaf 1, LZCNT is bit 5 of ecx of leaf 0x80000001 (AMD64 Architecture Programmer's Manual,
 * volume 3, appendix E). A virtual machine may hide any of them, and compilers use all of them. */
bool has_unnamed_of_v3() {
  unsigned eax = 0, ebx = 0, first = 0, extended = 0, edx = 0;
  constexpr unsigned kOfFirst = 1u << 22 | 1u << 29, kOfExtended = 1u << 5;
  return __get_cpuid(1, &eax, &ebx, &first, &edx) && (first & kOfFirst) == kOfFirst &&
         __get_cpuid(0x80000001, &eax, &ebx, &extended, &edx) && (extended & kOfExtended) == kOfExtended;
}

/* AVX512_BF16: bit 5 of eax of leaf 7, subleaf 1. */
bool has_bfloat16() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & 1u << 5) != 0;
}
#endif

int processor_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") &&
                  has_unnamed_of_v3();
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4 && has_bfloat16()) return LLMCTL_V4_BFLOAT16;
  return v4 ? LLMCTL_V4 : v3 ? LLMCTL_V3 : LLMCTL_PORTABLE;
#else
  return LLMCTL_PORTABLE;
#endif
}

int best_level() {
  const int has = processor_level();
  const int built = !kHasV3 ? LLMCTL_PORTABLE : !kHasV4 ? LLMCTL_V3 : LLMCTL_V4_BFLOAT16;
  return has < built ? has : built;
}

std::atomic<int> chosen{best_level()};

}  // namespace

/* The level of the processor, even if the compiler could not compile for it. */
extern "C" int llmctl_cpu_processor_level(void) { return processor_level(); }

extern "C" int llmctl_cpu_level(void) { return chosen.load(std::memory_order_relaxed); }

/* Use a lower level than the best, to try or to time it. Returns the level in use, which is never above the best. */
extern "C" int llmctl_cpu_set_level(int level) {
  const int best = best_level();
  chosen.store(level < 0 ? 0 : level > best ? best : level, std::memory_order_relaxed);
  return llmctl_cpu_level();
}
