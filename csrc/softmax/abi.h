/* Softmax over the last dim of scaled attention scores: shares = exp(scale scores) / sum of exp(scale scores), over the
 * keys that a query sees. Masked keys, and all keys of a query that sees none, have share 0. Vaswani et al. 2017
 * (arXiv:1706.03762), equation 1 and section 3.2.3.
 *
 * scores, shares and their gradients: [batch, heads, queries, width] of `dtype`, contiguous; sums are float, of double
 * elements double. An output may be an input's memory. */
#ifndef LLMCTL_SOFTMAX_H
#define LLMCTL_SOFTMAX_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, stop). `mask`: one byte per score, not 0 where it is not seen; the row of batch b, head h and query q
 * starts at b batch_stride + h head_stride + q query_stride, where a stride is 0 if all share it. */
void llmctl_cpu_scaled_masked_softmax(int dtype, const void *scores, const unsigned char *mask, void *shares,
                                      int64_t heads, int64_t queries, int64_t width, int64_t batch_stride,
                                      int64_t head_stride, int64_t query_stride, double scale, int64_t first,
                                      int64_t stop);

/* Rows [first, stop). Query q sees the first q + 1 + width - queries keys: the last query sees all. */
void llmctl_cpu_scaled_causal_softmax(int dtype, const void *scores, void *shares, int64_t queries, int64_t width,
                                      double scale, int64_t first, int64_t stop);

/* Rows [first, stop), for both masks. `causal`: masked scores are not read. */
void llmctl_cpu_scaled_softmax_backward(int dtype, const void *grad_shares, const void *shares, void *grad_scores,
                                        int64_t queries, int64_t width, double scale, int causal, int64_t first,
                                        int64_t stop);

/* All rows, on the current device (common/launch/abi.h). */
int llmctl_cuda_scaled_masked_softmax(int dtype, const void *scores, const unsigned char *mask, void *shares,
                                      int64_t heads, int64_t queries, int64_t rows, int64_t width, int64_t batch_stride,
                                      int64_t head_stride, int64_t query_stride, double scale, void *stream);
int llmctl_cuda_scaled_causal_softmax(int dtype, const void *scores, void *shares, int64_t queries, int64_t rows,
                                      int64_t width, double scale, void *stream);
int llmctl_cuda_scaled_softmax_backward(int dtype, const void *grad_shares, const void *shares, void *grad_scores,
                                        int64_t queries, int64_t rows, int64_t width, double scale, int causal,
                                        void *stream);

#ifdef __cplusplus
}
#endif

#endif
