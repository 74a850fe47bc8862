/* Activations of feed-forward layers: activated = weight * f(gate + bias) * (up + bias) of packed pairs of gates and
 * ups, or weight * f(inner + bias). f: SiLU x / (1 + exp(-x)); GeLU x * Phi(x), or its tanh approximation (Hendrycks
 * and Gimpel 2016, arXiv:1606.08415, section 2); ReLU max(x, 0), or its square (So et al. 2021, arXiv:2109.08668,
 * section 3). Pairs: SwiGLU and GeGLU of Shazeer 2020 (arXiv:2002.05202), equation 6.
 *
 * inner, grad_inner: [rows, 2 * width] (a row's gates, then its ups) where `gated`, else [rows, width]; activated and
 * its gradient [rows, width]; bias as long as a row of inner, or NULL; all of `dtype`. row_weight [rows], or NULL, and
 * the gradients of row_weight and bias float, or double where dtype is double. All contiguous. */
#ifndef LLMCTL_ACTIVATION_H
#define LLMCTL_ACTIVATION_H

#include <stdint.h>

#include "../common/activation_kind.h"
#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, stop). `past_caches`: all results together would not fit in the caches; results of 16 bits are then
 * stored past them. */
void llmctl_cpu_activation(int dtype, int kind, int gated, const void *inner, const void *bias, const void *row_weight,
                           void *activated, int64_t width, int64_t first, int64_t stop, int past_caches);

/* Rows [first, stop). Adds to grad_bias, which is as long as a row of inner, or NULL. grad_row_weight is [rows], or
 * NULL. */
void llmctl_cpu_activation_backward(int dtype, int kind, int gated, const void *grad_activated, const void *inner,
                                    const void *bias, const void *row_weight, void *grad_inner, void *grad_bias,
                                    void *grad_row_weight, int64_t width, int64_t first, int64_t stop,
                                    int past_caches);

/* All rows, on the current device (common/launch/abi.h). */
int llmctl_cuda_activation(int dtype, int kind, int gated, const void *inner, const void *bias, const void *row_weight,
                           void *activated, int64_t rows, int64_t width, void *stream);

/* The number of elements of `partial` for a call with these arguments. */
int64_t llmctl_cuda_activation_partials(int dtype, int gated, const void *grad_activated, const void *inner,
                                        const void *bias, const void *row_weight, const void *grad_inner, int64_t rows,
                                        int64_t width);

/* All rows. grad_bias is of `dtype`, and is written, not added to. `partial`: scratch memory, float, or double where
 * dtype is double, aligned to 16 bytes. */
int llmctl_cuda_activation_backward(int dtype, int kind, int gated, const void *grad_activated, const void *inner,
                                    const void *bias, const void *row_weight, void *grad_inner, void *grad_bias,
                                    void *grad_row_weight, void *partial, int64_t rows, int64_t width, void *stream);

#ifdef __cplusplus
}
#endif

#endif
