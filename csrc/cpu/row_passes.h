/* How norms go over rows. Rows are taken in turn, and a row is passed over twice: for its sums, then for its result. The
 * second pass over one row is the first over the next: so memory is read while it is written, as in a copy, and not by
 * turns. */
#ifndef LLMCTL_ROW_PASSES_H
#define LLMCTL_ROW_PASSES_H

#include <cstdint>

namespace llmctl {
/* Of each object its own: one compiled for another instruction set would not do. */
namespace {

/* Which halves a pass has: the first row has none before it, the last none after. */
enum Halves { kFirst, kBoth, kLast };

/* Both passes over the rows [first, stop). `Norm` has
 *   Sums pass<halves>(last, found, next): stores the result of row `last` and returns the sums of row `next`;
 *   Found found(row, sums): stores and returns what the second pass over a row must know of the first. */
template <typename Norm>
void pass_over_rows(const Norm &norm, int64_t first, int64_t stop) {
  if (first >= stop) return;
  auto sums = norm.template pass<kFirst>(first, typename Norm::Found{}, first);
  for (int64_t row = first; row < stop; ++row) {
    const typename Norm::Found found = norm.found(row, sums);
    if (row + 1 < stop) {
      sums = norm.template pass<kBoth>(row, found, row + 1);
    } else {
      norm.template pass<kLast>(row, found, row);
    }
  }
}

}  // namespace
}  // namespace llmctl

#endif
