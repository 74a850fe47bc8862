#include "../include/activation.h"

#include <algorithm>
#include <type_traits>

#include "../shared/activation_math.h"
#include "isa.h"
#include "past_caches.h"
#include "rough_functions.h"
#include "rounding.h"

namespace {

using llmctl::Activated;
using llmctl::wide;

/* A row is worked on in stretches that stay in the first cache, where with a bias numbers of 16 bit lie widened
 * meanwhile. */
constexpr int64_t kStretch = 256;

/* Bytes between what is read and what is fetched: numbers of 16 bit take so long to compute that a core does not look ahead
 * by itself. With this and results past the caches, SwiGLU's forward and backward of 4096 x 2 x 4096 bfloat16 take 18.4
 * instead of 21.5 ms on one core of an AMD EPYC. Float32 would take longer with either. */
constexpr int64_t kAhead = 8192;

template <typename T>
void fetch_ahead_of(const T *from) {
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  if constexpr (kSize == 2) {
    for (int64_t i = 0; i < kStretch; i += llmctl::kCacheLine / kSize) __builtin_prefetch(from + kAhead / kSize + i);
  }
}

/* `count` numbers, widened, with their bias; where that changes nothing they are not moved. */
template <typename T>
const wide<T> *read(const T *from, const T *bias, wide<T> *buffer, int64_t count) {
  using W = wide<T>;
  if (bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = W(from[i]) + W(bias[i]);
    return buffer;
  }
  if constexpr (std::is_same_v<T, W>) {
    return from;
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) buffer[i] = W(from[i]);
    return buffer;
  }
}

/* Where results for `to` are to be computed: there, or in `buffer` where they are to be rounded by `write`. */
template <typename T>
wide<T> *target(T *to, wide<T> *buffer) {
  if constexpr (std::is_same_v<T, wide<T>>) {
    return to;
  } else {
    return buffer;
  }
}

template <typename T>
void write(T *to, const wide<T> *computed, int64_t count, bool past_caches) {
  if constexpr (!std::is_same_v<T, wide<T>>) {
    if (!past_caches) return llmctl::round_all(to, computed, count);
    alignas(llmctl::kCacheLine) T rounded[kStretch];
    llmctl::round_all(rounded, computed, count);
    llmctl::copy_past_caches(to, rounded, count);
  }
}

/* `E` and `R`, of what is read and of results: elements, or what they are widened to. */
template <int kind, typename Functions, typename E, typename R>
void forward(const E *gate, const E *up, wide<E> weight, R *activated, int64_t count) {
  using W = wide<E>;
  if (up != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      activated[i] = llmctl::activate<kind, Functions>(W(gate[i])).value * W(up[i]) * weight;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) activated[i] = llmctl::activate<kind, Functions>(W(gate[i])).value * weight;
  }
}

/* Returns the sum of the gradient times what has not been multiplied by `weight`; without kWeighted, where that is 1, 0. */
template <int kind, bool kWeighted, typename Functions, typename E, typename R>
wide<E> backward(const E *grads, const E *gates, const E *ups, wide<E> weight, R *grad_gate, R *grad_up,
                 int64_t count) {
  using W = wide<E>;
  W along = 0;
  if (ups != nullptr) {
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < count; ++i) {
      const Activated<W> at = llmctl::activate<kind, Functions>(W(gates[i]));
      const W grad = W(grads[i]), up = W(ups[i]), weighted = kWeighted ? grad * weight : grad;
      if constexpr (kWeighted) along += grad * (at.value * up);
      grad_gate[i] = weighted * up * at.slope;
      grad_up[i] = weighted * at.value;
    }
  } else {
#pragma omp simd reduction(+ : along)
    for (int64_t i = 0; i < count; ++i) {
      const Activated<W> at = llmctl::activate<kind, Functions>(W(gates[i]));
      const W grad = W(grads[i]);
      if constexpr (kWeighted) along += grad * at.value;
      grad_gate[i] = (kWeighted ? grad * weight : grad) * at.slope;
    }
  }
  return along;
}

template <typename W>
void add(W *sum, const W *summand, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sum[i] += summand[i];
}

/* Whether loops are compiled that read and write T itself: float16 is no type to train in on CPUs. */
template <typename T>
constexpr bool kIsDirect = !std::is_same_v<T, llmctl::float16>;

template <int kind, typename T>
void forward_row(const T *inner, const T *bias, bool gated, wide<T> weight, T *activated, int64_t width,
                 bool past_caches) {
  using W = wide<T>;
  using Functions = llmctl::FunctionsFor<T>;
  alignas(64) W gates[kStretch], ups[kStretch], results[kStretch];
  const bool is_written = past_caches || llmctl::rounds_by_instruction<T>();
  for (int64_t start = 0; start < width; start += kStretch) {
    const int64_t count = std::min(kStretch, width - start), second = width + start;
    T *const to = activated + start;
    if (past_caches) {
      fetch_ahead_of(inner + start);
      if (gated) fetch_ahead_of(inner + second);
    }
    W *const computed = target(to, results);
    if (!kIsDirect<T> || bias != nullptr) {
      const W *gate = read(inner + start, bias ? bias + start : nullptr, gates, count);
      const W *up = gated ? read(inner + second, bias ? bias + second : nullptr, ups, count) : nullptr;
      forward<kind, Functions>(gate, up, weight, computed, count);
      write(to, computed, count, past_caches);
    } else if constexpr (kIsDirect<T>) {
      const T *const gate = inner + start, *const up = gated ? inner + second : nullptr;
      if (is_written) {
        forward<kind, Functions>(gate, up, weight, computed, count);
        write(to, computed, count, past_caches);
      } else {
        forward<kind, Functions>(gate, up, weight, to, count);
      }
    }
  }
}

