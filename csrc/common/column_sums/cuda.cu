#include "cuda.h"

#include "../cuda/device.h"

namespace llmctl {
namespace {
namespace column_sums {

/* A block has kColumns columns. Thread y of a column adds rows y, y + blockDim.y, and so on; the first thread adds the
 * results of all. */
template <typename T>
__device__ __forceinline__ void run(const ColumnSums &a) {
  using W = wide<T>;
  __shared__ W of_thread[kColumnThreads][kColumns];
  const W *partial = static_cast<const W *>(a.partial);
  for (int64 start = static_cast<int64>(blockIdx.x) * kColumns; start < a.width;
       start += static_cast<int64>(gridDim.x) * kColumns) {
    const int64 column = start + threadIdx.x;
    W sum = 0;
    if (column < a.width) {
#pragma unroll 8
      for (int64 row = threadIdx.y; row < a.rows; row += blockDim.y) sum += partial[row * a.width + column];
    }
    of_thread[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < a.width) {
#pragma unroll 8
      for (unsigned y = 1; y < blockDim.y; ++y) sum += of_thread[y][threadIdx.x];
      static_cast<T *>(a.sums)[column] = T(sum);
    }
    __syncthreads();
  }
}

}  // namespace column_sums
}  // namespace

LLMCTL_CUDA_KERNEL(column_sums, kColumns * kColumnThreads, ColumnSums, column_sums::run)

}  // namespace llmctl
