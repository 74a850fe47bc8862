#include "blend_order.h"

#include <algorithm>

/* Products are rounded before counts are subtracted, on every processor: the order depends on the rounding. */
#if defined(__clang__)
#pragma clang fp contract(off)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif

namespace {

/* Segments that are followed side by side. */
constexpr int64_t kLanes = 8;

/* Two lanes: every x86-64 and every ARM processor has vectors of this size. In memory they are aligned to a double. */
using Pair = double __attribute__((vector_size(16)));
using StoredPair = double __attribute__((vector_size(16), aligned(8), may_alias));
using Mask = int64_t __attribute__((vector_size(16)));
constexpr int64_t kPairs = kLanes / 2;

/* The dataset farthest behind its share, per lane; the first of equals. counts: [datasets, kPairs]. */
inline void farthest_behind(const double *weights, const StoredPair *counts, int64_t datasets, const Pair *drawn, Mask *farthest) {
  Pair most[kPairs];
  Mask which[kPairs];
  for (int64_t pair = 0; pair < kPairs; ++pair) {
    most[pair] = weights[0] * drawn[pair] - counts[pair];
    which[pair] = Mask{};
  }
  for (int64_t dataset = 1; dataset < datasets; ++dataset) {
    const Mask number = {dataset, dataset};
    for (int64_t pair = 0; pair < kPairs; ++pair) {
      const Pair behind = weights[dataset] * drawn[pair] - counts[dataset * kPairs + pair];
      const Mask is_more = behind > most[pair];
      which[pair] = (is_more & number) | (~is_more & which[pair]);
      most[pair] = is_more ? behind : most[pair];
    }
  }
  std::copy(which, which + kPairs, farthest);
}

/* Segments `first` to first + lanes. */
template <typename Number>
void follow(const llmctl_blend_segments &order, int64_t first, int64_t lanes, int64_t steps, double *counts,
            Number *chosen, int64_t *samples, double *scratch) {
  Pair drawn[kPairs];
  Mask farthest[kPairs];
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    /* Lanes that are left over follow the last segment; nobody reads their results. */
    const int64_t segment = first + std::min(lane, lanes - 1);
    drawn[lane / 2][lane % 2] = static_cast<double>(order.firsts[segment]);
    for (int64_t dataset = 0; dataset < order.datasets; ++dataset)
      scratch[dataset * kLanes + lane] = counts[segment * order.datasets + dataset];
  }
  for (int64_t step = 0; step < steps; ++step) {
    Pair number[kPairs];
    for (int64_t pair = 0; pair < kPairs; ++pair) number[pair] = drawn[pair] < 1.0 ? Pair{1.0, 1.0} : drawn[pair];
    farthest_behind(order.weights, reinterpret_cast<const StoredPair *>(scratch), order.datasets, number, farthest);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t dataset = farthest[lane / 2][lane % 2];
      double &count = scratch[dataset * kLanes + lane];
      if (chosen != nullptr && lane < lanes) {
        const int64_t place = step * order.segments + first + lane;
        chosen[place] = static_cast<Number>(dataset);
        samples[place] = static_cast<int64_t>(count);
      }
      count += 1.0;
    }
    for (Pair &numbers : drawn) numbers += 1.0;
  }
  for (int64_t lane = 0; lane < lanes; ++lane)
    for (int64_t dataset = 0; dataset < order.datasets; ++dataset)
      counts[(first + lane) * order.datasets + dataset] = scratch[dataset * kLanes + lane];
}

template <typename Number>
void follow_all(const llmctl_blend_segments &order, int64_t steps, double *counts, Number *chosen, int64_t *samples,
                double *scratch) {
  for (int64_t first = 0; first < order.segments; first += kLanes)
    follow(order, first, std::min(kLanes, order.segments - first), steps, counts, chosen, samples, scratch);
}

}  // namespace

extern "C" void llmctl_follow_blend(const struct llmctl_blend_segments *order, int64_t steps, double *counts, int is_wide,
                                    void *chosen, int64_t *samples, double *scratch) {
  if (is_wide)
    follow_all(*order, steps, counts, static_cast<int32_t *>(chosen), samples, scratch);
  else
    follow_all(*order, steps, counts, static_cast<int16_t *>(chosen), samples, scratch);
}
