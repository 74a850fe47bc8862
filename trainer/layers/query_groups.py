"""Query groups in several copies, where kernels or ranks are not able to share one.

Legend: B samples, G query groups, S keys, D head width.
"""

from __future__ import annotations

import torch


def repeat_groups(heads: torch.Tensor, copies: int) -> torch.Tensor:
    """[B, copies x G, S, D] from keys or values [B, G, S, D]; the copies of a group are neighbours."""
    return heads if copies == 1 else heads.repeat_interleave(copies, dim=1)


def sum_copies(grad_heads: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, G, S, D]: the sum of the gradients of the copies, in at least float32."""
    if grad_heads.shape[1] == groups:
        return grad_heads
    precise = torch.promote_types(grad_heads.dtype, torch.float32)
    copies = grad_heads.view(grad_heads.shape[0], groups, -1, *grad_heads.shape[2:])
    return copies.sum(2, dtype=precise).to(grad_heads.dtype)
