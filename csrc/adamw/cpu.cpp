#include "abi.h"

#include <algorithm>
#include <cmath>

#include "../common/cpu/isa.h"
#include "../common/cpu/processor.h"
#include "../common/cpu/results.h"
#include "remainders.h"

namespace {

using llmctl::kCacheLine;

/* Elements updated together: as 16-bit elements they fill a cache line. */
constexpr int64_t kTogether = kCacheLine / 2;

/* Elements from the element that is updated to the element that is prefetched. Processors prefetch by themselves, but
 * start again at every page of 4 KiB, and there are five streams. On one core of an Intel Xeon (Cascade Lake), with
 * gradients and copies in bfloat16, a step over 2^24 elements takes 27 ms with neither prefetching nor stores past the
 * caches, 22.5 ms with both, and 22 ms without any computation; 192 to 512 elements are equally fast. On one core of an
 * AMD EPYC it takes 9.5 ms with 64 to 96 elements, 9.7 ms without prefetching, and longer from 160 elements on. */
inline int64_t elements_ahead() { return llmctl::is_amd() ? 96 : 384; }

struct Constants {
  float kept, beta1, one_minus_beta1, beta2, one_minus_beta2, step_size, over_root_correction2, epsilon, over_divisor;
};

/* Computed in double: 1 - 0.999 in float loses four digits. */
Constants rounded(const llmctl_adamw &c) {
  return {static_cast<float>(1.0 - c.learning_rate * c.weight_decay),
          static_cast<float>(c.beta1),
          static_cast<float>(1.0 - c.beta1),
          static_cast<float>(c.beta2),
          static_cast<float>(1.0 - c.beta2),
          static_cast<float>(c.learning_rate / c.correction1),
          static_cast<float>(1.0 / std::sqrt(c.correction2)),
          static_cast<float>(c.epsilon),
          static_cast<float>(1.0 / c.divisor)};
}

/* M is float, or short for remainders; A and S are the types of exp_avg and exp_avg_sq. */
template <typename M, typename G, typename A, typename S>
struct Streams {
  M *master;
  const G *grad;
  A *exp_avg;
  S *exp_avg_sq;
};

/* Moments as float: the memory itself, or `room` with the values of 16-bit moments. */
LLMCTL_FN float *opened(float *moments, float *, int64_t) { return moments; }
LLMCTL_FN float *opened(const llmctl::bfloat16 *moments, float *room, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) room[i] = moments[i];
  return room;
}

LLMCTL_FN void closed(float *, const float *, int64_t) {}
LLMCTL_FN void closed(llmctl::bfloat16 *moments, const float *room, int64_t count) {
  llmctl::round_all(moments, room, count);
}

/* Elements [first, first + count), at most kTogether, with the masters `master`. put(i, value) takes the new masters,
 * with i counted from `first`. */
template <typename M, typename G, typename A, typename S, typename Put>
LLMCTL_FN void update(const Streams<M, G, A, S> &streams, const Constants &c, float *master, int64_t first,
                      int64_t count, Put put) {
  alignas(kCacheLine) float averages[kTogether], squares[kTogether];
  float *const exp_avg = opened(streams.exp_avg + first, averages, count);
  float *const exp_avg_sq = opened(streams.exp_avg_sq + first, squares, count);
  const G *const grad = streams.grad + first;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float g = static_cast<float>(grad[i]) * c.over_divisor;
    const float average = c.beta1 * exp_avg[i] + c.one_minus_beta1 * g;
    const float square = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * g * g;
    const float denominator = std::sqrt(square) * c.over_root_correction2 + c.epsilon;
    const float updated = master[i] * c.kept - c.step_size * average / denominator;
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    master[i] = updated;
    put(i, updated);
  }
  closed(streams.exp_avg + first, exp_avg, count);
  closed(streams.exp_avg_sq + first, exp_avg_sq, count);
}

template <typename T>
LLMCTL_FN void fetch(const T *together) {
  for (int64_t i = 0; i < kTogether; i += llmctl::kPerLine<T>) __builtin_prefetch(together + i);
}

/* Calls step(i, count) for kTogether elements from each `i` on while there are as many before `stop`, then for the
 * rest. */
template <typename M, typename G, typename A, typename S, typename Step>
LLMCTL_FN void for_all(const Streams<M, G, A, S> &streams, int64_t i, int64_t stop, Step step) {
  const int64_t ahead = elements_ahead();
  for (; i + kTogether <= stop; i += kTogether) {
    fetch(streams.grad + i + ahead);
    fetch(streams.master + i + ahead);
    fetch(streams.exp_avg + i + ahead);
    fetch(streams.exp_avg_sq + i + ahead);
    step(i, kTogether);
  }
  if (i < stop) step(i, stop - i);
}

template <typename G, typename A, typename S>
void step(const Streams<float, G, A, S> &streams, const Constants &c, int64_t first, int64_t stop) {
  for_all(streams, first, stop, [&](int64_t start, int64_t count) {
    update(streams, c, streams.master + start, start, count, [](int64_t, float) {});
  });
}

