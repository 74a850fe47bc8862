/* The dataset of each sample of a blend, in Megatron-LM's order (build_blending_indices of
 * megatron/core/datasets/helpers.cpp). trainer/data/samples/blend.py explains the order, and computes the same
 * without a compiler. */
#ifndef LLMCTL_BLEND_ORDER_H
#define LLMCTL_BLEND_ORDER_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Segments of the order. weights: the share of each dataset. firsts: the sample that each segment begins with. */
struct llmctl_blend_segments {
  const double *weights;
  const int64_t *firsts;
  int64_t datasets, segments; /* at least one of each */
};

/* Follow the segments for `steps` samples each.
 *
 * counts: [segments, datasets], what each dataset has served; is changed. chosen: [steps, segments], the dataset of each
 * sample, int32_t where `is_wide`, else int16_t; samples: [steps, segments], which of its samples it is; both NULL: they
 * are not wanted. scratch: [datasets, 8], to work in. */
void llmctl_follow_blend(const struct llmctl_blend_segments *order, int64_t steps, double *counts, int is_wide,
                         void *chosen, int64_t *samples, double *scratch);

#ifdef __cplusplus
}
#endif

#endif
