/* The tensors of one call of rotary position embedding: see abi.h. Includes no header, because NVRTC has none. */
#ifndef LLMCTL_ROTARY_CALL_H
#define LLMCTL_ROTARY_CALL_H

/* Heads from one tensor [sequence, batch, groups, heads, head_dim] to another, which may be the same memory with the
 * same strides. Strides are of the first four dims, in elements; the channels of a head are contiguous. */
typedef struct {
  const void *from;
  void *to;
  long long from_strides[4], to_strides[4];
  long long groups, heads; /* groups of a token, heads of a group */
  int is_turned;           /* otherwise only copied */
} llmctl_heads;

/* Angles: cos and sin [sequence, batch, rotated / 2], with strides of the first two dims, in elements. */
typedef struct {
  const void *cos, *sin;
  long long cos_strides[2], sin_strides[2];
  long long rotated; /* channels of a head; even, 0 without rotation */
  int is_interleaved, is_inverse;
} llmctl_angles;

/* The most parts of one call: queries, keys, values. */
enum { LLMCTL_MAX_PARTS = 3 };

#endif
