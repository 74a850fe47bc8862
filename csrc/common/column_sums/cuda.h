/* Arguments of the kernel that sums a matrix over its rows. */
#ifndef LLMCTL_CUDA_COLUMN_SUMS_H
#define LLMCTL_CUDA_COLUMN_SUMS_H

#include "../cuda/arguments.h"

namespace llmctl {

/* Columns of a block, the most threads of a column, and the fewest rows of a thread. */
constexpr int kColumns = 32;
constexpr int kColumnThreads = 32;
constexpr int kColumnRows = 4;

/* sums[column] of `dtype` = the sum over rows of partial[row][column], float, or double where dtype is double. */
struct ColumnSums {
  const void *partial;
  void *sums;
  int64 rows, width;
};

}  // namespace llmctl

#endif
