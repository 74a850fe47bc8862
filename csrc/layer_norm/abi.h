/* LayerNorm over the last dim: normed = (hidden - mean) * scale * weight + bias with scale = 1 / sqrt(variance + epsilon),
 * mean and variance those of the row. Ba et al. 2016 (arXiv:1607.06450), equation 3.
 *
 * hidden, normed and their gradients: [rows, width] of `dtype`; weight and bias [width] of the same; mean and scale [rows]
 * and the gradients of weight and bias float, or double where dtype is double. All contiguous. An output may be an input's
 * memory where both have the same shape. There is no CUDA kernel: torch has one. */
#ifndef LLMCTL_LAYER_NORM_H
#define LLMCTL_LAYER_NORM_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, stop). `past_caches`: `normed` is stored past the caches, because all of it would not fit. */
void llmctl_cpu_layer_norm(int dtype, const void *hidden, const void *weight, const void *bias, void *normed, void *mean,
                           void *scale, int64_t width, double epsilon, int64_t first, int64_t stop, int past_caches);

/* Rows [first, stop); `grad_weight` and `grad_bias` [width] are added to; `past_caches` is for `grad_hidden`. */
void llmctl_cpu_layer_norm_backward(int dtype, const void *grad_normed, const void *hidden, const void *weight,
                                    const void *mean, const void *scale, void *grad_hidden, void *grad_weight,
                                    void *grad_bias, int64_t width, int64_t first, int64_t stop, int past_caches);

#ifdef __cplusplus
}
#endif

#endif
