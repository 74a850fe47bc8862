/* Maximum of a row and sum of its exponentials, for softmax and cross entropy. */
#ifndef LLMCTL_EXPONENTIALS_H
#define LLMCTL_EXPONENTIALS_H

#include <cmath>
#include <cstdint>
#include <limits>

#include "../number.h"
#include "../scalar_math.h"

namespace llmctl {
/* Internal linkage: each object needs the functions as compiled for its own instruction set. */
namespace {

template <typename W>
constexpr W kInfinity = std::numeric_limits<W>::infinity();

/* Elements of a block, which are summed in W; the sums of blocks are added in double. A running sum over a whole row of
 * a vocabulary would lose digits. Vectors have a running sum in each lane; without vectors there is a single one. */
#ifdef __AVX2__
constexpr int64_t kSumBlock = 1024;
#else
constexpr int64_t kSumBlock = 64;
#endif

/* The largest of `so_far` and the values from `start` on, kLanes at a time; advances `start` to the remaining values. */
template <int kLanes, typename W, typename Value>
W largest_of_blocks(int64_t &start, int64_t count, Value value, W so_far) {
  if (start + kLanes > count) return so_far;
  /* One maximum per lane. Compilers do not vectorise a single running maximum, because NaN could change the result. */
  W lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = so_far;
  for (; start + kLanes <= count; start += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const W one = value(start + lane);
      lanes[lane] = one > lanes[lane] ? one : lanes[lane];
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) {
      const W other = lanes[lane + half];
      lanes[lane] = other > lanes[lane] ? other : lanes[lane];
    }
  }
  return lanes[0];
}

/* The largest of value(i), i < count; NaN is ignored, and without values the result is -infinity. */
template <typename W, typename Value>
W largest(int64_t count, Value value) {
  int64_t i = 0;
  W result = largest_of_blocks<64>(i, count, value, -kInfinity<W>);
  result = largest_of_blocks<8>(i, count, value, result);
  for (; i < count; ++i) {
    const W one = value(i);
    result = one > result ? one : result;
  }
  return result;
}

/* The number that is subtracted from exponents with this maximum; 0 for -infinity: exp(-infinity - -infinity) is NaN. */
template <typename W>
W reference(W maximum) {
  return maximum == -kInfinity<W> ? W(0) : maximum;
}

/* The sum of term(i), i < count, `kBlock` at a time; calls before(start) before each block. */
template <typename W, int64_t kBlock, typename Term, typename Before>
W sum_of(int64_t count, Term term, Before before) {
  double total = 0;
  for (int64_t start = 0; start < count; start += kBlock) {
    const int64_t stop = count - start < kBlock ? count : start + kBlock;
    before(start);
    W sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = start; i < stop; ++i) sum += term(i);
    total += static_cast<double>(sum);
  }
  return static_cast<W>(total);
}
template <typename W, typename Term>
W sum_of(int64_t count, Term term) {
  return sum_of<W, kSumBlock>(count, term, [](int64_t) {});
}

}  // namespace
}  // namespace llmctl

#endif
