/* The second half of every sum over rows: partial sums of stretches of rows are added up to one vector. */
#ifndef LLMCTL_LAUNCH_COLUMN_SUMS_H
#define LLMCTL_LAUNCH_COLUMN_SUMS_H

#include <cstdint>

namespace llmctl {

/* sums [width] of `dtype` = the sum over the rows of partial [rows, width], which is float, or double where dtype is
 * double, always in the same order. Zero rows give zeros. */
int column_sums(int dtype, const void *partial, void *sums, int64_t rows, int64_t width, void *stream);

/* The number of stretches in which `rows` rows of `width` elements are summed. It depends on the shape alone, so
 * that results have the same bits everywhere. There are enough stretches for every multiprocessor, and few enough
 * that their sums are small beside the rows. */
int64_t stretches_of(int64_t rows, int64_t width);

}  // namespace llmctl

#endif
