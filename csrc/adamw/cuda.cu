#include "cuda.h"

#include "../common/cuda/device.h"
#include "../common/dtype.h"
#include "remainders.h"

namespace llmctl {
namespace {
namespace adamw {

constexpr int kTogether = 4;
constexpr double kLargestDouble = 1.7976931348623157e308;

/* One element, before and after the step, with the divided gradient `g`. */
__device__ __forceinline__ void update(const AdamW &a, float g, float &master, float &exp_avg, float &exp_avg_sq) {
  exp_avg = a.beta1 * exp_avg + a.one_minus_beta1 * g;
  exp_avg_sq = a.beta2 * exp_avg_sq + a.one_minus_beta2 * g * g;
  const float denominator = square_root(exp_avg_sq) * a.over_root_correction2 + a.epsilon;
  master = master * a.kept - a.step_size * exp_avg / denominator;
}

/* A pack of moments, as float. All threads of a launch take the same branch. */
template <int N>
__device__ __forceinline__ Pack<float, N> load_moments(const void *moments, bool is_low, int64 unit) {
  if (!is_low) return load<N>(static_cast<const float *>(moments), unit);
  const Pack<bfloat16, N> low = load<N>(static_cast<const bfloat16 *>(moments), unit);
  Pack<float, N> wide;
#pragma unroll
  for (int i = 0; i < N; ++i) wide.values[i] = float(low.values[i]);
  return wide;
}

template <int N>
__device__ __forceinline__ void store_moments(void *moments, bool is_low, int64 unit, const Pack<float, N> &wide) {
  if (!is_low) return store<N>(static_cast<float *>(moments), unit, wide);
  Pack<bfloat16, N> low;
#pragma unroll
  for (int i = 0; i < N; ++i) low.values[i] = bfloat16(wide.values[i]);
  store<N>(static_cast<bfloat16 *>(moments), unit, low);
}

/* Packs of masters in float, and of copies of type C, if there are any. */
template <typename C>
struct WithCopies {
  template <int N>
  static __device__ __forceinline__ Pack<float, N> load_masters(const AdamWTensor &t, int64 unit) {
    return load<N>(static_cast<const float *>(t.master), unit);
  }

  template <int N>
  static __device__ __forceinline__ void store_masters(const AdamWTensor &t, int64 unit, const Pack<float, N> &master) {
    store<N>(static_cast<float *>(t.master), unit, master);
    if (t.copy == nullptr) return;
    Pack<C, N> copy;
#pragma unroll
    for (int i = 0; i < N; ++i) copy.values[i] = C(master.values[i]);
    store<N>(static_cast<C *>(t.copy), unit, copy);
  }
};

/* Packs of masters as bfloat16 weights, which are the copies, and remainders. */
struct WithRemainders {
  template <int N>
  static __device__ __forceinline__ Pack<float, N> load_masters(const AdamWTensor &t, int64 unit) {
    const Pack<short, N> remainder = load<N>(static_cast<const short *>(t.master), unit);
    const Pack<unsigned short, N> weight = load<N>(static_cast<const unsigned short *>(t.copy), unit);
    Pack<float, N> master;
#pragma unroll
    for (int i = 0; i < N; ++i) master.values[i] = master_of(weight.values[i], remainder.values[i]);
    return master;
  }

  template <int N>
  static __device__ __forceinline__ void store_masters(const AdamWTensor &t, int64 unit, const Pack<float, N> &master) {
    Pack<short, N> remainder;
    Pack<unsigned short, N> weight;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const unsigned bits = stored_bits(master.values[i]);
      remainder.values[i] = remainder_of(bits);
      weight.values[i] = weight_of(bits);
    }
    store<N>(static_cast<short *>(t.master), unit, remainder);
    store<N>(static_cast<unsigned short *>(t.copy), unit, weight);
  }
};

/* Units [first, stop) of N elements of one tensor. */
template <int N, typename G, typename Kept>
__device__ __forceinline__ void step(const AdamW &a, float over_divisor, const AdamWTensor &t, int64 first, int64 stop) {
  for (int64 unit = first + threadIdx.x; unit < stop; unit += blockDim.x) {
    const Pack<G, N> grad = load<N>(static_cast<const G *>(t.grad), unit);
    Pack<float, N> master = Kept::template load_masters<N>(t, unit);
    Pack<float, N> exp_avg = load_moments<N>(t.exp_avg, a.has_low_average, unit);
    Pack<float, N> exp_avg_sq = load_moments<N>(t.exp_avg_sq, a.has_low_square, unit);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      update(a, float(grad.values[i]) * over_divisor, master.values[i], exp_avg.values[i], exp_avg_sq.values[i]);
    }
    Kept::template store_masters<N>(t, unit, master);
    store_moments<N>(t.exp_avg, a.has_low_average, unit, exp_avg);
    store_moments<N>(t.exp_avg_sq, a.has_low_square, unit, exp_avg_sq);
  }
}

template <typename G, typename Kept>
__device__ __forceinline__ void step_chunk(const AdamW &a, float over_divisor) {
  const AdamWTensor &t = a.tensors[tensor_of_block(a.tensors, a.count)];
  const int64 first = (static_cast<int64>(blockIdx.x) - t.first_block) * kAdamWChunk;
  const int64 stop = first + kAdamWChunk < t.numel ? first + kAdamWChunk : t.numel;
  const int64 whole = t.packed ? stop / kTogether * kTogether : first;
  step<kTogether, G, Kept>(a, over_divisor, t, first / kTogether, whole / kTogether);
  step<1, G, Kept>(a, over_divisor, t, whole, stop);
}

template <typename G>
__device__ __forceinline__ void run(const AdamW &a) {
  float over_divisor = a.over_divisor;
  if (a.divisor != nullptr) {
    /* Divided in double, as on the host, for the same bits. */
    if (!(*a.divisor <= kLargestDouble)) return;
    over_divisor = static_cast<float>(1.0 / *a.divisor);
  }
  if (a.has_remainders) return step_chunk<G, WithRemainders>(a, over_divisor);
  switch (a.copy_dtype) {
    case LLMCTL_BFLOAT16: return step_chunk<G, WithCopies<bfloat16>>(a, over_divisor);
    case LLMCTL_FLOAT16: return step_chunk<G, WithCopies<float16>>(a, over_divisor);
    default: return step_chunk<G, WithCopies<float>>(a, over_divisor);
  }
}

}  // namespace adamw
}  // namespace

LLMCTL_CUDA_ENTRY(adamw_float32, kAdamWThreads, AdamW, adamw::run<float>)
LLMCTL_CUDA_ENTRY(adamw_bfloat16, kAdamWThreads, AdamW, adamw::run<bfloat16>)
LLMCTL_CUDA_ENTRY(adamw_float16, kAdamWThreads, AdamW, adamw::run<float16>)

}  // namespace llmctl
