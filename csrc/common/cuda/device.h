/* Building blocks of CUDA kernels: loads of 16 bytes, sums over the threads of a row in a fixed order, entry points
 * per element type. For nvcc and NVRTC, so without foreign headers; tests/trainer/ops/cuda/cuda_emulation compiles
 * the same files with g++.
 *
 * The blockDim.x threads of one threadIdx.y process a row. They are either a warp, and the block has one row per warp, or
 * more threads, and the block has a single row (common/launch/grid.h chooses). Shared memory is static, in functions. */
#ifndef LLMCTL_DEVICE_H
#define LLMCTL_DEVICE_H

#include "../number.h"
#include "arguments.h"

namespace llmctl {

constexpr int kWarp = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

/* N elements in one load or store, of 16 bytes where N is kPack<T>. */
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T values[N];
};

template <typename T>
constexpr int kPack = 16 / sizeof(T);

/* Pack number `unit` of a row: the elements from unit * N on. */
template <int N, typename T>
static __device__ __forceinline__ Pack<T, N> load(const T *row, int64 unit) {
  return *reinterpret_cast<const Pack<T, N> *>(row + unit * N);
}

/* The rows are in global memory. A plain store of a pack that was computed element by element becomes up to eight stores of
 * 2 bytes, so 16 bytes are stored by an instruction. "memory": loads of the same row must not move behind it. */
template <int N, typename T>
static __device__ __forceinline__ void store(T *row, int64 unit, const Pack<T, N> &pack) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(pack) == 16) {
    unsigned words[4];
    memcpy(words, &pack, sizeof words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(row + unit * N), "r"(words[0]), "r"(words[1]),
                 "r"(words[2]), "r"(words[3])
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Pack<T, N> *>(row + unit * N) = pack;
}

/* Prefetches the memory around an address into the L2 cache, without a register. */
static __device__ __forceinline__ void prefetch(const void *address) {
#ifdef __CUDA_ARCH__
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#else
  (void)address;
#endif
}

/* The N values in registers as elements unit * N and on of a row, which starts at 16 bytes where N > 1. */
template <int N, typename W>
static __device__ __forceinline__ void store_wide(W *row, int64 unit, const W (&values)[N]) {
  constexpr int kAtOnce = N < kPack<W> ? N : kPack<W>;
#pragma unroll
  for (int first = 0; first < N; first += kAtOnce) {
    Pack<W, kAtOnce> pack;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) pack.values[i] = values[first + i];
    store<kAtOnce>(row + unit * N + first, 0, pack);
  }
}

/* Loads what store_wide has stored. */
template <int N, typename W>
static __device__ __forceinline__ void load_wide(const W *row, int64 unit, W (&values)[N]) {
  constexpr int kAtOnce = N < kPack<W> ? N : kPack<W>;
#pragma unroll
  for (int first = 0; first < N; first += kAtOnce) {
    const Pack<W, kAtOnce> pack = load<kAtOnce>(row + unit * N + first, 0);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) values[first + i] = pack.values[i];
  }
}

static __device__ __forceinline__ float square_root(float x) { return ::sqrtf(x); }
static __device__ __forceinline__ double square_root(double x) { return ::sqrt(x); }

struct Add {
  template <typename W>
  __device__ __forceinline__ W operator()(W left, W right) const {
    return left + right;
  }
};

struct Max {
  /* The larger value; NaN if either is NaN. */
  template <typename W>
  __device__ __forceinline__ W operator()(W left, W right) const {
    return left > right || left != left ? left : right;
  }
};

/* The value of the lane whose number differs by the bits `lanes`. There is an overload for every type that is
 * reduced. */
static __device__ __forceinline__ float exchanged(float value, int lanes) {
  return __shfl_xor_sync(kWholeWarp, value, lanes);
}
static __device__ __forceinline__ double exchanged(double value, int lanes) {
  return __shfl_xor_sync(kWholeWarp, value, lanes);
}
static __device__ __forceinline__ int exchanged(int value, int lanes) {
  return __shfl_xor_sync(kWholeWarp, value, lanes);
}

/* Reduces by `combine` over the 32 lanes of a warp; every lane gets the result. All lanes get the same bits where
 * combine is commutative: the two lanes of an exchange combine the same two values. */
template <typename V, typename Combine>
static __device__ __forceinline__ V warp_reduce(V value, Combine combine) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = combine(value, exchanged(value, lanes));
  return value;
}

/* Reduces by `combine` over the threads of a row; every thread gets the result. All threads of the block must call
 * it together. */
template <typename V, typename Combine>
static __device__ __forceinline__ V row_reduce(V value, V identity, Combine combine) {
  value = warp_reduce(value, combine);
  if (blockDim.x <= kWarp) return value;
  __shared__ V of_warp[kWarp];
  const int lane = threadIdx.x % kWarp;
  __syncthreads(); /* The values of an earlier call have been read. */
  if (lane == 0) of_warp[threadIdx.x / kWarp] = value;
  __syncthreads();
  return warp_reduce(lane * kWarp < static_cast<int>(blockDim.x) ? of_warp[lane] : identity, combine);
}

template <typename W>
static __device__ __forceinline__ W row_sum(W value) {
  return row_reduce(value, W(0), Add());
}

/* The first row of this thread, and the distance to its next row. */
static __device__ __forceinline__ int64 first_row() {
  return static_cast<int64>(blockIdx.x) * blockDim.y + threadIdx.y;
}
static __device__ __forceinline__ int64 row_step() { return static_cast<int64>(gridDim.x) * blockDim.y; }

/* The number of the tensor that block blockIdx.x works on. The blocks of the `count` tensors follow each other: the
 * last tensor whose first_block is not beyond this block. */
template <typename Tensor>
static __device__ __forceinline__ int tensor_of_block(const Tensor *tensors, int count) {
  int found = 0;
  for (int stop = count; stop - found > 1;) {
    const int middle = (found + stop) / 2;
    if (tensors[middle].first_block <= static_cast<int>(blockIdx.x)) {
      found = middle;
    } else {
      stop = middle;
    }
  }
  return found;
}

/* extern "C" entry points name_float32, name_bfloat16 and name_float16, for blocks of up to `threads` threads: each calls
 * body<T>(arguments), where `arguments` is the one parameter of the kernel, an `Arguments`. */
#define LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(name, threads, Arguments, body) \
  LLMCTL_CUDA_ENTRY(name##_float32, threads, Arguments, body<float>)      \
  LLMCTL_CUDA_ENTRY(name##_bfloat16, threads, Arguments, body<bfloat16>)  \
  LLMCTL_CUDA_ENTRY(name##_float16, threads, Arguments, body<float16>)

/* The same, and name_float64. */
#define LLMCTL_CUDA_KERNEL(name, threads, Arguments, body)            \
  LLMCTL_CUDA_KERNEL_WITHOUT_DOUBLE(name, threads, Arguments, body)   \
  LLMCTL_CUDA_ENTRY(name##_float64, threads, Arguments, body<double>)

/* One entry point. Its parameter stays in constant memory: no thread copies it. The launch bounds ask for one block
 * per multiprocessor, because without a number ptxas aims at a number of its own, and spills a few registers to
 * reach it. */
#define LLMCTL_CUDA_ENTRY(name, threads, Arguments, ...)                                                       \
  extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Arguments arguments) { \
    __VA_ARGS__(arguments);                                                                                    \
  }

}  // namespace llmctl

#endif
