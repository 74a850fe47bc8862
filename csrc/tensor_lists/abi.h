/* The sum of the squares of a whole list of tensors, for the norm that clips gradients.
 * Sums are double and always in the same order: 50 million squares in float would be off by parts in a thousand, and a
 * float's square can be infinite where the norm is not. */
#ifndef LLMCTL_TENSOR_LISTS_H
#define LLMCTL_TENSOR_LISTS_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the sum of the squares of elements [first, stop). Infinite or NaN if and only if an element is. */
void llmctl_cpu_sum_of_squares(int dtype, const void *values, double *sum, int64_t first, int64_t stop);

/* Elements that a block of threads sums. */
int64_t llmctl_cuda_list_chunk(void);

/* sum (one double) = the sum of the squares of `count` tensors with numels[i] elements each. `partial`: scratch
 * memory, a double per chunk of every tensor, a last partial chunk included. */
int llmctl_cuda_sum_of_squares(int dtype, const void *const *tensors, const int64_t *numels, int64_t count, double *partial,
                               double *sum, void *stream);

#ifdef __cplusplus
}
#endif

#endif
