#include "abi.h"

#include <cstring>

#include "../common/cpu/isa.h"

namespace {

/* 16 independent sums: in a single sum each addition would wait for the one before. */
constexpr int kSums = 16;

template <typename T>
double sum_of_squares(const T *values, int64_t count) {
  double sums[kSums] = {};
  const int64_t whole = count / kSums * kSums;
  for (int64_t start = 0; start < whole; start += kSums) {
    for (int i = 0; i < kSums; ++i) {
      const double value = static_cast<double>(static_cast<llmctl::wide<T>>(values[start + i]));
      sums[i] += value * value;
    }
  }
  double total = 0;
  for (int i = 0; i < kSums; ++i) total += sums[i];
  for (int64_t i = whole; i < count; ++i) {
    const double value = static_cast<double>(static_cast<llmctl::wide<T>>(values[i]));
    total += value * value;
  }
  return total;
}

/* Elements from the one that is read to the one that is prefetched: beyond the page, which processors do not prefetch by
 * themselves. 16 Mi elements take 3.5 instead of 5.2 ms on one core of an Intel Xeon. */
constexpr int64_t kAhead = 2048;

/* Two bfloat16 are the halves of a word; each is a float after the other is masked or shifted out. Conversion of single
 * elements would take longer than the memory accesses. */
double sum_of_squares(const llmctl::bfloat16 *values, int64_t count) {
  double even[kSums] = {}, odd[kSums] = {};
  const int64_t whole = count / (2 * kSums) * (2 * kSums);
  for (int64_t start = 0; start < whole; start += 2 * kSums) {
    __builtin_prefetch(values + start + kAhead);
    unsigned words[kSums];
    std::memcpy(words, values + start, sizeof words);
    for (int i = 0; i < kSums; ++i) {
      const double one = llmctl::float_of_bits(words[i] << 16), other = llmctl::float_of_bits(words[i] & 0xffff0000u);
      even[i] += one * one;
      odd[i] += other * other;
    }
  }
  double total = 0;
  for (int i = 0; i < kSums; ++i) total += even[i] + odd[i];
  return total + sum_of_squares<llmctl::bfloat16>(values + whole, count - whole);
}

}  // namespace

LLMCTL_CPU_KERNEL(llmctl_cpu_sum_of_squares,
                  (int dtype, const void *values, double *sum, int64_t first, int64_t stop),
                  (dtype, values, sum, first, stop)) {
  llmctl::with_dtype(dtype, [=](auto element) {
    *sum = sum_of_squares(static_cast<const decltype(element) *>(values) + first, stop - first);
  });
}
