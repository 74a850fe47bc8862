/* Arguments of the kernels over lists of tensors; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_TENSOR_LISTS_H
#define LLMCTL_CUDA_TENSOR_LISTS_H

#include "../common/cuda/arguments.h"

namespace llmctl {

constexpr int kListThreads = 256;
/* Threads of the one block that adds the sums of all others. */
constexpr int kPartialThreads = 1024;
/* Elements of a block. */
constexpr int64 kListChunk = 16384;
/* Tensors of a launch: as many as the 4096 bytes of a kernel's parameters hold. */
constexpr int kListTensors = 160;

struct ListedTensor {
  const void *values;
  int64 numel;
  int first_block;
  bool packed; /* the tensor is aligned to 16 bytes */
};

struct TensorList {
  ListedTensor tensors[kListTensors];
  int count;
  double *partial; /* One sum per block of this launch. */
};

static_assert(sizeof(TensorList) <= 4096, "a kernel has 4096 bytes of parameters");

struct SumOfPartials {
  const double *partial;
  double *sum;
  int64 count;
};

}  // namespace llmctl

#endif
