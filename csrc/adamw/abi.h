/* AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2) over float masters, in one pass over memory. The
 * pass also divides the gradient, of any type, by a divisor for loss scale and clipping, and writes the 16-bit weights.
 *
 * Per element, with g = grad / divisor:
 *     master *= 1 - learning_rate * weight_decay
 *     exp_avg = beta1 * exp_avg + (1 - beta1) * g
 *     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
 *     master -= learning_rate / correction1 * exp_avg / (sqrt(exp_avg_sq) / sqrt(correction2) + epsilon)
 *     copy = master
 * master, exp_avg and exp_avg_sq are float; grad and copy float32, bfloat16 or float16; copy may be NULL. Contiguous. */
#ifndef LLMCTL_ADAMW_H
#define LLMCTL_ADAMW_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* correction1 = 1 - beta1^step and correction2 = 1 - beta2^step, where `step` is this step, counted from 1. */
struct llmctl_adamw {
  double learning_rate, beta1, beta2, epsilon, weight_decay, correction1, correction2, divisor;
};

/* One tensor of a list. */
struct llmctl_adamw_tensor {
  void *master;
  const void *grad;
  void *exp_avg, *exp_avg_sq, *copy;
  int64_t numel;
};

/* Elements [first, stop) of one tensor. `past_caches`: copies are stored past the caches, for lists that would not
 * fit. */
void llmctl_cpu_adamw(int grad_dtype, int copy_dtype, const struct llmctl_adamw_tensor *tensor,
                      const struct llmctl_adamw *constants, int64_t first, int64_t stop, int past_caches);

/* All of `count` tensors, on the current device (common/launch/abi.h). */
int llmctl_cuda_adamw(int grad_dtype, int copy_dtype, const struct llmctl_adamw_tensor *tensors, int64_t count,
                      const struct llmctl_adamw *constants, void *stream);

#ifdef __cplusplus
}
#endif

#endif
