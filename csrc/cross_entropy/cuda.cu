#include "cuda.h"

#include "../common/cuda/device.h"
#include "../common/cuda/online_sums.h"

namespace llmctl {
namespace {

__device__ __forceinline__ float logarithm(float x) { return ::logf(x); }
__device__ __forceinline__ double logarithm(double x) { return ::log(x); }

template <typename T>
struct Element {
  using type = T;
};
template <typename T>
struct Element<const T> {
  using type = T;
};

/* A segment of a row: the elements before the first aligned pack, whole packs, and the remaining elements. Rows of a
 * vocabulary may have any width, so that their alignments differ. Indices within a row are ints, which take half the
 * registers. */
template <typename T>
struct Segment {
  using Values = typename Element<T>::type;
  static constexpr int N = kPack<T>;
  T *start;
  int head, units, tail;

  __device__ __forceinline__ Segment(T *row, int count) : start(row) {
    const int beyond = static_cast<int>(reinterpret_cast<unsigned long long>(row) % 16 / sizeof(T));
    const int before = beyond == 0 ? 0 : N - beyond;
    head = before < count ? before : count;
    units = (count - head) / N;
    tail = count - head - units * N;
  }

  /* The place of the last few elements. */
  __device__ __forceinline__ int tail_start() const { return head + units * N; }

  /* Calls each(pack, number of its first element), with as many loads as fit before any of them is used. */
  template <typename Each>
  __device__ __forceinline__ void for_packs(Each each) const {
    const int threads = blockDim.x, thread = threadIdx.x;
#pragma unroll 1
    for (int first = thread; first < units; first += kCrossEntropyLoads * threads) {
      Pack<Values, N> packs[kCrossEntropyLoads];
#pragma unroll
      for (int k = 0; k < kCrossEntropyLoads; ++k) {
        if (first + k * threads < units) packs[k] = load<N, Values>(start + head, first + k * threads);
      }
#pragma unroll
      for (int k = 0; k < kCrossEntropyLoads; ++k) {
        if (first + k * threads < units) each(packs[k], head + (first + k * threads) * N);
      }
    }
    if (thread < head) each(load<1, Values>(start, thread), thread);
    if (thread < tail) each(load<1>(start, tail_start() + thread), tail_start() + thread);
  }

  __device__ __forceinline__ void clear() const {
    const int threads = blockDim.x, thread = threadIdx.x;
    Pack<T, N> zeros;
#pragma unroll
    for (int i = 0; i < N; ++i) zeros.values[i] = T(wide<T>(0));
#pragma unroll 1
    for (int unit = thread; unit < units; unit += threads) store<N>(start + head, unit, zeros);
    if (thread < head) start[thread] = zeros.values[0];
    if (thread < tail) start[tail_start() + thread] = zeros.values[0];
  }
};

/* The column of a label among this rank's columns; -1 if it is elsewhere. */
__device__ __forceinline__ int column_of(const LogitColumns &columns, int64 label) {
  const int64 column = label - columns.first;
  return column >= 0 && column < columns.num_valid ? static_cast<int>(column) : -1;
}

template <typename T>
__device__ __forceinline__ wide<T> logit_of(const T *row, const LogitColumns &columns, int64 label) {
  if (label < 0 || label >= columns.vocab_size) return wide<T>(float_of_bits(0x7fc00000u));
  const int column = column_of(columns, label);
  return column < 0 ? wide<T>(0) : wide<T>(row[column]);
}

/* The sum of logit - maximum, relative to the largest logit so far: beside one logit far from all others, such as a
 * masked one, the others would be lost. */
template <typename T>
struct LogitSum {
  using W = wide<T>;
  W sum = 0;
  int count = 0;

  __device__ __forceinline__ void count_from(W maximum, W before) {
    if (maximum > before) sum += W(count) * (reference(before) - maximum);
  }

