#include "cuda.h"

#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace moe_permute {

/* Rows of a token that are loaded before any is added. */
constexpr int kTogether = 4;

template <int N, typename T>
__device__ __forceinline__ void combine_rows(const MoeCombine &a) {
  using W = wide<T>;
  for (int64 token = first_row(); token < a.count; token += row_step()) {
    const int64 *places = a.places + token * a.topk;
    const W *weights = a.weights == nullptr ? nullptr : static_cast<const W *>(a.weights) + token * a.topk;
    T *result = static_cast<T *>(a.tokens) + token * a.width;
    for (int64 unit = threadIdx.x; unit < a.width / N; unit += blockDim.x) {
      W sums[N] = {};
#pragma unroll 1
      for (int64 first = 0; first < a.topk; first += kTogether) {
        Pack<T, N> rows[kTogether];
        bool is_there[kTogether];
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          const int64 place = first + k < a.topk ? places[first + k] : a.chosen;
          is_there[k] = place >= 0 && place < a.chosen;
          if (is_there[k]) rows[k] = load<N>(static_cast<const T *>(a.rows) + place * a.width, unit);
        }
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (!is_there[k]) continue;
          const W weight = weights == nullptr ? W(1) : weights[first + k];
#pragma unroll
          for (int i = 0; i < N; ++i) sums[i] += weight * W(rows[k].values[i]);
        }
      }
      Pack<T, N> pack;
#pragma unroll
      for (int i = 0; i < N; ++i) pack.values[i] = T(sums[i]);
      store<N>(result, unit, pack);
    }
  }
}

template <typename T>
__device__ __forceinline__ void combine(const MoeCombine &a) {
  if (a.packed) {
    combine_rows<kPack<T>, T>(a);
  } else {
    combine_rows<1, T>(a);
  }
}

/* The gradients of a row, which are 0 if no token chose the row, even if the gradient is infinite or NaN. Returns this thread's
 * part of its weight's gradient. Loads come before the stores that follow them: the compiler must assume that stores
 * may change what later loads read. */
template <int N, typename T>
__device__ __forceinline__ wide<T> backward_row(const T *grad_token, const T *own, T *grad_row, wide<T> weight,
                                                bool is_choice, int64 units) {
  using W = wide<T>;
  W along = 0;
#pragma unroll 1
  for (int64 first = threadIdx.x; first < units; first += kMoePacks * blockDim.x) {
    Pack<T, N> grads[kMoePacks], values[kMoePacks];
#pragma unroll
    for (int k = 0; k < kMoePacks; ++k) {
      const int64 unit = first + k * blockDim.x;
      if (unit >= units) continue;
      grads[k] = load<N>(grad_token, unit);
      values[k] = load<N>(own, unit);
    }
#pragma unroll
    for (int k = 0; k < kMoePacks; ++k) {
      const int64 unit = first + k * blockDim.x;
      if (unit >= units) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        along += W(values[k].values[i]) * W(grads[k].values[i]);
        grads[k].values[i] = T(is_choice ? weight * W(grads[k].values[i]) : W(0));
      }
      store<N>(grad_row, unit, grads[k]);
    }
  }
  return along;
}

template <int N, typename T>
__device__ __forceinline__ void backward_rows(const MoeCombineBackward &a) {
  using W = wide<T>;
  /* The same number of rounds for all threads of a block, because the sum has barriers. */
  for (int64 start = static_cast<int64>(blockIdx.x) * blockDim.y; start < a.chosen; start += row_step()) {
    const int64 row = start + threadIdx.y;
    const bool is_row = row < a.chosen;
    const int64 given = is_row ? a.choices[row] : 0;
    const bool is_choice = is_row && given >= 0 && given < a.count * a.topk;
    const int64 choice = is_choice ? given : 0;
    const W weight = is_choice ? static_cast<const W *>(a.weights)[choice] : W(0);
    W along = backward_row<N, T>(static_cast<const T *>(a.grad_tokens) + choice / a.topk * a.width,
                                 static_cast<const T *>(a.rows) + row * a.width,
                                 static_cast<T *>(a.grad_rows) + row * a.width, weight, is_choice,
                                 is_row ? a.width / N : 0);
    along = row_sum(along);
    if (is_choice && threadIdx.x == 0) static_cast<W *>(a.grad_weights)[choice] = along;
  }
}

template <typename T>
__device__ __forceinline__ void backward(const MoeCombineBackward &a) {
  if (a.packed) {
    backward_rows<kPack<T>, T>(a);
  } else {
    backward_rows<1, T>(a);
  }
}

}  // namespace moe_permute
}  // namespace

LLMCTL_CUDA_KERNEL(moe_combine, kMoeThreads, MoeCombine, moe_permute::combine)
LLMCTL_CUDA_KERNEL(moe_combine_backward, kMoeThreads, MoeCombineBackward, moe_permute::backward)

}  // namespace llmctl
