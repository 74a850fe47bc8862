/* RMSNorm over the last dim: normed = hidden * scale * weight with scale = 1 / sqrt(mean(hidden^2) + epsilon), one per row.
 * Zhang and Sennrich 2019 (arXiv:1910.07467), equation 4. With `adds_one` the factor is 1 + weight instead of weight, which is
 * not rounded to `dtype`.
 *
 * hidden, normed, their gradients and residual: [rows, width] of `dtype`; weight [width] of the same; scale [rows] and the
 * gradient of the weight float, or double where dtype is double. All contiguous. An output may be an input's memory where
 * both have the same shape. */
#ifndef LLMCTL_RMS_NORM_H
#define LLMCTL_RMS_NORM_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, stop). With `residual` the norm is of hidden + residual, which is written to `sum`; without it both
 * are NULL. `past_caches`: `normed` is stored past the caches, because all of it would not fit. */
void llmctl_cpu_rms_norm(int dtype, const void *hidden, const void *residual, const void *weight, void *sum, void *normed,
                         void *scale, int64_t width, double epsilon, int adds_one, int64_t first, int64_t stop,
                         int past_caches);

/* Rows [first, stop). Adds to `grad_weight` [width]. `grad_sum`, NULL or [rows, width], is added to the result,
 * which `past_caches` stores past the caches. */
void llmctl_cpu_rms_norm_backward(int dtype, const void *grad_normed, const void *grad_sum, const void *hidden,
                                  const void *weight, const void *scale, void *grad_hidden, void *grad_weight,
                                  int64_t width, int adds_one, int64_t first, int64_t stop, int past_caches);

/* All rows, on the current device (common/launch/abi.h). */
int llmctl_cuda_rms_norm(int dtype, const void *hidden, const void *residual, const void *weight, void *sum, void *normed,
                         void *scale, int64_t rows, int64_t width, double epsilon, int adds_one, void *stream);

/* The number of rows of `partial`, each `width` wide. */
int64_t llmctl_cuda_rms_norm_segments(int64_t rows, int64_t width);

/* All rows. `grad_weight` is of `dtype` and is overwritten. `partial`: scratch memory, [segments, width]
 * of float, or double where dtype is double. */
int llmctl_cuda_rms_norm_backward(int dtype, const void *grad_normed, const void *grad_sum, const void *hidden,
                                  const void *weight, const void *scale, void *grad_hidden, void *grad_weight,
                                  void *partial, int64_t rows, int64_t width, int adds_one, void *stream);

#ifdef __cplusplus
}
#endif

#endif
