/* Kernels with one mistake each that the emulation must detect, and one correct kernel. */
#include "../../../../../csrc/common/cuda/device.h"

namespace llmctl {

struct Faulty {
  float *out;
  const float *in;
  int64 size;
};

namespace {
namespace faulty {

__device__ __forceinline__ void sums_a_row(const Faulty &a) {
  const int64 index = threadIdx.x;
  const float sum = row_sum(index < a.size ? a.in[index] : 0.0f);
  if (threadIdx.x == 0) a.out[0] = sum;
}

__device__ __forceinline__ void skips_a_barrier(const Faulty &) {
  if (threadIdx.x < 32) __syncthreads();
}

__device__ __forceinline__ void meets_at_two_barriers(const Faulty &) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__device__ __forceinline__ void leaves_lanes_out(const Faulty &a) {
  if (threadIdx.x < 16) a.out[threadIdx.x] = __shfl_xor_sync(kWholeWarp, 1.0f, 1);
}

__device__ __forceinline__ void shuffles_half_a_warp(const Faulty &a) {
  a.out[threadIdx.x] = __shfl_xor_sync(0xffffu, 1.0f, 1);
}

__device__ __forceinline__ void forgets_a_barrier(const Faulty &a) {
  __shared__ float last;
  last = threadIdx.x;
  if (threadIdx.x == 0) a.out[0] = last;
  __syncthreads();
  a.out[1 + threadIdx.x] = last;
}

__device__ __forceinline__ void reads_what_nobody_wrote(const Faulty &a) {
  __shared__ float values[64];
  if (threadIdx.x < 32) values[threadIdx.x] = 1.0f;
  __syncthreads();
  a.out[threadIdx.x] = values[threadIdx.x];
}

__device__ __forceinline__ void writes_before_all_have_read(const Faulty &a) {
  __shared__ float value;
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x % kWarp == 0) value = round;
    __syncthreads();
    a.out[threadIdx.x] += value;
  }
}

__device__ __forceinline__ void reads_a_misaligned_pack(const Faulty &a) {
  a.out[threadIdx.x] = load<4>(a.in + a.size, threadIdx.x).values[0];
}

__device__ __forceinline__ void writes_beyond(const Faulty &a) { a.out[a.size + threadIdx.x] = 0.0f; }

__device__ __forceinline__ void overflows_shared_memory(const Faulty &a) {
  __shared__ float values[32];
  values[threadIdx.x] = 1.0f;
  __syncthreads();
  if (threadIdx.x == 0) a.out[0] = values[static_cast<int>(a.size)];
}

__device__ __forceinline__ void takes_a_product_to_be_rounded(const Faulty &a) {
  a.out[0] = a.in[0] * a.in[1] - a.in[2];
}

}  // namespace faulty
}  // namespace

LLMCTL_CUDA_ENTRY(sums_a_row, 1024, Faulty, faulty::sums_a_row)
LLMCTL_CUDA_ENTRY(skips_a_barrier, 1024, Faulty, faulty::skips_a_barrier)
LLMCTL_CUDA_ENTRY(meets_at_two_barriers, 1024, Faulty, faulty::meets_at_two_barriers)
LLMCTL_CUDA_ENTRY(leaves_lanes_out, 1024, Faulty, faulty::leaves_lanes_out)
LLMCTL_CUDA_ENTRY(shuffles_half_a_warp, 1024, Faulty, faulty::shuffles_half_a_warp)
LLMCTL_CUDA_ENTRY(forgets_a_barrier, 1024, Faulty, faulty::forgets_a_barrier)
LLMCTL_CUDA_ENTRY(reads_what_nobody_wrote, 1024, Faulty, faulty::reads_what_nobody_wrote)
LLMCTL_CUDA_ENTRY(writes_before_all_have_read, 1024, Faulty, faulty::writes_before_all_have_read)
LLMCTL_CUDA_ENTRY(reads_a_misaligned_pack, 1024, Faulty, faulty::reads_a_misaligned_pack)
LLMCTL_CUDA_ENTRY(writes_beyond, 256, Faulty, faulty::writes_beyond)
LLMCTL_CUDA_ENTRY(overflows_shared_memory, 1024, Faulty, faulty::overflows_shared_memory)
LLMCTL_CUDA_ENTRY(takes_a_product_to_be_rounded, 1024, Faulty, faulty::takes_a_product_to_be_rounded)

}  // namespace llmctl
