"""Sums over the ranks of one replica that hold copies of a parameter and each saw only a part of its gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from trainer.parameters import ParameterLayout


def sum_over_tensor_parallel(
    gradients: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout], group: dist.ProcessGroup | None
) -> None:
    """Sum the gradients of replicated parameters that each tp rank applied to its own share of the sequence.

    One message for all of them, because norms and biases are small and many. In place; collective: all tp ranks.
    Needed by sequence parallelism: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer
    Models", section 4.2.2.
    """
    parts = [gradient for name, gradient in gradients.items() if layouts[name].sum_gradient_over_tp]
    if group is None or not parts:
        return
    packed = torch.cat([part.reshape(-1) for part in parts])
    dist.all_reduce(packed, group=group)
    for part, total in zip(parts, torch.split(packed, [part.numel() for part in parts]), strict=True):
        part.copy_(total.view_as(part))


def sum_tied_over_stages(
    gradients: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout], group: dist.ProcessGroup | None
) -> None:
    """Sum the gradients of the table that embeds on the first stage and makes logits on the last.

    In place; collective: the first and last stage, where ``group`` is not None; the stages between hold no such table.
    """
    if group is None:
        return
    for name, gradient in gradients.items():
        if layouts[name].tied_over_stages:
            dist.all_reduce(gradient, group=group)
