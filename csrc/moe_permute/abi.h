/* Rows of tokens on their way to the experts and back. Token t has `topk` choices; choice k of it is row places[t, k] of the
 * chosen rows, or none where that is `chosen`, the number of rows: it was dropped.
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

/* tokens[t] = the sum over k of weights[t, k] * rows[places[t, k]], for tokens [first, stop); without `weights`, which may be
 * NULL, of the rows alone. Added up in float, or double, in the order of k. */
void llmctl_cpu_moe_combine(int dtype, const void *rows, const int64_t *places, const void *weights, void *tokens,
                            int64_t chosen, int64_t topk, int64_t width, int64_t first, int64_t stop);

/* Backward of the same with weights, for chosen rows [first, stop): grad_rows = weights[choice] * grad_tokens[its token],
 * and grad_weights[choice] = rows . grad_tokens[its token]. Those of dropped choices are not written. */
void llmctl_cpu_moe_combine_backward(int dtype, const void *grad_tokens, const void *rows, const int64_t *choices,
                                     const void *weights, void *grad_rows, void *grad_weights, int64_t topk,
                                     int64_t width, int64_t first, int64_t stop);

/* All `count` tokens, and all chosen rows, on the current device (common/launch/abi.h). Numbers lie in the device's
 * memory, where nobody can check them beforehand: a place that is no row counts as dropped, and a row whose choice
 * is no token's has the gradient 0. On a CPU all numbers must be valid. */
int llmctl_cuda_moe_combine(int dtype, const void *rows, const int64_t *places, const void *weights, void *tokens,
                            int64_t chosen, int64_t topk, int64_t width, int64_t count, void *stream);

int llmctl_cuda_moe_combine_backward(int dtype, const void *grad_tokens, const void *rows, const int64_t *choices,
                                     const void *weights, void *grad_rows, void *grad_weights, int64_t topk,
                                     int64_t width, int64_t chosen, int64_t count, void *stream);

#ifdef __cplusplus
}
#endif

#endif
