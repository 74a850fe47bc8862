// csrc/common/cuda/approximations.h in loops over arrays, compiled by g++: exact but for the rounding of a GPU's instructions.
#include "cuda_emulation/cuda_language.h"

#include "../../../../csrc/common/cuda/approximations.h"

using llmctl::Approximations;

namespace emulation {
// No code here runs as a GPU thread.
const Thread *running = nullptr;
Block block;
void barrier(Place) {}
uint64_t exchange(unsigned, uint64_t value, int, Place) { return value; }
}  // namespace emulation

extern "C" void logistic(const float *x, float *value, float *rest, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const llmctl::Logistic<float> at = Approximations::logistic(x[i]);
    value[i] = at.value;
    rest[i] = at.rest;
  }
}

extern "C" void normal(const float *x, float *distribution, float *density, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const llmctl::Normal<float> at = Approximations::normal(x[i]);
    distribution[i] = at.distribution;
    density[i] = at.density;
  }
}

extern "C" void power(const float *x, float *result, float *, int64_t count) {
  for (int64_t i = 0; i < count; ++i) result[i] = llmctl::power_of<llmctl::bfloat16>(x[i]);
}
