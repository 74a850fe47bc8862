/* AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2) over float masters, in one pass over memory. The
 * pass also divides the gradient, of any type, by a divisor for loss scale and clipping, and writes the 16-bit weights.
 *
 * Per element, with g = grad / divisor:
 *     master *= 1 - learning_rate * weight_decay
 *     exp_avg = beta1 * exp_avg + (1 - beta1) * g
 *     exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * g^2
 *     master -= learning_rate / correction1 * exp_avg / (sqrt(exp_avg_sq) / sqrt(correction2) + epsilon)
 *     copy = master
 * master is float; exp_avg and exp_avg_sq are float32 or bfloat16; grad and copy float32, bfloat16 or float16; copy may be
 * NULL. Contiguous. All is computed in float: moments in bfloat16 are rounded when they are stored, after their use.
 *
 * With remainders, master has the 16-bit remainders of float masters, whose upper halves are copy, in bfloat16: see
 * remainders.h. */
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

/* Element types of a list: numbers of dtype.h. `has_remainders`: 1 if master has remainders of copy, else 0. */
struct llmctl_adamw_dtypes {
  int grad, copy, exp_avg, exp_avg_sq, has_remainders;
};

/* Elements [first, stop) of one tensor. `past_caches`: copies are stored past the caches, for lists that would not
 * fit. */
void llmctl_cpu_adamw(const struct llmctl_adamw_dtypes *dtypes, const struct llmctl_adamw_tensor *tensor,
                      const struct llmctl_adamw *constants, int64_t first, int64_t stop, int past_caches);

/* All of `count` tensors, on the current device (common/launch/abi.h). `divisor`: NULL, or a number on the device that
 * replaces the divisor of `constants`, so that the host need not know it; NaN or infinity changes nothing. */
int llmctl_cuda_adamw(const struct llmctl_adamw_dtypes *dtypes, const struct llmctl_adamw_tensor *tensors,
                      int64_t count, const struct llmctl_adamw *constants, const double *divisor, void *stream);

#ifdef __cplusplus
}
#endif

#endif
