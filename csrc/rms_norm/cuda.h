/* Arguments of the kernels of RMSNorm; abi.h defines their meaning. */
#ifndef LLMCTL_CUDA_RMS_NORM_H
#define LLMCTL_CUDA_RMS_NORM_H

#include "../common/cuda/arguments.h"
#include "../common/number.h"

namespace llmctl {

/* Threads of a row. Backward keeps more elements in each. */
constexpr int kRmsNormThreads = 1024, kRmsNormBackwardThreads = 512;

/* Units of a row, packs of 16 bytes or single elements of `bytes` bytes, that a thread keeps in registers: as many as
 * possible without spills. The rest of a longer row is read again from the cache. */
LLMCTL_FN constexpr int rms_norm_kept(int bytes, bool packed) { return packed ? 2 : (bytes == 8 ? 4 : 8); }
LLMCTL_FN constexpr int rms_norm_backward_kept(int bytes, bool packed) {
  return packed && bytes == 4 ? 4 : rms_norm_kept(bytes, packed);
}

/* There may be many rows; the elements of one row fit an int, with room for the step beyond them. */
constexpr int64 kRmsNormWidth = 1 << 30;

struct RmsNorm {
  const void *hidden, *residual, *weight;
  void *sum, *normed, *scale;
  int64 rows, width;
  double epsilon;
  bool adds_one;
  bool packed; /* every row starts and ends at 16 bytes */
};

struct RmsNormBackward {
  const void *grad_normed, *grad_sum, *hidden, *weight, *scale;
  void *grad_hidden, *partial;
  int64 rows, width, segments;
  bool adds_one;
  bool packed;
};

}  // namespace llmctl

#endif
