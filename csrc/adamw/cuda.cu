#include "cuda.h"

#include "../common/cuda/device.h"
#include "../common/dtype.h"

namespace llmctl {
namespace {
namespace adamw {

constexpr int kTogether = 4;

/* One element, before and after the step. */
__device__ __forceinline__ void update(const AdamW &a, float grad, float &master, float &exp_avg, float &exp_avg_sq) {
  const float g = grad * a.over_divisor;
  exp_avg = a.beta1 * exp_avg + a.one_minus_beta1 * g;
  exp_avg_sq = a.beta2 * exp_avg_sq + a.one_minus_beta2 * g * g;
  const float denominator = square_root(exp_avg_sq) * a.over_root_correction2 + a.epsilon;
  master = master * a.kept - a.step_size * exp_avg / denominator;
}

/* Units [first, stop) of N elements of one tensor. */
template <int N, typename G, typename C>
__device__ __forceinline__ void step(const AdamW &a, const AdamWTensor &t, int64 first, int64 stop) {
  float *masters = static_cast<float *>(t.master), *exp_avgs = static_cast<float *>(t.exp_avg);
  float *exp_avg_sqs = static_cast<float *>(t.exp_avg_sq);
  for (int64 unit = first + threadIdx.x; unit < stop; unit += blockDim.x) {
    const Pack<G, N> grad = load<N>(static_cast<const G *>(t.grad), unit);
    Pack<float, N> master = load<N>(masters, unit), exp_avg = load<N>(exp_avgs, unit);
    Pack<float, N> exp_avg_sq = load<N>(exp_avg_sqs, unit);
    Pack<C, N> copy;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      update(a, float(grad.values[i]), master.values[i], exp_avg.values[i], exp_avg_sq.values[i]);
      copy.values[i] = C(master.values[i]);
    }
    store<N>(masters, unit, master);
    store<N>(exp_avgs, unit, exp_avg);
    store<N>(exp_avg_sqs, unit, exp_avg_sq);
    if (t.copy != nullptr) store<N>(static_cast<C *>(t.copy), unit, copy);
  }
}

template <typename G, typename C>
__device__ __forceinline__ void step_chunk(const AdamW &a) {
  const AdamWTensor &t = a.tensors[tensor_of_block(a.tensors, a.count)];
  const int64 first = (static_cast<int64>(blockIdx.x) - t.first_block) * kAdamWChunk;
  const int64 stop = first + kAdamWChunk < t.numel ? first + kAdamWChunk : t.numel;
  const int64 whole = t.packed ? stop / kTogether * kTogether : first;
  step<kTogether, G, C>(a, t, first / kTogether, whole / kTogether);
  step<1, G, C>(a, t, whole, stop);
}

template <typename G>
__device__ __forceinline__ void run(const AdamW &a) {
  switch (a.copy_dtype) {
    case LLMCTL_BFLOAT16: return step_chunk<G, bfloat16>(a);
    case LLMCTL_FLOAT16: return step_chunk<G, float16>(a);
    default: return step_chunk<G, float>(a);
  }
}

}  // namespace adamw
}  // namespace

LLMCTL_CUDA_ENTRY(adamw_float32, kAdamWThreads, AdamW, adamw::run<float>)
LLMCTL_CUDA_ENTRY(adamw_bfloat16, kAdamWThreads, AdamW, adamw::run<bfloat16>)
LLMCTL_CUDA_ENTRY(adamw_float16, kAdamWThreads, AdamW, adamw::run<float16>)

}  // namespace llmctl
