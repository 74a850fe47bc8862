#include "launch.h"

#include <algorithm>

#include "../launch/grid.h"
#include "cuda.h"

namespace llmctl {
namespace {

const Kernel column_sums_kernel("column_sums", KernelTypes::kAll);

}  // namespace

int column_sums(int dtype, const void *partial, void *sums, int64_t rows, int64_t width, void *stream) {
  if (width == 0) return 0;
  const ColumnSums arguments{partial, sums, rows, width};
  int threads = 1;
  while (threads < kColumnThreads && threads * kColumnRows < rows) threads *= 2;
  const Grid grid{(width + kColumns - 1) / kColumns, kColumns, threads};
  return launch(column_sums_kernel, dtype, grid, &arguments, stream);
}

int64_t segments_of(int64_t rows, int64_t width) {
  /* The largest GPUs have 132 to 160 multiprocessors; each holds two blocks of 256 threads of the calling kernel.
   * With 16 elements a thread, that is two rounds of blocks. There are so few
   * segments that their sums are small compared with the rows. */
  const int64_t most = std::clamp<int64_t>((int64_t{1} << 21) / std::max<int64_t>(1, width), 128, 8192);
  return std::clamp<int64_t>(rows / 4, 1, most);
}

}  // namespace llmctl
