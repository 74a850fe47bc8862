/* The second half of every sum over rows: partial sums of blocks of rows are added up to one vector. */
#ifndef LLMCTL_COLUMN_SUMS_H
#define LLMCTL_COLUMN_SUMS_H

#include <stdint.h>

#include "../dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

/* sums [width] of `dtype` = the sum over the rows of partial [rows, width], which is float, or double where dtype is
 * double. Added in double, in the order of the rows, and rounded once. Zero rows give zeros. */
void llmctl_cpu_column_sums(int dtype, const void *partial, void *sums, int64_t rows, int64_t width);

#ifdef __cplusplus
}
#endif

#endif
