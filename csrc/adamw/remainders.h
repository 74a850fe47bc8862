/* Float masters as a bfloat16 weight and a remainder of 16 bits: the format of Transformer Engine's FusedAdam with
 * store_param_remainders.
 *
 * The remainder is the lower half of the master. The weight is the master rounded to nearest, ties away from zero: the
 * upper half, plus one if the remainder is negative as a signed number. So the bits of the master are
 * (weight << 16) + remainder, exactly. NaN would round to 0 or infinity: its payload is dropped. */
#ifndef LLMCTL_ADAMW_REMAINDERS_H
#define LLMCTL_ADAMW_REMAINDERS_H

#include "../common/number.h"

namespace llmctl {

LLMCTL_FN float master_of(unsigned short weight, short remainder) {
  return float_of_bits((static_cast<unsigned>(weight) << 16) + static_cast<unsigned>(static_cast<int>(remainder)));
}

/* The bits of a master that are stored. */
LLMCTL_FN unsigned stored_bits(float master) {
  const unsigned bits = bits_of(master);
  return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
}

LLMCTL_FN unsigned short weight_of(unsigned bits) { return static_cast<unsigned short>((bits + 0x8000u) >> 16); }
LLMCTL_FN short remainder_of(unsigned bits) { return static_cast<short>(static_cast<unsigned short>(bits)); }

}  // namespace llmctl

#endif
