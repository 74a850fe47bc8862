#include "abi.h"

#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel moe_combine("moe_combine", KernelTypes::kAll);
const Kernel moe_combine_backward("moe_combine_backward", KernelTypes::kAll);

llmctl::Grid grid_of(int dtype, int64_t rows, int64_t width, bool packed) {
  const int64_t units = packed ? width * llmctl::bytes_of(dtype) / 16 : width;
  return llmctl::row_grid(rows, units, llmctl::kMoePacks, llmctl::kMoeThreads);
}

const llmctl::int64 *numbers(const int64_t *values) { return reinterpret_cast<const llmctl::int64 *>(values); }

}  // namespace

extern "C" int llmctl_cuda_moe_combine(int dtype, const void *rows, const int64_t *places, const void *weights,
                                       void *tokens, int64_t chosen, int64_t topk, int64_t width, int64_t count,
                                       void *stream) {
  if (count == 0 || width == 0) return 0;
  const bool packed = llmctl::packs(dtype, width, {rows, tokens});
  const llmctl::MoeCombine arguments{rows, numbers(places), weights, tokens, chosen, topk, width, count, packed};
  return llmctl::launch(moe_combine, dtype, grid_of(dtype, count, width, packed), &arguments, stream);
}

extern "C" int llmctl_cuda_moe_combine_backward(int dtype, const void *grad_tokens, const void *rows,
                                                const int64_t *choices, const void *weights, void *grad_rows,
                                                void *grad_weights, int64_t topk, int64_t width, int64_t chosen,
                                                int64_t count, void *stream) {
  if (chosen == 0 || width == 0) return 0;
  const bool packed = llmctl::packs(dtype, width, {grad_tokens, rows, grad_rows});
  const llmctl::MoeCombineBackward arguments{grad_tokens, rows, numbers(choices), weights, grad_rows,
                                             grad_weights, topk, width, chosen, count, packed};
  return llmctl::launch(moe_combine_backward, dtype, grid_of(dtype, chosen, width, packed), &arguments,
                        stream);
}
