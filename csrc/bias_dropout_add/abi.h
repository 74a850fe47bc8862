/* output = residual + dropped(input + bias), where dropping keeps an element with probability 1 - p and scales it by
 * 1 / (1 - p) (Srivastava et al. 2014, with the inverse scaling at training time).
 *
 * The mask is a function of the seed and of the element's number n in the global tensor, of which this rank may have only
 * some rows: an element is kept if lane n % 4 of Philox' counter n / 4 is at least `threshold` = p * 2^32. So backward,
 * which is the same without bias and residual, needs no saved mask, and every layout drops the same elements.
 *
 * input, residual and output: [rows, inner] of `dtype`; bias [width], which divides inner; residual and bias may be NULL.
 * positions [rows]: the rows' numbers in the global tensor. All contiguous; output may be input or residual. */
#ifndef LLMCTL_BIAS_DROPOUT_ADD_H
#define LLMCTL_BIAS_DROPOUT_ADD_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

struct llmctl_dropout {
  uint64_t seed;
  uint32_t threshold;
  double scale;
};

/* Rows [first, stop). */
void llmctl_cpu_bias_dropout_add(int dtype, const void *input, const void *bias, const void *residual, void *output,
                                 const int64_t *positions, int64_t inner, int64_t width,
                                 const struct llmctl_dropout *dropout, int64_t first, int64_t stop);

/* All rows, on the current device (common/launch/abi.h). */
int llmctl_cuda_bias_dropout_add(int dtype, const void *input, const void *bias, const void *residual, void *output,
                                 const int64_t *positions, int64_t rows, int64_t inner, int64_t width,
                                 const struct llmctl_dropout *dropout, void *stream);

#ifdef __cplusplus
}
#endif

#endif
