#include "cuda.h"

#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace rope {

/* The source and the target of a token's head number `head`, counted over all parts. */
template <typename T>
struct HeadPointers {
  const T *from;
  T *to;
  bool is_turned;

  __device__ __forceinline__ HeadPointers(const Rope &a, int head, int64 position, int64 sample) {
    int number = 0;
    while (head >= a.part_heads[number]) head -= a.part_heads[number++];
    const llmctl_heads &part = a.parts[number];
    /* Most groups give one head, and this saves a division. */
    const int heads = static_cast<int>(part.heads), group = heads == 1 ? head : head / heads;
    const int in_group = heads == 1 ? 0 : head - group * heads;
    from = static_cast<const T *>(part.from) + position * part.from_strides[0] + sample * part.from_strides[1] +
           group * part.from_strides[2] + in_group * part.from_strides[3];
    to = static_cast<T *>(part.to) + position * part.to_strides[0] + sample * part.to_strides[1] +
         group * part.to_strides[2] + in_group * part.to_strides[3];
    is_turned = part.is_turned != 0;
  }
};

template <typename T>
__device__ __forceinline__ void turn(T &first, T &second, T cos, T sin, wide<T> sign) {
  using W = wide<T>;
  const W x = W(first), y = W(second), c = W(cos), s = sign * W(sin);
  first = T(x * c - y * s);
  second = T(y * c + x * s);
}

/* Pairs of the channels at the same index of `x` and `y`, or of adjacent channels in `x` followed by `y`. */
template <int N, typename T>
__device__ __forceinline__ void turn_packs(Pack<T, N> &x, Pack<T, N> &y, const Pack<T, N> &cos, const Pack<T, N> &sin,
                                           bool is_interleaved, wide<T> sign) {
  if (!is_interleaved || N == 1) {
#pragma unroll
    for (int i = 0; i < N; ++i) turn(x.values[i], y.values[i], cos.values[i], sin.values[i], sign);
    return;
  }
  constexpr int kHalf = N / 2;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    turn(x.values[2 * i], x.values[2 * i + 1], cos.values[i], sin.values[i], sign);
    turn(y.values[2 * i], y.values[2 * i + 1], cos.values[kHalf + i], sin.values[kHalf + i], sign);
  }
}

/* The work on a unit of a head: two packs of rotated channels, or one pack of the rest. */
template <int N, typename T>
struct UnitPlace {
  int first, second; /* First channels of its packs; in the rest of a head there is no second pack. */
  bool is_rest;

  __device__ __forceinline__ UnitPlace(const llmctl_angles &angles, int unit, int pairs) {
    is_rest = unit >= pairs / N;
    if (is_rest) {
      first = second = 2 * pairs + (unit - pairs / N) * N;
    } else {
      first = angles.is_interleaved ? 2 * unit * N : unit * N;
      second = angles.is_interleaved ? first + N : first + pairs;
    }
  }
};

/* Heads of a token whose loads come before the first store: the compiler must assume that stores may change what
 * later loads read. */
constexpr int kHeads = 2;

/* One unit of heads first, first + step, and so on, which all have the same angles. */
template <int N, typename T>
__device__ __forceinline__ void turn_heads(const Rope &a, int64 position, int64 sample, int first, int step, int unit,
                                           int pairs) {
  const UnitPlace<N, T> at(a.angles, unit, pairs);
  const wide<T> sign = a.angles.is_inverse ? wide<T>(-1) : wide<T>(1);
  Pack<T, N> cos, sin;
  if (!at.is_rest) {
    cos = load<N>(static_cast<const T *>(a.angles.cos) + position * a.angles.cos_strides[0] +
                      sample * a.angles.cos_strides[1], unit);
    sin = load<N>(static_cast<const T *>(a.angles.sin) + position * a.angles.sin_strides[0] +
                      sample * a.angles.sin_strides[1], unit);
  }
#pragma unroll 1
  for (int start = first; start < a.heads; start += kHeads * step) {
    Pack<T, N> x[kHeads], y[kHeads];
    T *to[kHeads];
    bool is_turned[kHeads], moves[kHeads];
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      moves[k] = false;
      if (start + k * step >= a.heads) continue;
      const HeadPointers<T> head(a, start + k * step, position, sample);
      is_turned[k] = head.is_turned && !at.is_rest;
      moves[k] = is_turned[k] || head.from != head.to;
      to[k] = head.to;
      if (moves[k]) x[k] = load<N>(head.from + at.first, 0);
      if (moves[k] && !at.is_rest) y[k] = load<N>(head.from + at.second, 0);
    }
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (!moves[k]) continue;
      if (is_turned[k]) turn_packs(x[k], y[k], cos, sin, a.angles.is_interleaved != 0, sign);
      store<N>(to[k] + at.first, 0, x[k]);
      if (!at.is_rest) store<N>(to[k] + at.second, 0, y[k]);
    }
  }
}

template <int N, typename T>
__device__ __forceinline__ void rope_tokens(const Rope &a) {
  const int pairs = static_cast<int>(a.angles.rotated / 2);
  const int rest_units = a.moves ? static_cast<int>((a.head_dim - a.angles.rotated) / N) : 0;
  const int units = pairs / N + rest_units, threads = blockDim.x, thread = threadIdx.x;
  /* A thread processes the same unit of several heads; surplus threads do nothing. */
  const int beside = units < threads ? units : threads, step = threads / beside, head = thread / beside;
  for (int64 token = first_row(); token < a.tokens; token += row_step()) {
    const int64 position = a.batch == 1 ? token : token / a.batch, sample = token - position * a.batch;
#pragma unroll 1
    for (int unit = thread % beside; head < step && unit < units; unit += beside) {
      turn_heads<N, T>(a, position, sample, head, step, unit, pairs);
    }
  }
}

template <typename T>
__device__ __forceinline__ void forward(const Rope &a) {
  if (a.packed) {
    rope_tokens<kPack<T>, T>(a);
  } else {
    rope_tokens<1, T>(a);
  }
}

}  // namespace rope
}  // namespace

LLMCTL_CUDA_KERNEL(rope, kRopeThreads, Rope, rope::forward)

}  // namespace llmctl
