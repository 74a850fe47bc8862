/* Permutation of tokens to the experts and back. Token t has `topk` choices; choice k is row places[t, k] of the chosen
 * rows. It was dropped if places[t, k] is `chosen`, the number of rows.
 *
 * tokens, rows and their gradients: [.., width] of `dtype`; weights and their gradient [tokens, topk] float, or double where
 * dtype is double; places [tokens, topk] and choices [chosen], which is t * topk + k of each row, int64. All contiguous. */
#ifndef LLMCTL_MOE_ROWS_H
#define LLMCTL_MOE_ROWS_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* tokens[t] = the sum over k of weights[t, k] * rows[places[t, k]], for tokens [first, stop). If `weights` is NULL, all
 * weights are 1. Added in float, or double, in the order of k. */
void llmctl_cpu_moe_combine(int dtype, const void *rows, const int64_t *places, const void *weights, void *tokens,
                            int64_t chosen, int64_t topk, int64_t width, int64_t first, int64_t stop);

/* Backward of the same with weights, for chosen rows [first, stop): grad_rows = weights[choice] * grad_tokens[its token],
 * and grad_weights[choice] = rows . grad_tokens[its token]. Those of dropped choices are not written. */
void llmctl_cpu_moe_combine_backward(int dtype, const void *grad_tokens, const void *rows, const int64_t *choices,
                                     const void *weights, void *grad_rows, void *grad_weights, int64_t topk,
                                     int64_t width, int64_t first, int64_t stop);

/* All `count` tokens, and all chosen rows, on the current device (common/launch/abi.h). Indices are in the device's
 * memory, where the caller cannot check them: a place that is not a row counts as dropped, and a row with an invalid
 * choice has the gradient 0. On a CPU all indices must be valid. */
int llmctl_cuda_moe_combine(int dtype, const void *rows, const int64_t *places, const void *weights, void *tokens,
                            int64_t chosen, int64_t topk, int64_t width, int64_t count, void *stream);

int llmctl_cuda_moe_combine_backward(int dtype, const void *grad_tokens, const void *rows, const int64_t *choices,
                                     const void *weights, void *grad_rows, void *grad_weights, int64_t topk,
                                     int64_t width, int64_t chosen, int64_t count, void *stream);

#ifdef __cplusplus
}
#endif

#endif
