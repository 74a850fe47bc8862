"""Float32 masters as a bfloat16 weight and a remainder of 16 bits: 4 instead of 6 bytes.

The remainder is the lower half of the master, as int16. The weight is the master rounded to nearest, ties away from
zero: the upper half, plus one where the remainder is negative. The bits of the master are then
``(weight << 16) + remainder``, exactly. This is the format of Transformer Engine's FusedAdam with
``store_param_remainders`` (transformer_engine/common/multi_tensor/adam.cu). NaN keeps no payload, which would round it
to 0 or infinity.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 master of a bfloat16 ``weight`` and its int16 ``remainder``, in new memory."""
    bits = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return bits.add_(remainder).view(torch.float32)


def split_master(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Write a float32 ``master``, which is overwritten, into ``weight`` and ``remainder``, of one shape."""
    # One pass, which leaves infinities as they are.
    master.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    bits = master.view(torch.int32)
    # A cast from int32 to int16 keeps the lower half.
    remainder.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(1 << 15).bitwise_right_shift_(16))
