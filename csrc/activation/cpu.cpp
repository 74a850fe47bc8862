#include "abi.h"

#include <algorithm>
#include <type_traits>

#include "../common/activation_math.h"
#include "../common/cpu/isa.h"
#include "../common/cpu/results.h"
#include "../common/cpu/rough_functions.h"
#include "../common/cpu/rounding.h"

namespace {

using llmctl::Activated;
using llmctl::wide;

/* Elements that are computed together and stored at once: as 16-bit elements they fill a cache line. Stores past the
 * caches are thus spread among the loads. */
constexpr int64_t kTogether = llmctl::kCacheLine / 2;

/* Bytes from the element that is read to the element that is prefetched. The computation is so long that a core's own
 * prefetching does not reach far enough. On one core of an AMD EPYC, forward and backward of 4096 x 2 x 4096 elements of
 * float32 take 4% longer without prefetching, and of 1024 x 2 x 11008 elements of bfloat16 5%. With 32768 bytes the
 * first case takes another 6% less, but rows of 11008 elements of float32 take 15% more. */
constexpr int64_t kAhead = 512;

template <typename T>
LLMCTL_FN void fetch_ahead_of(const T *from) {
  constexpr int64_t kSize = static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < kTogether; i += llmctl::kCacheLine / kSize) __builtin_prefetch(from + kAhead / kSize + i);
}

