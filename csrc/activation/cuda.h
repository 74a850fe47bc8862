/* Arguments of the kernels of activations; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_ACTIVATION_H
#define LLMCTL_CUDA_ACTIVATION_H

#include "../common/cuda/arguments.h"

namespace llmctl {

/* Threads along a row; each processes the same channels in all rows of a segment. */
constexpr int kActivationThreads = 256;

struct Activation {
  const void *inner, *bias, *row_weight;
  int64 rows, width;
  /* Chunks of channels. A task is one chunk in one segment of rows, for the threads of one threadIdx.y. */
  int64 chunks, rows_of_segment;
  int kind;
  bool gated; /* Kernels for packs have separate names with and without gates, and with and without biases. */
};

struct ActivationForward {
  Activation shared;
  void *activated;
};

/* Partial sums: of the bias's gradient [segments, a row of inner], and of the row weights' gradient [chunks * warps
 * of a task, rows]. */
struct ActivationBackward {
  Activation shared;
  const void *grad_activated;
  void *grad_inner, *bias_partial, *weight_partial;
};

}  // namespace llmctl

#endif
