"""Numbers of the routers for a row of metrics.jsonl: auxiliary losses, and the load of experts.

Legend: E experts, K experts chosen per token, T tokens of this rank's part of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from trainer.model.moe.losses import coefficients

if TYPE_CHECKING:
    from trainer.config.sections.model import ModelConfig
    from trainer.model.sharding import ParameterBuilder


class RouterNumbers(nn.Module):
    """Sums over the micro-batches of one layer. Ranks along tp have the same; those of all others add up.

    Attributes:
        name: global name of the layer with experts.
        losses: float64 [N + 1], the sum of each of the N auxiliary losses without its coefficient, in the order of
            ``coefficients``, and the number of micro-batches, of which each cp rank has its share.
        load: int64 [E], choices of this rank's tokens, before any is dropped; counted if ``counts_load``.
        counts_load: off until somebody reads the load.
    """

    losses: torch.Tensor
    load: torch.Tensor

    def __init__(self, model: ModelConfig, builder: ParameterBuilder):
        super().__init__()
        assert model.num_experts is not None
        self.name = builder.prefix.removesuffix(".")
        self.counts_load = False
        self._coefficients = coefficients(model)
        losses = torch.zeros(len(self._coefficients) + 1, dtype=torch.float64, device=builder.device)
        self.register_buffer("losses", losses, persistent=False)
        load = torch.zeros(model.num_experts, dtype=torch.int64, device=builder.device)
        self.register_buffer("load", load, persistent=False)

    @torch.no_grad()
    def add(self, experts: torch.Tensor, losses: Mapping[str, torch.Tensor], cp_size: int) -> None:
        """Add a micro-batch: its choices [T, K], and this rank's part of its losses with their coefficients.

        No communication.
        """
        if self._coefficients:
            own = [losses[name].detach() / factor for name, factor in self._coefficients.items()]
            self.losses += torch.stack([*own, own[0].new_full((), 1.0 / cp_size)])
        if self.counts_load:
            numbers = torch.arange(len(self.load), device=experts.device)
            self.load += (experts.unsqueeze(-1) == numbers).sum((0, 1))


def router_numbers(stages: Iterable[nn.Module]) -> list[RouterNumbers]:
    """Those of all layers with experts of this rank's part of the model."""
    return [module for stage in stages for module in stage.modules() if isinstance(module, RouterNumbers)]


def take_auxiliary_losses(stages: Iterable[nn.Module]) -> list[float]:
    """``RouterNumbers.losses`` summed over this rank's layers, since the last call; empty without such layers.

    On a GPU this synchronizes.
    """
    layers = router_numbers(stages)
    if not layers:
        return []
    totals: list[float] = torch.stack([layer.losses for layer in layers]).sum(0).tolist()
    for layer in layers:
        layer.losses.zero_()
    return totals
