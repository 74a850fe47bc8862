/* Arguments of the kernel of AdamW; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_ADAMW_H
#define LLMCTL_CUDA_ADAMW_H

#include "../common/cuda/arguments.h"

namespace llmctl {

constexpr int kAdamWThreads = 256;
/* Elements of a block. */
constexpr int64 kAdamWChunk = 8192;
/* Tensors of a launch: as many as the 4096 bytes of a kernel's parameters hold. */
constexpr int kAdamWTensors = 60;

struct AdamWTensor {
  void *master;
  const void *grad;
  void *exp_avg, *exp_avg_sq, *copy;
  int64 numel;
  int first_block;
  bool packed; /* all tensors are aligned to whole packs of four elements */
};

struct AdamW {
  AdamWTensor tensors[kAdamWTensors];
  int count, copy_dtype;
  bool has_low_average, has_low_square; /* exp_avg, exp_avg_sq are bfloat16 */
  bool has_remainders;                  /* master has the remainders of copy, which is bfloat16 */
  const double *divisor;                /* null, or replaces over_divisor; not finite: nothing changes */
  float kept, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, over_root_correction2, epsilon, over_divisor;
};

static_assert(sizeof(AdamW) <= 4096, "a kernel has 4096 bytes of parameters");

}  // namespace llmctl

#endif
