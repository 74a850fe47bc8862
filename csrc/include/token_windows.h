/* What a step makes of windows of tokens, each of one token more than a sample: trainer/data/window_parts.py says what, and
 * is the same without a compiler. */
#ifndef LLMCTL_TOKEN_WINDOWS_H
#define LLMCTL_TOKEN_WINDOWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Windows [rows, length + 1] of tokens, uint16_t, int32_t or int64_t, which take `width` bytes each, become tokens and
 * labels, [rows, length] each: the first ones of each window, and its last ones. On the way it is found where documents
 * end: with the token `end`, and with their sample. Returns how many numbers `bounds` takes.
 *
 * counts: uint8_t [rows, length], whether a token is not `end`, or NULL. firsts: [rows + 1], where in bounds each sample
 * begins, and how many numbers it takes. bounds: of one sample after another 0, where its later documents begin, and
 * `length`, of which as many are written as there is `room` for. */
int64_t llmctl_divide_windows(const void *windows, int64_t width, int64_t rows, int64_t length, int64_t end,
                              int64_t *tokens, int64_t *labels, uint8_t *counts, int64_t *firsts, int64_t *bounds,
                              int64_t room);

/* The place of each token within its document, [rows, length], of bounds and firsts as above. */
void llmctl_document_positions(const int64_t *firsts, const int64_t *bounds, int64_t rows, int64_t length,
                               int32_t *positions);

#ifdef __cplusplus
}
#endif

#endif
