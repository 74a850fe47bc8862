/* Levels of the instruction set. Every op's cpu.cpp is compiled once per level, with LLMCTL_ISA naming it:
 * `portable` for the compiler's own target, and on x86-64 `v3` (AVX2, FMA, F16C) and `v4` (AVX-512 F, BW, CD, DQ,
 * VL) as the System V psABI defines these levels. The portable object also defines the function of the C interface,
 * which calls the best level that the processor has. */
#ifndef LLMCTL_ISA_H
#define LLMCTL_ISA_H

#include <cstdint>

#include "../dtype.h"
#include "../number.h"

#ifndef LLMCTL_ISA
#define LLMCTL_ISA portable
#define LLMCTL_ISA_IS_PORTABLE
#endif

#define LLMCTL_JOIN_(left, right) left##_##right
#define LLMCTL_JOIN(left, right) LLMCTL_JOIN_(left, right)

/* Levels of the instruction sets, in the order of llmctl_cpu_level(). The last is v4 with AVX512_BF16, which no
 * level of the psABI has: this instruction rounds to bfloat16, and unlike the loops it makes subnormal numbers 0. */
enum { LLMCTL_PORTABLE = 0, LLMCTL_V3 = 1, LLMCTL_V4 = 2, LLMCTL_V4_BFLOAT16 = 3 };
extern "C" int llmctl_cpu_level(void);

/* extern "C" void NAME PARAMETERS { BODY }, for this instruction set; `arguments` are the names of the parameters. */
#define LLMCTL_CPU_KERNEL(name, parameters, arguments)                 \
  extern "C" void LLMCTL_JOIN(name, LLMCTL_ISA) parameters;            \
  LLMCTL_DISPATCH(name, parameters, arguments)                         \
  extern "C" void LLMCTL_JOIN(name, LLMCTL_ISA) parameters

#ifndef LLMCTL_ISA_IS_PORTABLE
#define LLMCTL_DISPATCH(name, parameters, arguments)
#elif defined(__x86_64__)
/* Old compilers cannot compile for every level. */
#ifdef LLMCTL_WITHOUT_V3
#define LLMCTL_CASE_V3(call)
#else
#define LLMCTL_CASE_V3(call) case LLMCTL_V3: return call;
#endif
#ifdef LLMCTL_WITHOUT_V4
#define LLMCTL_CASE_V4(call)
#else
#define LLMCTL_CASE_V4(call) case LLMCTL_V4: case LLMCTL_V4_BFLOAT16: return call;
#endif
#define LLMCTL_DISPATCH(name, parameters, arguments)                   \
  extern "C" void name##_v3 parameters;                                \
  extern "C" void name##_v4 parameters;                                \
  extern "C" void name parameters {                                    \
    switch (llmctl_cpu_level()) {                                      \
      LLMCTL_CASE_V4(name##_v4 arguments)                              \
      LLMCTL_CASE_V3(name##_v3 arguments)                              \
      default: return name##_portable arguments;                       \
    }                                                                  \
  }
#else
#define LLMCTL_DISPATCH(name, parameters, arguments) \
  extern "C" void name parameters { name##_portable arguments; }
#endif

namespace llmctl {

/* Calls body(T{}) with the element type that `dtype` stands for. */
template <typename Body>
inline void with_dtype(int dtype, Body body) {
  switch (dtype) {
    case LLMCTL_FLOAT32: return body(float{});
    case LLMCTL_BFLOAT16: return body(bfloat16{});
    case LLMCTL_FLOAT16: return body(float16{});
    case LLMCTL_FLOAT64: return body(double{});
  }
}

}  // namespace llmctl

#endif
