/* Arguments of the kernels of softmax; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_SOFTMAX_H
#define LLMCTL_CUDA_SOFTMAX_H

#include "../common/cuda/arguments.h"

namespace llmctl {

constexpr int kSoftmaxThreads = 512;
/* Packs of a row that a thread keeps in registers; longer rows get more threads. What exceeds the registers of all
 * threads is read again from the cache. */
constexpr int kSoftmaxPacks = 4;

/* Keys of a row fit an int, with room for the step beyond them, and the number of a row fits 32 bits. */
constexpr int64 kSoftmaxWidth = 1 << 30, kSoftmaxRows = (1ll << 32) - 1;

struct ScoreRows {
  int64 rows, queries, width;
  double scale;
  bool packed; /* every row starts and ends at 16 bytes, and every row of a mask at as many elements */
};

struct MaskedSoftmax {
  const void *scores;
  const unsigned char *mask;
  void *shares;
  ScoreRows shape;
  int64 heads, batch_stride, head_stride, query_stride;
};

struct CausalSoftmax {
  const void *scores;
  void *shares;
  ScoreRows shape;
};

struct SoftmaxBackward {
  const void *grad_shares, *shares;
  void *grad_scores;
  ScoreRows shape;
  bool causal;
};

}  // namespace llmctl

#endif
