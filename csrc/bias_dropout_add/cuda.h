/* Arguments of the kernel; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_BIAS_DROPOUT_ADD_H
#define LLMCTL_CUDA_BIAS_DROPOUT_ADD_H

#include "../common/cuda/arguments.h"
#include "philox.h"

namespace llmctl {

constexpr int kDropoutThreads = 256;
/* Units that a thread works on; the thread loads all of them before it stores any. */
constexpr int kDropoutUnits = 2;
/* Elements of a row fit an int, with room for the step beyond them. */
constexpr int64 kDropoutInner = 1 << 30;

/* A unit is a pack of 16 bytes, which whole counters cover, or a single element. */
struct BiasDropoutAdd {
  const void *input, *bias, *residual;
  void *output;
  const int64 *positions;
  int64 rows;
  int units, channels; /* Units of a row, and of the bias. */
  int chunks;          /* of a row; one chunk is a task for the threads of one threadIdx.y */
  PhiloxKeys keys;
  unsigned threshold;
  double scale;
  bool packed;
};

}  // namespace llmctl

#endif
