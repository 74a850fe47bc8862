/* Arguments of the kernels over rows of tokens; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_MOE_ROWS_H
#define LLMCTL_CUDA_MOE_ROWS_H

#include "../common/cuda/arguments.h"

namespace llmctl {

constexpr int kMoeThreads = 256;
/* Packs of a row per thread; longer rows get more threads. */
constexpr int kMoePacks = 2;

struct MoeCombine {
  const void *rows;
  const int64 *places;
  const void *weights;
  void *tokens;
  int64 chosen, topk, width, count;
  bool packed; /* every row starts and ends at 16 bytes */
};

struct MoeCombineBackward {
  const void *grad_tokens, *rows;
  const int64 *choices;
  const void *weights;
  void *grad_rows, *grad_weights;
  int64 topk, width, chosen, count;
  bool packed;
};

}  // namespace llmctl

#endif
