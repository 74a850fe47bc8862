#include "abi.h"

#include "../common/column_sums/launch.h"
#include "../common/launch/abi.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Grid;
using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel rms_norm("rms_norm", KernelTypes::kAll);
const Kernel rms_norm_backward("rms_norm_backward", KernelTypes::kAll);

int64_t units_of(int dtype, int64_t width, bool packed) {
  return packed ? width * llmctl::bytes_of(dtype) / 16 : width;
}

}  // namespace

extern "C" int llmctl_cuda_rms_norm(int dtype, const void *hidden, const void *residual, const void *weight, void *sum,
                                    void *normed, void *scale, int64_t rows, int64_t width, double epsilon,
                                    int adds_one, void *stream) {
  if (rows == 0 || width == 0) return 0;
  if (width > llmctl::kRmsNormWidth) return LLMCTL_CUDA_TOO_LARGE;
  const bool packed = llmctl::packs(dtype, width, {hidden, residual, weight, sum, normed});
  const llmctl::RmsNorm arguments{hidden, residual, weight, sum, normed, scale, rows, width, epsilon, adds_one != 0, packed};
  const int kept = llmctl::rms_norm_kept(static_cast<int>(llmctl::bytes_of(dtype)), packed);
  const Grid grid = llmctl::row_grid(rows, units_of(dtype, width, packed), kept, llmctl::kRmsNormThreads);
  return llmctl::launch(rms_norm, dtype, grid, &arguments, stream);
}

extern "C" int64_t llmctl_cuda_rms_norm_segments(int64_t rows, int64_t width) {
  return llmctl::segments_of(rows, width);
}

extern "C" int llmctl_cuda_rms_norm_backward(int dtype, const void *grad_normed, const void *grad_sum,
                                             const void *hidden, const void *weight, const void *scale,
                                             void *grad_hidden, void *grad_weight, void *partial, int64_t rows,
                                             int64_t width, int adds_one, void *stream) {
  if (width == 0) return 0;
  if (width > llmctl::kRmsNormWidth) return LLMCTL_CUDA_TOO_LARGE;
  const int64_t segments = llmctl::segments_of(rows, width);
  const bool packed = llmctl::packs(dtype, width, {grad_normed, grad_sum, hidden, weight, grad_hidden, partial});
  const llmctl::RmsNormBackward arguments{grad_normed, grad_sum, hidden,    weight,        scale, grad_hidden, partial,
                                          rows,        width,    segments,  adds_one != 0, packed};
  const int kept = llmctl::rms_norm_backward_kept(static_cast<int>(llmctl::bytes_of(dtype)), packed);
  const Grid grid =
      llmctl::row_grid(segments, units_of(dtype, width, packed), kept, llmctl::kRmsNormBackwardThreads);
  const int error = llmctl::launch(rms_norm_backward, dtype, grid, &arguments, stream);
  return error != 0 ? error : llmctl::column_sums(dtype, partial, grad_weight, segments, width, stream);
}
