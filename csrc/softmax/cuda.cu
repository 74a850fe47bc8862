#include "cuda.h"

#include "../common/cuda/device.h"
#include "../common/cuda/online_sums.h"

namespace llmctl {
namespace {

/* The keys that a query sees: the first `count`. */
struct SeenUpTo {
  int count;

  struct OfPack {
    int count;
    __device__ __forceinline__ bool operator[](int i) const { return i < count; }
  };

  template <int N>
  __device__ __forceinline__ OfPack of_pack(int unit) const {
    return {count - unit * N};
  }
};

/* The keys whose byte is 0. */
struct SeenByMask {
  const unsigned char *mask;

  template <int N>
  struct OfPack {
    Pack<unsigned char, N> bytes;
    __device__ __forceinline__ bool operator[](int i) const { return bytes.values[i] == 0; }
  };

  template <int N>
  __device__ __forceinline__ OfPack<N> of_pack(int unit) const {
    return {load<N>(mask, unit)};
  }
};

/* Keys that the query of a row sees under a causal mask. */
__device__ __forceinline__ int causal_count(const ScoreRows &shape, int64 row) {
  const unsigned query = static_cast<unsigned>(row) % static_cast<unsigned>(shape.queries);
  const int64 count = query + 1 + shape.width - shape.queries;
  return count > 0 ? static_cast<int>(count) : 0;
}

/* Powers of two take fewer instructions than powers of e, and are exact enough for 16-bit scores, which are scaled
 * accordingly. */
template <typename T>
__device__ __forceinline__ wide<T> scale_of(const ScoreRows &shape) {
  return wide<T>(shape.scale) * (kApproximates<T> ? wide<T>(kLog2OfE) : wide<T>(1));
}

/* Of scaled scores. */
template <typename T>
__device__ __forceinline__ wide<T> share_of(wide<T> score, wide<T> from) {
  if constexpr (kApproximates<T>) {
    return power_of_two(score - from);
  } else {
    return exponential_of_negative(score - from);
  }
}

/* Scales the scores of a pack; scores that are not seen become -infinity. Returns true if any is seen. */
template <int N, typename T, typename Seen>
__device__ __forceinline__ bool scaled(const Pack<T, N> &scores, const Seen &seen, wide<T> scale, wide<T> (&values)[N]) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool is_seen = seen[i];
    any = any || is_seen;
    values[i] = is_seen ? wide<T>(scores.values[i]) * scale : minus_infinity<wide<T>>();
  }
  return any;
}

/* The largest of some scores, and the sum of exponentials counted from it. */
template <typename T>
struct ScoreSums {
  using W = wide<T>;
  W maximum = minus_infinity<W>(), sum = 0;

  template <int N>
  __device__ __forceinline__ void add(const W (&values)[N]) {
    W top = maximum;
#pragma unroll
    for (int i = 0; i < N; ++i) top = larger(top, values[i]);
    if (top > maximum) sum *= share_of<T>(maximum, top);
    maximum = top;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += share_of<T>(values[i], reference(maximum));
  }
};

/* Softmax of one row of `units` units. Units from `read` on are masked and not read. */
template <int N, typename T, typename Seen>
__device__ __forceinline__ void softmax_row(const T *scores, T *shares, int units, int read, wide<T> scale,
                                            const Seen &seen) {
  using W = wide<T>;
  const int threads = blockDim.x, thread = threadIdx.x, beyond = thread + kSoftmaxPacks * threads;
  Pack<T, N> packs[kSoftmaxPacks];
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    if (thread + k * threads < read) packs[k] = load<N>(scores, thread + k * threads);
  }
  W kept[kSoftmaxPacks][N];
  W maximum = minus_infinity<W>();
  bool any = false;
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    const int unit = thread + k * threads;
    if (unit >= read) continue;
    any = scaled(packs[k], seen.template of_pack<N>(unit), scale, kept[k]) || any;
#pragma unroll
    for (int i = 0; i < N; ++i) maximum = larger(maximum, kept[k][i]);
  }
  ScoreSums<T> rest;
#pragma unroll 1
  for (int unit = beyond; unit < read; unit += threads) {
    W values[N];
    any = scaled(load<N>(scores, unit), seen.template of_pack<N>(unit), scale, values) || any;
    rest.add(values);
  }
  maximum = row_reduce(larger(maximum, rest.maximum), minus_infinity<W>(), Max());
  const W from = reference(maximum);
  W sum = rest.maximum == minus_infinity<W>() ? rest.sum : rest.sum * share_of<T>(rest.maximum, from);
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    if (thread + k * threads >= read) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) sum += kept[k][i] = share_of<T>(kept[k][i], from);
  }
  sum = row_sum(sum);
  /* If nothing is larger than -infinity, all visible scores are -infinity, or none is visible. */
  const bool is_empty = maximum == minus_infinity<W>() && row_reduce(any ? 1 : 0, 0, Max()) == 0;
  const W factor = is_empty ? W(0) : W(1) / sum;
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    const int unit = thread + k * threads;
    if (unit >= units) continue;
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.values[i] = T(unit < read ? kept[k][i] * factor : W(0));
    store<N>(shares, unit, result);
  }
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += threads) {
    W values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = minus_infinity<W>();
    if (unit < read) scaled(load<N>(scores, unit), seen.template of_pack<N>(unit), scale, values);
    Pack<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.values[i] = T(share_of<T>(values[i], from) * factor);
    store<N>(shares, unit, result);
  }
}

