/* Arguments of the kernels of cross entropy; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_CROSS_ENTROPY_H
#define LLMCTL_CUDA_CROSS_ENTROPY_H

#include "../common/cuda/arguments.h"

namespace llmctl {

/* Threads of a row, and loads of 16 bytes that each has in flight. */
constexpr int kCrossEntropyThreads = 512;
constexpr int kCrossEntropyLoads = 4;

/* Columns of one row fit an int, with room for the step beyond them. */
constexpr int64 kCrossEntropyWidth = 1 << 30;

struct LogitColumns {
  int64 width, first, num_valid, vocab_size, ignored;
};

struct CrossEntropyStats {
  const void *logits, *labels;
  void *maximum, *exp_sum, *label_logit, *logit_sum, *losses;
  int64 rows;
  LogitColumns columns;
  double z_loss, smoothing;
};

struct CrossEntropyGrad {
  void *logits;
  const void *labels, *grad_losses, *global_max, *exp_sum;
  int64 rows;
  LogitColumns columns;
  double z_loss, smoothing;
};

}  // namespace llmctl

#endif