/* `count` elements, widened, with their bias; elements that are neither widened nor biased are not copied. */
template <typename T>
LLMCTL_FN const wide<T> *read(const T *from, const T *bias, wide<T> *buffer, int64_t count) {
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

/* True if a row is processed kTogether elements at a time. Within the caches and without widening or rounding this
 * takes 4% longer. */
template <typename T>
bool in_lines(const T *bias, bool past_caches) {
  return !std::is_same_v<T, wide<T>> || bias != nullptr || past_caches;
}

/* The memory in which the results for `to` are computed: `to` itself if they need neither rounding nor whole lines. */
template <typename T>
LLMCTL_FN wide<T> *target(T *to, wide<T> *buffer, bool in_lines) {
  if constexpr (std::is_same_v<T, wide<T>>) {
    if (!in_lines) return to;
  }
  return buffer;
}

/* The way in which the results of a row are stored. */
template <typename T>
struct Storing {
  bool past_caches, by_instruction;

  /* Only whole lines of memory can go past the caches. */
  Storing(const T *row, bool past_caches_in)
      : past_caches(past_caches_in && reinterpret_cast<uintptr_t>(row) % llmctl::kCacheLine == 0),
        by_instruction(llmctl::rounds_by_instruction<T>()) {}

  /* Stores `count` results, kTogether of them if kIsWhole, from the memory that `target` returned. */
  template <bool kIsWhole>
  LLMCTL_FN void store(T *to, const wide<T> *computed, int64_t count) const {
    if (!kIsWhole && static_cast<const void *>(to) == computed) return;
    if (!kIsWhole) return llmctl::round_all(to, computed, count);
    for (int64_t i = 0; i < kTogether; i += llmctl::kPerLine<T>) {
      if (past_caches) {
        llmctl::store_whole_line<true>(to + i, computed + i, by_instruction);
      } else {
        llmctl::store_whole_line<false>(to + i, computed + i, by_instruction);
      }
    }
  }
};

/* `E`: the type of the elements that are read, or their wide type. */
template <int kind, typename Functions, typename E>
LLMCTL_FN void forward(const E *gate, const E *up, wide<E> weight, wide<E> *activated, int64_t count) {
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

/* Returns the sum of the gradient times the result before `weight`; 0 without kWeighted, where the weight is 1. */
template <int kind, bool kWeighted, typename Functions, typename E>
LLMCTL_FN wide<E> backward(const E *grads, const E *gates, const E *ups, wide<E> weight, wide<E> *grad_gate,
                           wide<E> *grad_up, int64_t count) {
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
LLMCTL_FN void add(W *sum, const W *summand, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) sum[i] += summand[i];
}

/* True if loops are compiled that read and write T itself. Not for float16, in which CPUs do not train. */
template <typename T>
constexpr bool kIsDirect = !std::is_same_v<T, llmctl::float16>;

/* Calls step(start, count, is_whole) for a row: for each kTogether elements and then for the rest, or once. */
template <typename Step>
LLMCTL_FN void for_all(int64_t width, bool in_lines, Step step) {
  int64_t start = 0;
  for (; in_lines && start + kTogether <= width; start += kTogether) step(start, kTogether, std::true_type{});
  if (start < width) step(start, width - start, std::false_type{});
}

/* Steps must be inlined into their loops: as functions they would load the loop's constants again for every line. */
#define LLMCTL_STEP __attribute__((always_inline))

template <int kind, typename T>
void forward_row(const T *inner, const T *bias, bool gated, wide<T> weight, T *activated, int64_t width,
                 bool past_caches) {
  using W = wide<T>;
  using Functions = llmctl::FunctionsFor<T>;
  const Storing<T> storing(activated, past_caches);
  const bool lines = in_lines(bias, past_caches);
  for_all(width, lines, [&](int64_t start, int64_t count, auto is_whole) LLMCTL_STEP {
    alignas(llmctl::kCacheLine) W gates[kTogether], ups[kTogether], results[kTogether];
    const T *const of_gate = inner + start, *const of_up = of_gate + width;
    W *const computed = is_whole.value ? results : target(activated + start, results, lines);
    if (is_whole.value && past_caches) {
      fetch_ahead_of(of_gate);
      if (gated) fetch_ahead_of(of_up);
    }
    if (!kIsDirect<T> || bias != nullptr) {
      const W *gate = read(of_gate, bias ? bias + start : nullptr, gates, count);
      const W *up = gated ? read(of_up, bias ? bias + width + start : nullptr, ups, count) : nullptr;
      forward<kind, Functions>(gate, up, weight, computed, count);
    } else if constexpr (kIsDirect<T>) {
      forward<kind, Functions>(of_gate, gated ? of_up : nullptr, weight, computed, count);
    }
    storing.template store<is_whole.value>(activated + start, computed, count);
  });
}

/* Returns the gradient of `weight`, with kWeighted; without it the weight is 1. */
template <int kind, bool kWeighted, typename T>
wide<T> backward_row(const T *grad_activated, const T *inner, const T *bias, bool gated, wide<T> weight, T *grad_inner,
                     wide<T> *grad_bias, int64_t width, bool past_caches) {
  using W = wide<T>;
  using Functions = llmctl::FunctionsFor<T>;
  const Storing<T> of_gates(grad_inner, past_caches), of_ups(grad_inner + width, past_caches);
  const bool lines = kWeighted || in_lines(bias, past_caches);
  W along = 0;
  for_all(width, lines, [&](int64_t start, int64_t count, auto is_whole) LLMCTL_STEP {
    alignas(llmctl::kCacheLine) W grads[kTogether], gates[kTogether], ups[kTogether];
    alignas(llmctl::kCacheLine) W grad_gates[kTogether], grad_ups[kTogether];
    T *const to_gate = grad_inner + start, *const to_up = to_gate + width;
    W *const grad_gate = is_whole.value ? grad_gates : target(to_gate, grad_gates, lines);
    W *const grad_up = is_whole.value ? grad_ups : target(to_up, grad_ups, lines);
    const T *const of_grad = grad_activated + start, *const of_gate = inner + start, *const of_up = of_gate + width;
    if (is_whole.value && past_caches) {
      fetch_ahead_of(of_grad);
      fetch_ahead_of(of_gate);
      if (gated) fetch_ahead_of(of_up);
    }
    if (!kIsDirect<T> || bias != nullptr) {
      const W *grad = read<T>(of_grad, nullptr, grads, count);
      const W *gate = read(of_gate, bias ? bias + start : nullptr, gates, count);
      const W *up = gated ? read(of_up, bias ? bias + width + start : nullptr, ups, count) : nullptr;
      along += backward<kind, kWeighted, Functions>(grad, gate, up, weight, grad_gate, grad_up, count);
    } else if constexpr (kIsDirect<T>) {
      const T *const up = gated ? of_up : nullptr;
      along += backward<kind, kWeighted, Functions>(of_grad, of_gate, up, weight, grad_gate, grad_up, count);
    }
    of_gates.template store<is_whole.value>(to_gate, grad_gate, count);
    if (gated) of_ups.template store<is_whole.value>(to_up, grad_up, count);
    if (grad_bias != nullptr) {
      add(grad_bias + start, grad_gate, count);
      if (gated) add(grad_bias + width + start, grad_up, count);
    }
  });
  return along;
}

#undef LLMCTL_STEP

/* Calls body(T{}, kind) with the element type and the activation as types. */
template <typename Body>
void with_types(int dtype, int kind, Body body) {
  llmctl::with_dtype(dtype, [=](auto element) {
    switch (kind) {
      case LLMCTL_SILU: return body(element, std::integral_constant<int, LLMCTL_SILU>{});
      case LLMCTL_GELU: return body(element, std::integral_constant<int, LLMCTL_GELU>{});
      case LLMCTL_GELU_TANH: return body(element, std::integral_constant<int, LLMCTL_GELU_TANH>{});
      case LLMCTL_RELU: return body(element, std::integral_constant<int, LLMCTL_RELU>{});
      case LLMCTL_SQUARED_RELU: return body(element, std::integral_constant<int, LLMCTL_SQUARED_RELU>{});
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
