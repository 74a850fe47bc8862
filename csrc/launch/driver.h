/* Launches through CUDA's driver, which is looked up when it is first needed: no header or library of CUDA is. */
#ifndef LLMCTL_DRIVER_H
#define LLMCTL_DRIVER_H

#include <cstdint>

#include "../include/dtype.h"
#include "kernel_names.h"

namespace llmctl {

/* Blocks, and the threads of one: x for a row (or all, where there are no rows), y for the rows of a block. */
struct Grid {
  int64_t blocks;
  int threads_x, threads_y;
};

/* Puts `kernel` for a dtype, from the current device's image, on a stream, with one structure of arguments (csrc/cuda/<op>.h),
 * which is copied. Returns 0, or an error as include/cuda.h says. */
int launch(Kernel kernel, int dtype, const Grid &grid, const void *arguments, void *stream);

/* The same for a kernel without element types. */
int launch(Kernel kernel, const Grid &grid, const void *arguments, void *stream);

}  // namespace llmctl

#endif
