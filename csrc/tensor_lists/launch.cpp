#include "abi.h"

#include "../common/launch/grid.h"
#include "cuda.h"

namespace {

using llmctl::Kernel;
using llmctl::KernelTypes;
using llmctl::ListedTensor;
using llmctl::TensorList;

const Kernel sum_of_squares("sum_of_squares", KernelTypes::kAll);
const Kernel sum_of_partials("sum_of_partials", KernelTypes::kNoType);

/* Sums of the squares of all tensors, one per block, in as many launches as the number of tensors takes. */
int sum_by_block(int dtype, const void *const *tensors, const int64_t *numels, int64_t count, double *partial,
                 int64_t *total_blocks, void *stream) {
  TensorList arguments{};
  arguments.partial = partial;
  int64_t blocks = 0;
  for (int64_t number = 0; number < count; ++number) {
    if (numels[number] > 0) {
      const bool packed = llmctl::packs(LLMCTL_FLOAT32, 4, {tensors[number]});
      arguments.tensors[arguments.count++] =
          ListedTensor{tensors[number], numels[number], static_cast<int>(blocks), packed};
      blocks += (numels[number] + llmctl::kListChunk - 1) / llmctl::kListChunk;
    }
    const bool is_last = number + 1 == count;
    if (blocks == 0 || (!is_last && arguments.count < llmctl::kListTensors)) continue;
    const int error = llmctl::launch(sum_of_squares, dtype, {blocks, llmctl::kListThreads, 1}, &arguments, stream);
    if (error != 0) return error;
    arguments.partial += blocks;
    *total_blocks += blocks;
    arguments.count = 0;
    blocks = 0;
  }
  return 0;
}

}  // namespace

extern "C" int64_t llmctl_cuda_list_chunk(void) { return llmctl::kListChunk; }

extern "C" int llmctl_cuda_sum_of_squares(int dtype, const void *const *tensors, const int64_t *numels, int64_t count,
                                          double *partial, double *sum, void *stream) {
  int64_t blocks = 0;
  const int error = sum_by_block(dtype, tensors, numels, count, partial, &blocks, stream);
  if (error != 0) return error;
  const llmctl::SumOfPartials all{partial, sum, blocks};
  int threads = llmctl::kWarpThreads;
  while (threads < llmctl::kPartialThreads && threads < blocks) threads *= 2;
  return llmctl::launch(sum_of_partials, {1, threads, 1}, &all, stream);
}
