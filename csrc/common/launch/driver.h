/* Launches through CUDA's driver. The driver is looked up at its first use: no header or library of CUDA is needed. */
#ifndef LLMCTL_DRIVER_H
#define LLMCTL_DRIVER_H

#include <cstdint>

#include "../dtype.h"

/* Hidden, so that every library launches its own kernels: tests load an emulated GPU in addition to the library. */
namespace llmctl __attribute__((visibility("hidden"))) {

/* Element types that a kernel has entry points name_<type> for; kNoType: one entry point, without a suffix. */
enum class KernelTypes { kAll, kNoDouble, kNoType };

/* A kernel of the image, declared as a constant of namespace scope in the launch.cpp that launches it. The constructor
 * registers the kernel: llmctl_cuda_load looks up every registered kernel. */
struct Kernel {
  const char *name; /* as given to LLMCTL_CUDA_KERNEL */
  KernelTypes types;
  int number; /* from 0, in the order of registration */

  Kernel(const char *kernel_name, KernelTypes kernel_types);
  Kernel(const Kernel &) = delete;
};

/* Blocks, and the threads of a block: x for a row (or all threads, where there are no rows), y for the rows of a
 * block. */
struct Grid {
  int64_t blocks;
  int threads_x, threads_y;
};

/* Launches `kernel` for a dtype, from the current device's image, on a stream, with one structure of arguments
 * (csrc/<op>/cuda.h), which is copied. Returns 0, or an error as in abi.h. */
int launch(const Kernel &kernel, int dtype, const Grid &grid, const void *arguments, void *stream);

/* The same for a kernel without element types. */
int launch(const Kernel &kernel, const Grid &grid, const void *arguments, void *stream);

}  // namespace llmctl

#endif
