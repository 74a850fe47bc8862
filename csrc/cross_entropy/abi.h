/* Cross entropy of logits whose columns are divided over ranks, in two halves, between which the ranks combine their
 * statistics (Shoeybi et al. 2019, arXiv:1909.08053, section 3). With logZ the logarithm of the sum of
 * exp(logit) over the vocabulary,
 *
 *   loss = logZ - (1 - smoothing) logit[label] - smoothing mean(logits) + z_loss logZ^2
 *
 * (label smoothing: Szegedy et al. 2015, arXiv:1512.00567, section 7; z-loss: Chowdhery et al. 2022, arXiv:2204.02311,
 * section 5). Its derivative by a logit is, with p = exp(logit - logZ),
 *
 *   p (1 + 2 z_loss logZ) - smoothing / vocab_size - (1 - smoothing) [the logit is the label's]
 *
 * logits: [rows, width] of `dtype`, the columns of the vocabulary from `first_column` on. The first `num_valid`, which may
 * be 0, are vocabulary; the others are padding, which is ignored. labels: [rows], ids below `vocab_size`, or
 * `ignore_index`. Statistics, one number per row, are float, or double where dtype is double. All contiguous. */
#ifndef LLMCTL_CROSS_ENTROPY_H
#define LLMCTL_CROSS_ENTROPY_H

#include <stdint.h>

#include "../common/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rows [first, stop): `maximum` of the valid logits, -infinity where there are none; `exp_sum`, the sum of exp(logit -
 * maximum); and unless they are NULL `label_logit`, 0 where the label is on another rank, NaN where it is outside the
 * vocabulary, and `logit_sum`, the sum of logit - maximum. Where the maximum is -infinity, both sums are counted from 0
 * instead. With `exponentials` (float and double only) valid logits are replaced by exp(logit - maximum), which spares
 * backward computing them again. Rows with an ignored label are not read: their statistics are those of a single logit
 * of 0. Unless `losses` is NULL these columns are the whole vocabulary, and it takes the losses. */
void llmctl_cpu_cross_entropy_stats(int dtype, void *logits, const int64_t *labels, void *maximum, void *exp_sum,
                                    void *label_logit, void *logit_sum, void *losses, int64_t width,
                                    int64_t first_column, int64_t num_valid, int64_t vocab_size, int64_t ignore_index,
                                    double z_loss, double smoothing, int exponentials, int64_t first, int64_t stop);

/* Rows [first, stop): logits, or with `exponentials` what forward made of them, become the gradient of the logits times
 * `grad_losses`; that of padding, and of rows whose label is ignored or whose grad_losses is 0, is 0. `local_max`: what
 * forward gave for this rank's columns; `global_max` and `exp_sum`: over the whole vocabulary, the sum counted from
 * `global_max`. */
void llmctl_cpu_cross_entropy_grad(int dtype, void *logits, const int64_t *labels, const void *grad_losses,
                                   const void *local_max, const void *global_max, const void *exp_sum, int64_t width,
                                   int64_t first_column, int64_t num_valid, int64_t vocab_size, int64_t ignore_index,
                                   double z_loss, double smoothing, int exponentials, int64_t first, int64_t stop);

/* All rows, on the current device (common/launch/abi.h). Logits never become exponentials. */
int llmctl_cuda_cross_entropy_stats(int dtype, const void *logits, const int64_t *labels, void *maximum, void *exp_sum,
                                    void *label_logit, void *logit_sum, void *losses, int64_t rows, int64_t width,
                                    int64_t first_column, int64_t num_valid, int64_t vocab_size, int64_t ignore_index,
                                    double z_loss, double smoothing, void *stream);
int llmctl_cuda_cross_entropy_grad(int dtype, void *logits, const int64_t *labels, const void *grad_losses,
                                   const void *global_max, const void *exp_sum, int64_t rows, int64_t width,
                                   int64_t first_column, int64_t num_valid, int64_t vocab_size, int64_t ignore_index,
                                   double z_loss, double smoothing, void *stream);

#ifdef __cplusplus
}
#endif

#endif
