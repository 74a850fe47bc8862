#include "cuda.h"

#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace tensor_lists {

/* The segment of a tensor that this block works on. */
template <typename T>
struct Segment {
  const T *values;
  int64 first, whole, stop; /* [first, whole) in packs of 16 bytes, [whole, stop) one by one. */

  __device__ __forceinline__ explicit Segment(const TensorList &a) {
    const ListedTensor &t = a.tensors[tensor_of_block(a.tensors, a.count)];
    values = static_cast<const T *>(t.values);
    first = (static_cast<int64>(blockIdx.x) - t.first_block) * kListChunk;
    stop = first + kListChunk < t.numel ? first + kListChunk : t.numel;
    whole = t.packed ? stop / kPack<T> * kPack<T> : first;
  }
};

template <int N, typename T>
__device__ __forceinline__ double squares_of(const T *values, int64 first, int64 stop) {
  double squares = 0;
#pragma unroll 4
  for (int64 unit = first + threadIdx.x; unit < stop; unit += blockDim.x) {
    const Pack<T, N> pack = load<N>(values, unit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const double value = static_cast<double>(static_cast<wide<T>>(pack.values[i]));
      squares += value * value;
    }
  }
  return squares;
}

template <typename T>
__device__ __forceinline__ void sum_of_squares(const TensorList &a) {
  const Segment<T> segment(a);
  double squares = squares_of<kPack<T>>(segment.values, segment.first / kPack<T>, segment.whole / kPack<T>);
  squares += squares_of<1>(segment.values, segment.whole, segment.stop);
  squares = row_sum(squares);
  if (threadIdx.x == 0) a.partial[blockIdx.x] = squares;
}

__device__ __forceinline__ void sum_of_partials(const SumOfPartials &a) {
  double sum = 0;
#pragma unroll 8
  for (int64 i = threadIdx.x; i < a.count; i += blockDim.x) sum += a.partial[i];
  sum = row_sum(sum);
  if (threadIdx.x == 0) *a.sum = sum;
}

}  // namespace tensor_lists
}  // namespace

LLMCTL_CUDA_KERNEL(sum_of_squares, kListThreads, TensorList, tensor_lists::sum_of_squares)
LLMCTL_CUDA_ENTRY(sum_of_partials, kPartialThreads, SumOfPartials, tensor_lists::sum_of_partials)

}  // namespace llmctl
