/* Rotary position embedding: pairs of a head's channels are rotated by angles that depend on the position. Su et al.
 * 2021 (arXiv:2104.09864), equation 34. A pair is channels i and i + rotated / 2 (GPT-NeoX, Megatron-LM, Hugging Face's
 * Llama), or where `is_interleaved` 2i and 2i + 1 (the paper). Channels from `rotated` on stay as they are. */
#ifndef LLMCTL_ROTARY_H
#define LLMCTL_ROTARY_H

#include <stdint.h>

#include "../common/dtype.h"
#include "call.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Tokens [first, stop), numbered along the batch, then along the sequence, of up to LLMCTL_MAX_PARTS parts. Heads and
 * angles are of `dtype`. `past_caches`: parts that move to other memory are stored past the caches, because they would
 * not fit. */
void llmctl_cpu_rope(int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles *angles, int64_t batch,
                     int64_t head_dim, int64_t first, int64_t stop, int past_caches);

/* All tokens, on the current device (common/launch/abi.h). */
int llmctl_cuda_rope(int dtype, const llmctl_heads *parts, int num_parts, const llmctl_angles *angles, int64_t tokens,
                     int64_t batch, int64_t head_dim, void *stream);

#ifdef __cplusplus
}
#endif

#endif
