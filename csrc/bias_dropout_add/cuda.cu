#include "cuda.h"

#include "../common/cuda/device.h"

namespace llmctl {
namespace {
namespace bias_dropout_add {

/* The random numbers of N elements from `place` on: all numbers of whole counters, or one of a counter's four. */
template <int N>
struct Numbers {
  unsigned values[N];

  __device__ __forceinline__ Numbers(uint64 place, const PhiloxKeys &keys) {
    static_assert(N == 1 || N % 4 == 0, "packs are whole counters");
    if constexpr (N == 1) {
      const Philox4 four = philox(place / 4, keys);
      const int lane = static_cast<int>(place % 4);
      values[0] = lane == 0 ? four.lanes[0] : lane == 1 ? four.lanes[1] : lane == 2 ? four.lanes[2] : four.lanes[3];
    } else {
#pragma unroll
      for (int first = 0; first < N; first += 4) {
        const Philox4 four = philox((place + first) / 4, keys);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[first + i] = four.lanes[i];
      }
    }
  }
};

/* (input + bias) * (1 / (1 - p) or 0) + residual, of one unit. */
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> dropped(const BiasDropoutAdd &a, uint64 place, Pack<T, N> input,
                                              const Pack<T, N> &bias, const Pack<T, N> &residual) {
  using W = wide<T>;
  const W scale = static_cast<W>(a.scale);
  const Numbers<N> numbers(place, a.keys);
  W values[N];
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = W(input.values[i]);
  if (a.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += W(bias.values[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] *= numbers.values[i] >= a.threshold ? scale : W(0);
  if (a.residual != nullptr) {
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] += W(residual.values[i]);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) input.values[i] = T(values[i]);
  return input;
}

template <int N, typename T>
__device__ __forceinline__ void run_units(const BiasDropoutAdd &a) {
  /* With more than one chunk in a row a block has no second row of threads: see launch.cpp. */
  const unsigned chunks = static_cast<unsigned>(a.chunks);
  const int64 row = chunks == 1 ? first_row() : blockIdx.x / chunks;
  if (row >= a.rows) return;
  const int first = static_cast<int>((chunks == 1 ? 0 : blockIdx.x % chunks) * kDropoutUnits * blockDim.x + threadIdx.x);
  const int64 before = row * a.units;
  const T *input = static_cast<const T *>(a.input) + before * N, *bias = static_cast<const T *>(a.bias);
  const T *residual = static_cast<const T *>(a.residual) + (a.residual == nullptr ? 0 : before * N);
  T *output = static_cast<T *>(a.output) + before * N;
  Pack<T, N> inputs[kDropoutUnits], biases[kDropoutUnits], residuals[kDropoutUnits];
  int channel = a.bias == nullptr ? 0 : first % a.channels;
#pragma unroll
  for (int k = 0; k < kDropoutUnits; ++k) {
    const int unit = first + k * static_cast<int>(blockDim.x);
    if (unit >= a.units) continue;
    inputs[k] = load<N>(input, unit);
    if (a.bias != nullptr) biases[k] = load<N>(bias, channel);
    if (a.residual != nullptr) residuals[k] = load<N>(residual, unit);
    channel += blockDim.x;
    if (channel >= a.channels) channel %= a.channels;
  }
  const uint64 place = static_cast<uint64>(a.positions[row]) * static_cast<uint64>(a.units) * N;
#pragma unroll
  for (int k = 0; k < kDropoutUnits; ++k) {
    const int unit = first + k * static_cast<int>(blockDim.x);
    if (unit >= a.units) continue;
    store<N>(output, unit, dropped(a, place + static_cast<uint64>(unit) * N, inputs[k], biases[k], residuals[k]));
  }
}

template <typename T>
__device__ __forceinline__ void run(const BiasDropoutAdd &a) {
  /* Two doubles use half of a counter's numbers. */
  if constexpr (kPack<T> % 4 == 0) {
    if (a.packed) return run_units<kPack<T>, T>(a);
  }
  run_units<1, T>(a);
}

}  // namespace bias_dropout_add
}  // namespace

LLMCTL_CUDA_KERNEL(bias_dropout_add, kDropoutThreads, BiasDropoutAdd, bias_dropout_add::run)

}  // namespace llmctl
