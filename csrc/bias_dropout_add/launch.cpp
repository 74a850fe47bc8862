#include "abi.h"

#include "../common/launch/abi.h"
#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;

const Kernel bias_dropout_add("bias_dropout_add", KernelTypes::kAll);

}  // namespace

extern "C" int llmctl_cuda_bias_dropout_add(int dtype, const void *input, const void *bias, const void *residual,
                                            void *output, const int64_t *positions, int64_t rows, int64_t inner,
                                            int64_t width, const llmctl_dropout *dropout, void *stream) {
  if (rows == 0 || inner == 0) return 0;
  if (inner > llmctl::kDropoutInner) return LLMCTL_CUDA_TOO_LARGE;
  const bool packed = dtype != LLMCTL_FLOAT64 && llmctl::packs(dtype, width, {input, bias, residual, output});
  const int64_t pack = packed ? 16 / llmctl::bytes_of(dtype) : 1, units = inner / pack;
  llmctl::Grid grid = llmctl::row_grid(rows, units, llmctl::kDropoutUnits, llmctl::kDropoutThreads);
  const int64_t of_chunk = grid.threads_x * llmctl::kDropoutUnits, chunks = (units + of_chunk - 1) / of_chunk;
  grid.blocks *= chunks;
  const llmctl::BiasDropoutAdd arguments{input,
                                         bias,
                                         residual,
                                         output,
                                         reinterpret_cast<const llmctl::int64 *>(positions),
                                         rows,
                                         static_cast<int>(units),
                                         static_cast<int>(width / pack),
                                         static_cast<int>(chunks),
                                         llmctl::philox_keys(dropout->seed),
                                         dropout->threshold,
                                         dropout->scale,
                                         packed};
  return llmctl::launch(bias_dropout_add, dtype, grid, &arguments, stream);
}
