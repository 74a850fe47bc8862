/* Results of a row: a line of memory at a time is computed in the wide type, rounded and stored, past the caches if the
 * results would not fit. These stores alternate with loads: many consecutive stores would wait for each other. */
#ifndef LLMCTL_RESULTS_H
#define LLMCTL_RESULTS_H

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "past_caches.h"
#include "rounding.h"

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

/* Elements of a line. */
template <typename T>
constexpr int64_t kPerLine = kCacheLine / static_cast<int64_t>(sizeof(T));

/* Prefetches the line of `next`, at any address. A row that is read twice is prefetched while the results of the row
 * before are stored, because a core waits for memory longer than it can work ahead. */
template <typename T>
LLMCTL_FN void fetch(const T *next) {
  __builtin_prefetch(next, 0, 2);
}

/* A whole line; with kPastCaches `to` is aligned to a line. */
template <bool kPastCaches, typename T>
LLMCTL_FN void store_whole_line(T *to, const wide<T> *computed, bool by_instruction) {
  alignas(kCacheLine) T rounded[kPerLine<T>];
  const void *line = computed;
  if constexpr (!std::is_same_v<T, wide<T>>) {
    round_line(rounded, computed, by_instruction);
    line = rounded;
  }
  if constexpr (kPastCaches) {
    store_line(reinterpret_cast<char *>(to), static_cast<const char *>(line));
  } else {
    std::memcpy(to, line, kCacheLine);
  }
}

/* Calls compute(i, count, results) for the lines of the row `to`, which fills `results` [count] from element `i` on. */
template <bool kPastCaches, typename T, typename Compute>
LLMCTL_FN void store_lines(T *to, int64_t start, int64_t width, Compute compute) {
  const bool by_instruction = rounds_by_instruction<T>();
  alignas(kCacheLine) wide<T> line[kPerLine<T>];
  const auto store_some = [&](int64_t i, int64_t count) {
    compute(i, count, line);
    for (int64_t lane = 0; lane < count; ++lane) to[i + lane] = line[lane];
  };
  if (start > 0) store_some(0, start);
  int64_t i = start;
  for (; i + kPerLine<T> <= width; i += kPerLine<T>) {
    compute(i, kPerLine<T>, line);
    store_whole_line<kPastCaches>(to + i, line, by_instruction);
  }
  if (i < width) store_some(i, width - i);
}

/* The results of a row of `width` elements. */
template <typename T, typename Compute>
LLMCTL_FN void store_row(T *to, int64_t width, bool past_caches, Compute compute) {
  if (past_caches) {
    const auto before = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) % kCacheLine / sizeof(T));
    return store_lines<true>(to, std::min(before, width), width, compute);
  }
  if constexpr (std::is_same_v<T, wide<T>>) {
    compute(0, width, to);
  } else {
    store_lines<false>(to, 0, width, compute);
  }
}

}  // namespace
}  // namespace llmctl

#endif
