#include "cuda.h"

#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace rms_norm {

template <typename T, int N>
constexpr int kKept = rms_norm_kept(sizeof(T), N > 1);
template <typename T, int N>
constexpr int kKeptBackward = rms_norm_backward_kept(sizeof(T), N > 1);

/* The elements that are normed: with a residual the rounded sum, because backward reads the stored sum. */
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> added(Pack<T, N> pack, const Pack<T, N> &other) {
#pragma unroll
  for (int i = 0; i < N; ++i) pack.values[i] = T(wide<T>(pack.values[i]) + wide<T>(other.values[i]));
  return pack;
}

/* The same for a unit in memory, where the sum is stored. */
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> normed_from(const T *hidden, const T *residual, T *sum, int unit) {
  const Pack<T, N> pack = load<N>(hidden, unit);
  if (residual == nullptr) return pack;
  const Pack<T, N> total = added(pack, load<N>(residual, unit));
  store<N>(sum, unit, total);
  return total;
}

template <int N, typename T>
__device__ __forceinline__ wide<T> squares_of(const Pack<T, N> &pack) {
  wide<T> squares = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) squares += wide<T>(pack.values[i]) * wide<T>(pack.values[i]);
  return squares;
}

template <int N, typename T>
__device__ __forceinline__ void store_normed(T *normed, int unit, Pack<T, N> pack, const Pack<T, N> &weights,
                                             wide<T> factor, wide<T> plus) {
#pragma unroll
  for (int i = 0; i < N; ++i) pack.values[i] = T(wide<T>(pack.values[i]) * factor * (plus + wide<T>(weights.values[i])));
  store<N>(normed, unit, pack);
}

template <int N, typename T>
__device__ __forceinline__ void forward_row(const RmsNorm &a, int64 row, int units) {
  using W = wide<T>;
  const T *weight = static_cast<const T *>(a.weight);
  const T *hidden = static_cast<const T *>(a.hidden) + row * a.width;
  const T *residual = a.residual == nullptr ? nullptr : static_cast<const T *>(a.residual) + row * a.width;
  T *sum = static_cast<T *>(a.sum) + (a.residual == nullptr ? 0 : row * a.width);
  T *normed = static_cast<T *>(a.normed) + row * a.width;
  Pack<T, N> kept[kKept<T, N>], others[kKept<T, N>], weights[kKept<T, N>];
  /* All loads come before the first store: the compiler must assume that stores may change what later loads read. */
#pragma unroll
  for (int k = 0; k < kKept<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit >= units) continue;
    kept[k] = load<N>(hidden, unit);
    if (residual != nullptr) others[k] = load<N>(residual, unit);
    weights[k] = load<N>(weight, unit);
  }
  W squares = 0;
#pragma unroll
  for (int k = 0; k < kKept<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit >= units) continue;
    if (residual != nullptr) {
      kept[k] = added(kept[k], others[k]);
      store<N>(sum, unit, kept[k]);
    }
    squares += squares_of(kept[k]);
  }
  const int beyond = threadIdx.x + kKept<T, N> * blockDim.x;
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += blockDim.x) {
    squares += squares_of(normed_from<N>(hidden, residual, sum, unit));
  }
  const W plus = W(a.adds_one ? 1 : 0);
  const W factor = W(1) / square_root(row_sum(squares) / W(a.width) + W(a.epsilon));
  if (threadIdx.x == 0) static_cast<W *>(a.scale)[row] = factor;
#pragma unroll
  for (int k = 0; k < kKept<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit < units) store_normed<N>(normed, unit, kept[k], weights[k], factor, plus);
  }
  const T *again = residual == nullptr ? hidden : sum;
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += blockDim.x) {
    store_normed<N>(normed, unit, load<N>(again, unit), load<N>(weight, unit), factor, plus);
  }
}

template <int N, typename T>
__device__ __forceinline__ void forward_rows(const RmsNorm &a) {
  const int units = static_cast<int>(a.width / N);
  for (int64 row = first_row(); row < a.rows; row += row_step()) forward_row<N, T>(a, row, units);
}

template <typename T>
__device__ __forceinline__ void forward(const RmsNorm &a) {
  if (a.packed) {
    forward_rows<kPack<T>, T>(a);
  } else {
    forward_rows<1, T>(a);
  }
}

/* One row's pointers and numbers in backward. */
template <typename T>
struct BackwardRow {
  const T *grad_normed, *grad_sum, *hidden, *weight;
  T *grad_hidden;
  wide<T> scale, plus;

  __device__ __forceinline__ BackwardRow(const RmsNormBackward &a, int64 row)
      : grad_normed(static_cast<const T *>(a.grad_normed) + row * a.width),
        grad_sum(a.grad_sum == nullptr ? nullptr : static_cast<const T *>(a.grad_sum) + row * a.width),
        hidden(static_cast<const T *>(a.hidden) + row * a.width),
        weight(static_cast<const T *>(a.weight)),
        grad_hidden(static_cast<T *>(a.grad_hidden) + row * a.width),
        scale(static_cast<const wide<T> *>(a.scale)[row]),
        plus(a.adds_one ? 1 : 0) {}

