/* Arguments of the kernel of rotary position embedding; abi.h defines their meaning. */
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
  bool moves; /* some part moves to other memory, including the channels that are not rotated */
  bool packed; /* heads, halves of the rotated channels and angles are multiples of 16 bytes */
};

}  // namespace llmctl

#endif
