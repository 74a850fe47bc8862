#include "abi.h"

#include "../common/launch/abi.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel cross_entropy_stats("cross_entropy_stats", KernelTypes::kAll);
const Kernel cross_entropy_grad("cross_entropy_grad", KernelTypes::kAll);

llmctl::Grid grid_of(int dtype, int64_t rows, int64_t width) {
  const int64_t units = width * llmctl::bytes_of(dtype) / 16;
  return llmctl::row_grid(rows, units, llmctl::kCrossEntropyLoads, llmctl::kCrossEntropyThreads);
}

}  // namespace

extern "C" int llmctl_cuda_cross_entropy_stats(int dtype, const void *logits, const int64_t *labels, void *maximum,
                                               void *exp_sum, void *label_logit, void *logit_sum, void *losses,
                                               int64_t rows, int64_t width, int64_t first_column, int64_t num_valid,
                                               int64_t vocab_size, int64_t ignore_index, double z_loss,
                                               double smoothing, void *stream) {
  if (rows == 0) return 0;
  if (width > llmctl::kCrossEntropyWidth) return LLMCTL_CUDA_TOO_LARGE;
  const llmctl::CrossEntropyStats arguments{
      logits, labels, maximum, exp_sum, label_logit, logit_sum, losses,
      rows,   {width, first_column, num_valid, vocab_size, ignore_index}, z_loss, smoothing};
  return llmctl::launch(cross_entropy_stats, dtype, grid_of(dtype, rows, width), &arguments, stream);
}

extern "C" int llmctl_cuda_cross_entropy_grad(int dtype, void *logits, const int64_t *labels, const void *grad_losses,
                                              const void *global_max, const void *exp_sum, int64_t rows, int64_t width,
                                              int64_t first_column, int64_t num_valid, int64_t vocab_size,
                                              int64_t ignore_index, double z_loss, double smoothing, void *stream) {
  if (rows == 0 || width == 0) return 0;
  if (width > llmctl::kCrossEntropyWidth) return LLMCTL_CUDA_TOO_LARGE;
  const llmctl::CrossEntropyGrad arguments{
      logits, labels, grad_losses, global_max, exp_sum,
      rows,   {width, first_column, num_valid, vocab_size, ignore_index}, z_loss, smoothing};
  return llmctl::launch(cross_entropy_grad, dtype, grid_of(dtype, rows, width), &arguments, stream);
}