  /* The part of the gradient along the row. */
  template <int N>
  __device__ __forceinline__ wide<T> along(const Pack<T, N> &grads, const Pack<T, N> &values, int unit) const {
    const Pack<T, N> weights = load<N>(weight, unit);
    wide<T> result = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      result += wide<T>(grads.values[i]) * wide<T>(values.values[i]) * scale * (plus + wide<T>(weights.values[i]));
    }
    return result;
  }

  /* Writes the gradient of a pack and adds to the gradient of its weights. `lost`: the part of the row that the norm
   * removes. */
  template <int N>
  __device__ __forceinline__ void finish(const Pack<T, N> &grads, const Pack<T, N> &values, const Pack<T, N> &others,
                                         wide<T> lost, int unit, wide<T> (&grad_weight)[N]) const {
    using W = wide<T>;
    const Pack<T, N> weights = load<N>(weight, unit);
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const W grad = W(grads.values[i]), value = W(values.values[i]);
      grad_weight[i] += grad * value * scale;
      W of_hidden = grad * (plus + W(weights.values[i])) * scale - value * lost;
      if (grad_sum != nullptr) of_hidden += W(others.values[i]);
      result.values[i] = T(of_hidden);
    }
    store<N>(grad_hidden, unit, result);
  }
};

/* One row of a segment. `sums`: the part of the weight's gradient that fits in registers; the rest is summed in
 * `partial`, in memory that no other thread uses. */
template <int N, typename T>
__device__ __forceinline__ void backward_row(const BackwardRow<T> &row, int64 width, bool is_last,
                                             wide<T> (&sums)[kKeptBackward<T, N>][N], wide<T> *partial) {
  using W = wide<T>;
  const int units = static_cast<int>(width / N), beyond = threadIdx.x + kKeptBackward<T, N> * blockDim.x;
  Pack<T, N> grads[kKeptBackward<T, N>], values[kKeptBackward<T, N>], others[kKeptBackward<T, N>];
#pragma unroll
  for (int k = 0; k < kKeptBackward<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit >= units) continue;
    grads[k] = load<N>(row.grad_normed, unit);
    values[k] = load<N>(row.hidden, unit);
    if (row.grad_sum != nullptr) others[k] = load<N>(row.grad_sum, unit);
    /* Prefetches the next row while the threads of this row wait for each other. */
    if (is_last || N == 1) continue;
    prefetch(row.grad_normed + width + unit * N);
    prefetch(row.hidden + width + unit * N);
    if (row.grad_sum != nullptr) prefetch(row.grad_sum + width + unit * N);
  }
  W along = 0;
#pragma unroll
  for (int k = 0; k < kKeptBackward<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit < units) along += row.along(grads[k], values[k], unit);
  }
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += blockDim.x) {
    along += row.along(load<N>(row.grad_normed, unit), load<N>(row.hidden, unit), unit);
  }
  const W lost = row_sum(along) * row.scale / W(width) * row.scale;
#pragma unroll
  for (int k = 0; k < kKeptBackward<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit < units) row.finish(grads[k], values[k], others[k], lost, unit, sums[k]);
  }
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += blockDim.x) {
    const Pack<T, N> grad = load<N>(row.grad_normed, unit), value = load<N>(row.hidden, unit);
    Pack<T, N> other = grad;
    if (row.grad_sum != nullptr) other = load<N>(row.grad_sum, unit);
    W summed[N];
    load_wide<N>(partial, unit, summed);
    row.finish(grad, value, other, lost, unit, summed);
    store_wide<N>(partial, unit, summed);
  }
}

/* The rows of segment number first_row(), whose sums of the weight's gradient go to their own row of `partial`. */
template <int N, typename T>
__device__ __forceinline__ void backward_rows(const RmsNormBackward &a) {
  using W = wide<T>;
  const int64 segment = first_row();
  const int units = static_cast<int>(a.width / N);
  if (segment >= a.segments) return;
  const int64 first = a.rows * segment / a.segments, stop = a.rows * (segment + 1) / a.segments;
  W *partial = static_cast<W *>(a.partial) + segment * a.width;
  W sums[kKeptBackward<T, N>][N] = {};
#pragma unroll 1
  for (int unit = threadIdx.x + kKeptBackward<T, N> * blockDim.x; unit < units; unit += blockDim.x) {
    store_wide<N>(partial, unit, sums[0]);
  }
#pragma unroll 1
  for (int64 number = first; number < stop; ++number) {
    backward_row<N, T>(BackwardRow<T>(a, number), a.width, number + 1 == stop, sums, partial);
  }
#pragma unroll
  for (int k = 0; k < kKeptBackward<T, N>; ++k) {
    const int unit = threadIdx.x + k * blockDim.x;
    if (unit < units) store_wide<N>(partial, unit, sums[k]);
  }
}

template <typename T>
__device__ __forceinline__ void backward(const RmsNormBackward &a) {
  if (a.packed) {
    backward_rows<kPack<T>, T>(a);
  } else {
    backward_rows<1, T>(a);
  }
}

}  // namespace rms_norm
}  // namespace

LLMCTL_CUDA_KERNEL(rms_norm, kRmsNormThreads, RmsNorm, rms_norm::forward)
LLMCTL_CUDA_KERNEL(rms_norm_backward, kRmsNormBackwardThreads, RmsNormBackward, rms_norm::backward)

}  // namespace llmctl
