#include "abi.h"

#include <type_traits>

#include "../common/cpu/exponentials.h"
#include "../common/cpu/isa.h"

namespace {

using llmctl::wide;

/* Exponentials of a row that are kept on the stack. */
constexpr int64_t kKept = 1024;

/* Keys that a query sees. */
int64_t visible(int64_t query, int64_t queries, int64_t width) {
  const int64_t count = query + 1 + width - queries;
  return count > 0 ? count : 0;
}

bool any_seen(const unsigned char *mask, int64_t width) {
  int seen = 0;
#pragma omp simd reduction(| : seen)
  for (int64_t i = 0; i < width; ++i) seen |= mask[i] == 0;
  return seen != 0;
}

/* Softmax of score(i), i < count, into `shares`, which may be the memory that score reads: each element is read before it
 * is written. */
template <typename T, typename Score>
void softmax(T *shares, int64_t count, Score score) {
  using W = wide<T>;
  const W from = llmctl::reference(llmctl::largest<W>(count, score));
  if (std::is_same<T, W>::value) {
    const W sum = llmctl::sum_of<W>(count, [=](int64_t i) {
      const W power = llmctl::exponential_of_negative(score(i) - from);
      shares[i] = T(power);
      return power;
    });
    const W factor = W(1) / sum;
    for (int64_t i = 0; i < count; ++i) shares[i] = T(W(shares[i]) * factor);
    return;
  }
  /* Rounded to 16 bits once, at the end: short rows keep their exponentials, long rows compute them again. */
  if (count <= kKept) {
    W powers[kKept];
    W *const kept = powers;
    const W sum = llmctl::sum_of<W>(count, [=](int64_t i) {
      kept[i] = llmctl::exponential_of_negative(score(i) - from);
      return kept[i];
    });
    const W factor = W(1) / sum;
    for (int64_t i = 0; i < count; ++i) shares[i] = T(kept[i] * factor);
    return;
  }
  const W sum = llmctl::sum_of<W>(count, [=](int64_t i) { return llmctl::exponential_of_negative(score(i) - from); });
  const W factor = W(1) / sum;
  for (int64_t i = 0; i < count; ++i) shares[i] = T(llmctl::exponential_of_negative(score(i) - from) * factor);
}

template <typename T>
void backward(const T *grad_shares, const T *shares, T *grad_scores, int64_t count, wide<T> scale) {
  using W = wide<T>;
  const W along = llmctl::sum_of<W>(count, [=](int64_t i) { return W(grad_shares[i]) * W(shares[i]); });
  for (int64_t i = 0; i < count; ++i) grad_scores[i] = T(scale * W(shares[i]) * (W(grad_shares[i]) - along));
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_scaled_masked_softmax,
                  (int dtype, const void *scores, const unsigned char *mask, void *shares, int64_t heads,
                   int64_t queries, int64_t width, int64_t batch_stride, int64_t head_stride, int64_t query_stride,
                   double scale, int64_t first, int64_t stop),
                  (dtype, scores, mask, shares, heads, queries, width, batch_stride, head_stride, query_stride, scale,
                   first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    for (int64_t row = first; row < stop; ++row) {
      const int64_t query = row % queries, head = row / queries % heads, batch = row / queries / heads;
      const T *const values = static_cast<const T *>(scores) + row * width;
      T *const results = static_cast<T *>(shares) + row * width;
      const unsigned char *const hidden = mask + batch * batch_stride + head * head_stride + query * query_stride;
      if (!any_seen(hidden, width)) {
        for (int64_t i = 0; i < width; ++i) results[i] = T(W(0));
        continue;
      }
      const W factor = W(scale);
      softmax(results, width, [=](int64_t i) { return hidden[i] ? -llmctl::kInfinity<W> : W(values[i]) * factor; });
    }
  });
}

LLMCTL_CPU_KERNEL(llmctl_cpu_scaled_causal_softmax,
                  (int dtype, const void *scores, void *shares, int64_t queries, int64_t width, double scale,
                   int64_t first, int64_t stop),
                  (dtype, scores, shares, queries, width, scale, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    for (int64_t row = first; row < stop; ++row) {
      const T *const values = static_cast<const T *>(scores) + row * width;
      T *const results = static_cast<T *>(shares) + row * width;
      const int64_t count = visible(row % queries, queries, width);
      const W factor = W(scale);
      if (count > 0) softmax(results, count, [=](int64_t i) { return W(values[i]) * factor; });
      for (int64_t i = count; i < width; ++i) results[i] = T(W(0));
    }
  });
}

LLMCTL_CPU_KERNEL(llmctl_cpu_scaled_softmax_backward,
                  (int dtype, const void *grad_shares, const void *shares, void *grad_scores, int64_t queries,
                   int64_t width, double scale, int causal, int64_t first, int64_t stop),
                  (dtype, grad_shares, shares, grad_scores, queries, width, scale, causal, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    using T = decltype(element);
    using W = wide<T>;
    for (int64_t row = first; row < stop; ++row) {
      const int64_t start = row * width, count = causal ? visible(row % queries, queries, width) : width;
      T *const results = static_cast<T *>(grad_scores) + start;
      backward(static_cast<const T *>(grad_shares) + start, static_cast<const T *>(shares) + start, results, count,
               W(scale));
      for (int64_t i = count; i < width; ++i) results[i] = T(W(0));
    }
  });
}
