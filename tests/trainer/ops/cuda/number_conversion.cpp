// Every conversion of csrc/common/number.h, in loops over arrays, as the kernels compile them.
#include <cstdint>

#include "../../../../csrc/common/number.h"

using llmctl::bfloat16;
using llmctl::float16;

extern "C" void widen_bfloat16(const bfloat16 *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

extern "C" void widen_float16(const float16 *from, float *to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
}

extern "C" void round_bfloat16(const float *from, bfloat16 *to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = bfloat16(from[i]);
}

extern "C" void round_float16(const float *from, float16 *to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = float16(from[i]);
}