template <int N, typename T>
__device__ __forceinline__ void masked_rows(const MaskedSoftmax &a) {
  const ScoreRows &shape = a.shape;
  const int units = static_cast<int>(shape.width / N);
  for (int64 row = first_row(); row < shape.rows; row += row_step()) {
    const unsigned queries = static_cast<unsigned>(shape.queries), heads = static_cast<unsigned>(a.heads);
    const unsigned of_batch = static_cast<unsigned>(row) / queries, query = static_cast<unsigned>(row) % queries;
    const int64 batch = of_batch / heads, head = of_batch % heads;
    const SeenByMask seen{a.mask + batch * a.batch_stride + head * a.head_stride + query * a.query_stride};
    softmax_row<N>(static_cast<const T *>(a.scores) + row * shape.width, static_cast<T *>(a.shares) + row * shape.width,
                   units, units, scale_of<T>(shape), seen);
  }
}

template <int N, typename T>
__device__ __forceinline__ void causal_rows(const CausalSoftmax &a) {
  const ScoreRows &shape = a.shape;
  const int units = static_cast<int>(shape.width / N);
  for (int64 row = first_row(); row < shape.rows; row += row_step()) {
    const int count = causal_count(shape, row);
    softmax_row<N>(static_cast<const T *>(a.scores) + row * shape.width, static_cast<T *>(a.shares) + row * shape.width,
                   units, (count + N - 1) / N, scale_of<T>(shape), SeenUpTo{count});
  }
}

/* The part of a pack in the sum of share * grad; in a pack that is seen in part, the elements that are not seen may
 * be anything. */
template <int N, typename T>
__device__ __forceinline__ wide<T> along_of(const Pack<T, N> &grads, const Pack<T, N> &shares, int count) {
  using W = wide<T>;
  W along = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) along += i < count ? W(grads.values[i]) * W(shares.values[i]) : W(0);
  return along;
}

template <int N, typename T>
__device__ __forceinline__ void store_grads(T *results, int unit, Pack<T, N> grads, const Pack<T, N> &shares, int count,
                                            wide<T> scale, wide<T> along) {
  using W = wide<T>;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    grads.values[i] = T(i < count ? scale * W(shares.values[i]) * (W(grads.values[i]) - along) : W(0));
  }
  store<N>(results, unit, grads);
}

template <int N, typename T>
__device__ __forceinline__ void softmax_backward_row(const T *grads, const T *shares, T *results, int units, int count,
                                                     wide<T> scale) {
  using W = wide<T>;
  const int threads = blockDim.x, thread = threadIdx.x, beyond = thread + kSoftmaxPacks * threads;
  const int read = (count + N - 1) / N;
  Pack<T, N> kept_grads[kSoftmaxPacks], kept_shares[kSoftmaxPacks];
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    const int unit = thread + k * threads;
    if (unit >= read) continue;
    kept_grads[k] = load<N>(grads, unit);
    kept_shares[k] = load<N>(shares, unit);
  }
  W along = 0;
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    const int unit = thread + k * threads;
    if (unit < read) along += along_of(kept_grads[k], kept_shares[k], count - unit * N);
  }
#pragma unroll 1
  for (int unit = beyond; unit < read; unit += threads) {
    along += along_of(load<N>(grads, unit), load<N>(shares, unit), count - unit * N);
  }
  along = row_sum(along);
#pragma unroll
  for (int k = 0; k < kSoftmaxPacks; ++k) {
    const int unit = thread + k * threads;
    if (unit < units) store_grads(results, unit, kept_grads[k], kept_shares[k], count - unit * N, scale, along);
  }
#pragma unroll 1
  for (int unit = beyond; unit < units; unit += threads) {
    Pack<T, N> grad, share;
#pragma unroll
    for (int i = 0; i < N; ++i) grad.values[i] = share.values[i] = T(W(0));
    if (unit < read) {
      grad = load<N>(grads, unit);
      share = load<N>(shares, unit);
    }
    store_grads(results, unit, grad, share, count - unit * N, scale, along);
  }
}

template <int N, typename T>
__device__ __forceinline__ void softmax_backward_rows(const SoftmaxBackward &a) {
  const ScoreRows &shape = a.shape;
  const int units = static_cast<int>(shape.width / N);
  for (int64 row = first_row(); row < shape.rows; row += row_step()) {
    const int64 start = row * shape.width;
    softmax_backward_row<N>(static_cast<const T *>(a.grad_shares) + start, static_cast<const T *>(a.shares) + start,
                            static_cast<T *>(a.grad_scores) + start, units,
                            a.causal ? causal_count(shape, row) : static_cast<int>(shape.width), wide<T>(shape.scale));
  }
}

template <typename T>
__device__ __forceinline__ void masked_softmax(const MaskedSoftmax &a) {
  if (a.shape.packed) {
    masked_rows<kPack<T>, T>(a);
  } else {
    masked_rows<1, T>(a);
  }
}

template <typename T>
__device__ __forceinline__ void causal_softmax(const CausalSoftmax &a) {
  if (a.shape.packed) {
    causal_rows<kPack<T>, T>(a);
  } else {
    causal_rows<1, T>(a);
  }
}

template <typename T>
__device__ __forceinline__ void softmax_backward(const SoftmaxBackward &a) {
  if (a.shape.packed) {
    softmax_backward_rows<kPack<T>, T>(a);
  } else {
    softmax_backward_rows<1, T>(a);
  }
}

}  // namespace

LLMCTL_CUDA_KERNEL(scaled_masked_softmax, kSoftmaxThreads, MaskedSoftmax, masked_softmax)
LLMCTL_CUDA_KERNEL(scaled_causal_softmax, kSoftmaxThreads, CausalSoftmax, causal_softmax)
LLMCTL_CUDA_KERNEL(scaled_softmax_backward, kSoftmaxThreads, SoftmaxBackward, softmax_backward)

}  // namespace llmctl
