#include "tensor_lists.h"

#include "device.h"

namespace llmctl {
namespace {
namespace tensor_lists {

/* The stretch of a tensor that this block works on. */
template <typename T>
struct Stretch {
  T *values;
  int64 first, whole, stop; /* [first, whole) in packs of 16 bytes, [whole, stop) one by one. */

  __device__ __forceinline__ explicit Stretch(const TensorList &a) {
    const ListedTensor &t = a.tensors[tensor_of_block(a.tensors, a.count)];
    values = static_cast<T *>(t.values);
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
  const Stretch<T> stretch(a);
  double squares = squares_of<kPack<T>>(stretch.values, stretch.first / kPack<T>, stretch.whole / kPack<T>);
  squares += squares_of<1>(stretch.values, stretch.whole, stretch.stop);
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

/* Units that are loaded before the first of them is stored. */
constexpr int kTogether = 2;

template <int N, typename T>
__device__ __forceinline__ bool scale_units(T *values, wide<T> factor, int64 first, int64 stop) {
  bool bad = false;
#pragma unroll 1
  for (int64 start = first + threadIdx.x; start < stop; start += kTogether * blockDim.x) {
    Pack<T, N> packs[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k * blockDim.x < stop) packs[k] = load<N>(values, start + k * blockDim.x);
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      if (start + k * blockDim.x >= stop) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        packs[k].values[i] = T(wide<T>(packs[k].values[i]) * factor);
        const wide<T> scaled = wide<T>(packs[k].values[i]);
        /* NaN for what is infinite or NaN. A difference to itself could be contracted with the product before it. */
        bad = bad || scaled * wide<T>(0) != wide<T>(0);
      }
      store<N>(values, start + k * blockDim.x, packs[k]);
    }
  }
  return bad;
}

template <typename T>
__device__ __forceinline__ void scale(const TensorList &a) {
  const Stretch<T> stretch(a);
  const wide<T> factor = static_cast<wide<T>>(a.factor);
  bool bad = scale_units<kPack<T>>(stretch.values, factor, stretch.first / kPack<T>, stretch.whole / kPack<T>);
  bad = scale_units<1>(stretch.values, factor, stretch.whole, stretch.stop) || bad;
  /* Whoever writes, writes the same. */
  if (bad) *a.flag = 1.0f;
}

}  // namespace tensor_lists
}  // namespace

LLMCTL_CUDA_KERNEL(sum_of_squares, kListThreads, TensorList, tensor_lists::sum_of_squares)
LLMCTL_CUDA_ENTRY(sum_of_partials, kPartialThreads, SumOfPartials, tensor_lists::sum_of_partials)
LLMCTL_CUDA_KERNEL(scale, kListThreads, TensorList, tensor_lists::scale)

}  // namespace llmctl
