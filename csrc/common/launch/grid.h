/* Grids for kernels over rows and over single elements. */
#ifndef LLMCTL_GRID_H
#define LLMCTL_GRID_H

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "driver.h"

namespace llmctl {

inline int64_t bytes_of(int dtype) {
  switch (dtype) {
    case LLMCTL_FLOAT32: return 4;
    case LLMCTL_FLOAT64: return 8;
    default: return 2;
  }
}

/* True if rows of `width` elements can be read 16 bytes at a time: rows are whole packs, and every pointer that is
 * not null is aligned to 16 bytes. */
inline bool packs(int dtype, int64_t width, std::initializer_list<const void *> pointers) {
  const auto aligned = [](const void *pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; };
  return width * bytes_of(dtype) % 16 == 0 && std::all_of(pointers.begin(), pointers.end(), aligned);
}

constexpr int64_t kWarpThreads = 32;
constexpr int64_t kNarrowThreads = 128;

/* A grid of `rows` rows of `units` units of work; a thread takes `kept` units at once. A row gets a power of two of
 * threads from 32 to `most`; a block has 128 threads where a row takes fewer. The grid has all rows at once: the
 * hardware schedules the blocks. */
inline Grid row_grid(int64_t rows, int64_t units, int64_t kept, int64_t most) {
  int64_t threads = kWarpThreads;
  while (threads < most && threads * kept < units) threads *= 2;
  /* One row per block beyond a warp, because its threads wait for each other at barriers of the whole block. */
  const int64_t together = threads == kWarpThreads ? kNarrowThreads / kWarpThreads : 1;
  return {(rows + together - 1) / together, static_cast<int>(threads), static_cast<int>(together)};
}

}  // namespace llmctl

#endif
