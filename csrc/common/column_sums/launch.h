/* The second half of every sum over rows: the partial sums of segments of rows are added. */
#ifndef LLMCTL_LAUNCH_COLUMN_SUMS_H
#define LLMCTL_LAUNCH_COLUMN_SUMS_H

#include <cstdint>

namespace llmctl {

/* sums [width] of `dtype` = the sum over the rows of partial [rows, width], which is float, or double where dtype is
 * double, always in the same order. Zero rows give zeros. */
int column_sums(int dtype, const void *partial, void *sums, int64_t rows, int64_t width, void *stream);

/* The number of segments in which `rows` rows of `width` elements are summed. It depends only on the shape, so that
 * results have the same bits on every GPU. Every multiprocessor gets some segments, and there are so few that their
 * sums are small compared with the rows. */
int64_t segments_of(int64_t rows, int64_t width);

}  // namespace llmctl

#endif