/* Masters as `weight` and remainders. */
template <typename G, typename A, typename S>
void step(const Streams<short, G, A, S> &streams, const Constants &c, unsigned short *weight, int64_t first,
          int64_t stop) {
  for_all(streams, first, stop, [&](int64_t start, int64_t count) {
    alignas(kCacheLine) float masters[kTogether];
    unsigned short *const upper = weight + start;
    short *const remainder = streams.master + start;
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) masters[i] = llmctl::master_of(upper[i], remainder[i]);
    update(streams, c, masters, start, count, [](int64_t, float) {});
#pragma omp simd
    for (int64_t i = 0; i < count; ++i) {
      const unsigned bits = llmctl::stored_bits(masters[i]);
      upper[i] = llmctl::weight_of(bits);
      remainder[i] = llmctl::remainder_of(bits);
    }
  });
}

/* With kPastCaches a line of memory begins at copy + first. */
template <bool kPastCaches, typename G, typename A, typename S, typename C>
void step_and_copy(const Streams<float, G, A, S> &streams, const Constants &c, C *copy, int64_t first, int64_t stop) {
  const bool by_instruction = llmctl::rounds_by_instruction<C>();
  for_all(streams, first, stop, [&](int64_t start, int64_t count) {
    alignas(kCacheLine) float masters[kTogether];
    const auto keep = [&](int64_t i, float value) { masters[i] = value; };
    if (count < kTogether) {
      update(streams, c, streams.master + start, start, count, keep);
      return llmctl::round_all(copy + start, masters, count);
    }
    update(streams, c, streams.master + start, start, kTogether, keep);
    for (int64_t i = 0; i < kTogether; i += llmctl::kPerLine<C>) {
      llmctl::store_whole_line<kPastCaches>(copy + start + i, masters + i, by_instruction);
    }
  });
}

/* The same, with copies stored past the caches. */
template <typename G, typename A, typename S, typename C>
void step_and_copy_past_caches(const Streams<float, G, A, S> &streams, const Constants &c, C *copy, int64_t first,
                               int64_t stop) {
  const auto address = reinterpret_cast<uintptr_t>(copy + first);
  const auto before_line = static_cast<int64_t>(-address % kCacheLine / sizeof(C));
  const int64_t aligned = std::min(first + before_line, stop);
  step_and_copy<false>(streams, c, copy, first, aligned);
  step_and_copy<true>(streams, c, copy, aligned, stop);
  llmctl::finish_stores(true);
}

/* Calls body(T{}) for the types that gradients and copies can have. */
template <typename Body>
void with_low_dtype(int dtype, Body body) {
  switch (dtype) {
    case LLMCTL_FLOAT32: return body(float{});
    case LLMCTL_BFLOAT16: return body(llmctl::bfloat16{});
    case LLMCTL_FLOAT16: return body(llmctl::float16{});
  }
}

/* Calls body(T{}) for the types that moments can have. */
template <typename Body>
void with_moment_dtype(int dtype, Body body) {
  if (dtype == LLMCTL_BFLOAT16) return body(llmctl::bfloat16{});
  body(float{});
}

/* Calls body(streams) with the streams of one tensor, whose masters are M. */
template <typename M, typename Body>
void with_streams(const llmctl_adamw_dtypes &dtypes, const llmctl_adamw_tensor &t, Body body) {
  with_low_dtype(dtypes.grad, [&](auto of_grad) {
    with_moment_dtype(dtypes.exp_avg, [&](auto of_average) {
      with_moment_dtype(dtypes.exp_avg_sq, [&](auto of_square) {
        using G = decltype(of_grad);
        using A = decltype(of_average);
        using S = decltype(of_square);
        body(Streams<M, G, A, S>{static_cast<M *>(t.master), static_cast<const G *>(t.grad),
                                 static_cast<A *>(t.exp_avg), static_cast<S *>(t.exp_avg_sq)});
      });
    });
  });
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_adamw,
                  (const llmctl_adamw_dtypes *dtypes, const llmctl_adamw_tensor *tensor, const llmctl_adamw *constants,
                   int64_t first, int64_t stop, int past_caches),
                  (dtypes, tensor, constants, first, stop, past_caches)) {
  const Constants c = rounded(*constants);
  const auto t = *tensor;
  const int copy_dtype = dtypes->copy;
  if (dtypes->has_remainders != 0) {
    auto *weight = static_cast<unsigned short *>(t.copy);
    return with_streams<short>(*dtypes, t, [=](auto streams) { step(streams, c, weight, first, stop); });
  }
  with_streams<float>(*dtypes, t, [=](auto streams) {
    if (t.copy == nullptr) return step(streams, c, first, stop);
    with_low_dtype(copy_dtype, [=](auto of_copy) {
      auto *copy = static_cast<decltype(of_copy) *>(t.copy);
      if (past_caches != 0) return step_and_copy_past_caches(streams, c, copy, first, stop);
      step_and_copy<false>(streams, c, copy, first, stop);
    });
  });
}
