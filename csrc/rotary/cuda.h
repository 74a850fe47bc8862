/* Arguments of the kernel of rotary position embedding; what they mean says include/rotary.h. */
#ifndef LLMCTL_CUDA_ROTARY_H
#define LLMCTL_CUDA_ROTARY_H

#include "../common/cuda/arguments.h"
#include "call.h"

namespace llmctl {

constexpr int kRopeThreads = 128;

struct Rope {
  llmctl_heads parts[LLMCTL_MAX_PARTS];
  llmctl_angles angles;
  int64 tokens, batch, head_dim;
  int part_heads[LLMCTL_MAX_PARTS]; /* Heads of a token in each part, */
  int heads;                        /* and in all of them. */
  bool moves; /* Whether any part goes to other memory, with the channels that are not turned. */
  bool packed; /* Whether heads, halves of what is turned and angles start at 16 bytes and end there. */
};

}  // namespace llmctl

#endif
