#include "abi.h"

#include "../common/launch/abi.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel scaled_masked_softmax("scaled_masked_softmax", KernelTypes::kAll);
const Kernel scaled_causal_softmax("scaled_causal_softmax", KernelTypes::kAll);
const Kernel scaled_softmax_backward("scaled_softmax_backward", KernelTypes::kAll);

llmctl::ScoreRows shape_of(int dtype, std::initializer_list<const void *> pointers, int64_t rows, int64_t queries,
                           int64_t width, double scale) {
  return {rows, queries, width, scale, llmctl::packs(dtype, width, pointers)};
}

bool is_too_large(int64_t rows, int64_t width) {
  return rows > llmctl::kSoftmaxRows || width > llmctl::kSoftmaxWidth;
}

llmctl::Grid grid_of(int dtype, const llmctl::ScoreRows &shape) {
  const int64_t units = shape.packed ? shape.width * llmctl::bytes_of(dtype) / 16 : shape.width;
  return llmctl::row_grid(shape.rows, units, llmctl::kSoftmaxPacks, llmctl::kSoftmaxThreads);
}

}  // namespace

extern "C" int llmctl_cuda_scaled_masked_softmax(int dtype, const void *scores, const unsigned char *mask, void *shares,
                                                 int64_t heads, int64_t queries, int64_t rows, int64_t width,
                                                 int64_t batch_stride, int64_t head_stride, int64_t query_stride,
                                                 double scale, void *stream) {
  if (rows == 0 || width == 0) return 0;
  if (is_too_large(rows, width)) return LLMCTL_CUDA_TOO_LARGE;
  llmctl::MaskedSoftmax arguments{scores,
                                  mask,
                                  shares,
                                  shape_of(dtype, {scores, shares}, rows, queries, width, scale),
                                  heads,
                                  batch_stride,
                                  head_stride,
                                  query_stride};
  /* As many bytes of the mask at a time as scores. */
  const int64_t pack = 16 / llmctl::bytes_of(dtype), steps = batch_stride | head_stride | query_stride;
  arguments.shape.packed = arguments.shape.packed && reinterpret_cast<uintptr_t>(mask) % pack == 0 && steps % pack == 0;
  return llmctl::launch(scaled_masked_softmax, dtype, grid_of(dtype, arguments.shape), &arguments, stream);
}

extern "C" int llmctl_cuda_scaled_causal_softmax(int dtype, const void *scores, void *shares, int64_t queries,
                                                 int64_t rows, int64_t width, double scale, void *stream) {
  if (rows == 0 || width == 0) return 0;
  if (is_too_large(rows, width)) return LLMCTL_CUDA_TOO_LARGE;
  const llmctl::CausalSoftmax arguments{scores, shares,
                                        shape_of(dtype, {scores, shares}, rows, queries, width, scale)};
  return llmctl::launch(scaled_causal_softmax, dtype, grid_of(dtype, arguments.shape), &arguments, stream);
}

extern "C" int llmctl_cuda_scaled_softmax_backward(int dtype, const void *grad_shares, const void *shares,
                                                   void *grad_scores, int64_t queries, int64_t rows, int64_t width,
                                                   double scale, int causal, void *stream) {
  if (rows == 0 || width == 0) return 0;
  if (is_too_large(rows, width)) return LLMCTL_CUDA_TOO_LARGE;
  const llmctl::SoftmaxBackward arguments{
      grad_shares, shares, grad_scores,
      shape_of(dtype, {grad_shares, shares, grad_scores}, rows, queries, width, scale), causal != 0};
  return llmctl::launch(scaled_softmax_backward, dtype, grid_of(dtype, arguments.shape), &arguments, stream);
}