  /* `before` and `maximum`: the largest, without these values and with them. */
  template <int N>
  __device__ __forceinline__ void add(const W (&values)[N], W maximum, W before) {
    count_from(maximum, before);
    const W from = reference(maximum);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += values[i] - from;
    count += N;
  }
};

/* The loss of a row whose columns are the whole vocabulary. */
template <typename W>
__device__ __forceinline__ W loss_of(const CrossEntropyStats &a, W maximum, W exp_sum, W label_logit, W logit_sum) {
  const W z_loss = W(a.z_loss), smoothing = W(a.smoothing), log_sum = logarithm(exp_sum), log_z = log_sum + maximum;
  /* Relative to the maximum: added to a maximum of 10000, the logarithm of a sum would lose 13 of 24 bits. */
  W distance = maximum - label_logit;
  if (smoothing != W(0)) distance = distance * (W(1) - smoothing) - logit_sum / W(a.columns.vocab_size) * smoothing;
  const W plain = log_sum + distance;
  return z_loss != W(0) ? plain + z_loss * log_z * log_z : plain;
}

template <typename T>
__device__ __forceinline__ void write_stats(const CrossEntropyStats &a, int64 row, wide<T> maximum, wide<T> exp_sum,
                                            wide<T> label_logit, wide<T> logit_sum) {
  using W = wide<T>;
  if (threadIdx.x != 0) return;
  static_cast<W *>(a.maximum)[row] = maximum;
  static_cast<W *>(a.exp_sum)[row] = exp_sum;
  if (a.label_logit != nullptr) static_cast<W *>(a.label_logit)[row] = label_logit;
  if (a.logit_sum != nullptr) static_cast<W *>(a.logit_sum)[row] = logit_sum;
  if (a.losses != nullptr) {
    static_cast<W *>(a.losses)[row] = loss_of<W>(a, maximum, exp_sum, label_logit, logit_sum);
  }
}

template <typename T>
__device__ __forceinline__ void cross_entropy_stats_rows(const CrossEntropyStats &a) {
  using W = wide<T>;
  const LogitColumns &columns = a.columns;
  for (int64 row = first_row(); row < a.rows; row += row_step()) {
    const int64 label = static_cast<const int64 *>(a.labels)[row];
    if (label == columns.ignored) {
      write_stats<T>(a, row, W(0), W(1), W(0), W(0));
      continue;
    }
    const T *logits = static_cast<const T *>(a.logits) + row * columns.width;
    OnlineSums<T> sums;
    LogitSum<T> logit_sum;
    const bool sums_logits = a.logit_sum != nullptr || a.smoothing != 0;
    Segment<const T>(logits, static_cast<int>(columns.num_valid)).for_packs([&](const auto &pack, int) {
      constexpr int N = sizeof(pack.values) / sizeof(T);
      W values[N];
#pragma unroll
      for (int i = 0; i < N; ++i) values[i] = W(pack.values[i]);
      const W before = sums.maximum;
      sums.add(values);
      if (sums_logits) logit_sum.add(values, sums.maximum, before);
    });
    const W own = sums.maximum;
    sums.combine();
    logit_sum.count_from(sums.maximum, own);
    const W total = sums_logits ? row_sum(logit_sum.sum) : W(0);
    write_stats<T>(a, row, sums.maximum, sums.exp_sum, logit_of(logits, columns, label), total);
  }
}

template <typename T>
__device__ __forceinline__ void cross_entropy_grad_rows(const CrossEntropyGrad &a) {
  using W = wide<T>;
  const LogitColumns &columns = a.columns;
  for (int64 row = first_row(); row < a.rows; row += row_step()) {
    T *logits = static_cast<T *>(a.logits) + row * columns.width;
    const int64 label = static_cast<const int64 *>(a.labels)[row];
    const W grad = static_cast<const W *>(a.grad_losses)[row];
    const int count = label != columns.ignored && grad != W(0) ? static_cast<int>(columns.num_valid) : 0;
    Segment<T>(logits + count, static_cast<int>(columns.width) - count).clear();
    if (count == 0) continue;
    const W from = static_cast<const W *>(a.global_max)[row], sum = static_cast<const W *>(a.exp_sum)[row];
    const W share = grad * (W(1) + W(2 * a.z_loss) * (from + logarithm(sum))) / sum;
    const W everywhere = grad * W(a.smoothing) / W(columns.vocab_size), at_label = grad * W(1 - a.smoothing);
    const int column = column_of(columns, label);
    Segment<T>(logits, count).for_packs([&](auto pack, int first) {
      constexpr int N = sizeof(pack.values) / sizeof(T);
      W results[N];
#pragma unroll
      for (int i = 0; i < N; ++i) results[i] = power_of<T>(W(pack.values[i]) - from) * share - everywhere;
      const int place = column - first;
      if (column >= 0 && place >= 0 && place < N) {
#pragma unroll
        for (int i = 0; i < N; ++i) results[i] -= place == i ? at_label : W(0);
      }
#pragma unroll
      for (int i = 0; i < N; ++i) pack.values[i] = T(results[i]);
      store<N>(logits + first, 0, pack);
    });
  }
}

}  // namespace

LLMCTL_CUDA_KERNEL(cross_entropy_stats, kCrossEntropyThreads, CrossEntropyStats, cross_entropy_stats_rows)
LLMCTL_CUDA_KERNEL(cross_entropy_grad, kCrossEntropyThreads, CrossEntropyGrad, cross_entropy_grad_rows)

}  // namespace llmctl