/* Returns the gradient of `weight`, with kWeighted; else that is 1. */
template <int kind, bool kWeighted, typename T>
wide<T> backward_row(const T *grad_activated, const T *inner, const T *bias, bool gated, wide<T> weight, T *grad_inner,
                     wide<T> *grad_bias, int64_t width, bool past_caches) {
  using W = wide<T>;
  using Functions = llmctl::FunctionsFor<T>;
  alignas(64) W grads[kStretch], gates[kStretch], ups[kStretch], grad_gates[kStretch], grad_ups[kStretch];
  const bool is_written = past_caches || llmctl::rounds_by_instruction<T>();
  W along = 0;
  for (int64_t start = 0; start < width; start += kStretch) {
    const int64_t count = std::min(kStretch, width - start), second = width + start;
    T *const to_gate = grad_inner + start, *const to_up = gated ? grad_inner + second : nullptr;
    W *const grad_gate = target(to_gate, grad_gates), *const grad_up = gated ? target(to_up, grad_ups) : nullptr;
    if (past_caches) {
      fetch_ahead_of(grad_activated + start);
      fetch_ahead_of(inner + start);
      if (gated) fetch_ahead_of(inner + second);
    }
    bool is_rounded = false;
    if (!kIsDirect<T> || bias != nullptr) {
      const W *grad = read<T>(grad_activated + start, nullptr, grads, count);
      const W *gate = read(inner + start, bias ? bias + start : nullptr, gates, count);
      const W *up = gated ? read(inner + second, bias ? bias + second : nullptr, ups, count) : nullptr;
      along += backward<kind, kWeighted, Functions>(grad, gate, up, weight, grad_gate, grad_up, count);
    } else if constexpr (kIsDirect<T>) {
      const T *const grad = grad_activated + start, *const gate = inner + start;
      const T *const up = gated ? inner + second : nullptr;
      is_rounded = !is_written;
      along += is_written ? backward<kind, kWeighted, Functions>(grad, gate, up, weight, grad_gate, grad_up, count)
                              : backward<kind, kWeighted, Functions>(grad, gate, up, weight, to_gate, to_up, count);
    }
    if (!is_rounded) write(to_gate, grad_gate, count, past_caches);
    if (!is_rounded && gated) write(to_up, grad_up, count, past_caches);
    if (grad_bias != nullptr) {
      add(grad_bias + start, grad_gate, count);
      if (gated) add(grad_bias + second, grad_up, count);
    }
  }
  return along;
}

/* visit(T{}, kind) with the element type and the activation as types. */
template <typename Visitor>
void with_types(int dtype, int kind, Visitor visit) {
  llmctl::with_dtype(dtype, [=](auto element) {
    switch (kind) {
      case LLMCTL_SILU: return visit(element, std::integral_constant<int, LLMCTL_SILU>{});
      case LLMCTL_GELU: return visit(element, std::integral_constant<int, LLMCTL_GELU>{});
      case LLMCTL_GELU_TANH: return visit(element, std::integral_constant<int, LLMCTL_GELU_TANH>{});
    }
  });
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_activation,
                  (int dtype, int kind, int gated, const void *inner, const void *bias, const void *row_weight,
                   void *activated, int64_t width, int64_t first, int64_t stop, int past_caches),
                  (dtype, kind, gated, inner, bias, row_weight, activated, width, first, stop, past_caches)) {
  with_types(dtype, kind, [=](auto element, auto f) {
    using T = decltype(element);
    const int64_t inner_width = gated ? 2 * width : width;
    for (int64_t row = first; row < stop; ++row) {
      forward_row<f.value>(static_cast<const T *>(inner) + row * inner_width, static_cast<const T *>(bias), gated != 0,
                           row_weight ? static_cast<const wide<T> *>(row_weight)[row] : wide<T>(1),
                           static_cast<T *>(activated) + row * width, width, past_caches != 0);
    }
  });
  llmctl::finish_stores(past_caches != 0);
}

LLMCTL_CPU_KERNEL(llmctl_cpu_activation_backward,
                  (int dtype, int kind, int gated, const void *grad_activated, const void *inner, const void *bias,
                   const void *row_weight, void *grad_inner, void *grad_bias, void *grad_row_weight, int64_t width,
                   int64_t first, int64_t stop, int past_caches),
                  (dtype, kind, gated, grad_activated, inner, bias, row_weight, grad_inner, grad_bias, grad_row_weight,
                   width, first, stop, past_caches)) {
  with_types(dtype, kind, [=](auto element, auto f) {
    using T = decltype(element);
    const int64_t inner_width = gated ? 2 * width : width;
    const auto backward_of = [=](int64_t row, wide<T> weight, auto is_weighted) {
      return backward_row<f.value, is_weighted.value>(
          static_cast<const T *>(grad_activated) + row * width, static_cast<const T *>(inner) + row * inner_width,
          static_cast<const T *>(bias), gated != 0, weight, static_cast<T *>(grad_inner) + row * inner_width,
          static_cast<wide<T> *>(grad_bias), width, past_caches != 0);
    };
    for (int64_t row = first; row < stop; ++row) {
      if (row_weight == nullptr) {
        backward_of(row, wide<T>(1), std::false_type{});
        continue;
      }
      const wide<T> along = backward_of(row, static_cast<const wide<T> *>(row_weight)[row], std::true_type{});
      if (grad_row_weight != nullptr) static_cast<wide<T> *>(grad_row_weight)[row] = along;
    }
  });
  llmctl::finish_stores(past_caches != 0);
}
