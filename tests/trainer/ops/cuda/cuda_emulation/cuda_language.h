/* The parts of CUDA's language that csrc's kernels use, for g++: an emulated GPU runs the kernels' own source on the CPU.
 * Included before each kernel's source. The threads of a block are fibers of one thread of this process, which switch at
 * barriers and shuffles only. block.h lists the checks. */
#ifndef LLMCTL_EMULATION_CUDA_LANGUAGE_H
#define LLMCTL_EMULATION_CUDA_LANGUAGE_H

#include <cmath>

#include "block.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
/* All shared variables are in one section, which is poisoned before a block starts. The address sanitizer does not guard
 * variables in named sections, so its build does not poison. */
#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static __attribute__((section("llmctl_shared")))
#endif

#define threadIdx (emulation::this_thread().index)
#define blockIdx (emulation::this_block().index)
#define blockDim (emulation::this_block().threads)
#define gridDim (emulation::this_block().blocks)

#define LLMCTL_HERE (emulation::Place{__FILE__, __LINE__})
#define __syncthreads() emulation::barrier(LLMCTL_HERE)
#define __shfl_xor_sync(mask, value, lanes) emulation::shuffle(mask, value, emulation::lane() ^ (lanes), LLMCTL_HERE)

#endif
