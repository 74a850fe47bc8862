"""Known faults of layers with experts, as in tests.trainer.parity.mutations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from trainer.data_parallel import gradient_buckets
from trainer.distributed.mesh import ProcessGroups
from trainer.model.context_parallel.axis import ContextParallel
from trainer.model.moe import layer, losses


def experts_summed_over_all_data_ranks() -> AbstractContextManager[object]:
    """Expert gradients are summed over ranks that hold other experts."""
    return _experts_summed_over("dp_cp")


def expert_sum_dropped() -> AbstractContextManager[object]:
    """Copies of an expert keep the gradient of their own tokens."""
    return _experts_summed_over(None)


def copies_on_other_tp_ranks_not_summed() -> AbstractContextManager[object]:
    """Whole experts keep the gradient of the tokens that their own tp rank brought."""
    return _experts_summed_over("dp_cp")


def tokens_of_the_first_tp_rank() -> AbstractContextManager[object]:
    """Every tp rank brings the same tokens to whole experts."""

    def first(self: Any, count: int) -> slice:
        return slice(0, count // self._axes.tp.size)

    return mock.patch.object(layer.MoE, "_own_tokens", first)


@contextmanager
def _experts_summed_over(axis: str | None) -> Iterator[None]:
    build = gradient_buckets.GradientBuckets.__init__

    def wrong(
        self: Any, parameters: Any, layouts: Any, mesh: Any, groups: ProcessGroups, *further: Any, **kw: Any
    ) -> None:
        other = None if axis is None else getattr(groups, axis)
        build(self, parameters, layouts, mesh, replace(groups, expert_dp=other), *further, **kw)

    with mock.patch.object(gradient_buckets.GradientBuckets, "__init__", wrong):
        yield


def token_gradients_not_summed() -> AbstractContextManager[object]:
    """Each tp rank keeps the gradient that its own part of the experts gives to the tokens."""
    return mock.patch.object(layer, "enter_parallel_region", lambda inputs, _: inputs)


def tokens_back_in_the_order_of_arrival() -> AbstractContextManager[object]:
    """The first two rows that come from or go to another rank's experts are swapped."""
    send = dist.all_to_all_single

    def swapped(output: torch.Tensor, rows: torch.Tensor, *sizes: Any, **options: Any) -> None:
        send(output, rows, *sizes, **options)
        if rows.is_floating_point() and len(output) > 1:
            output[[0, 1]] = output[[1, 0]]

    return mock.patch.object(dist, "all_to_all_single", swapped)


def capacity_of_the_own_part() -> AbstractContextManager[object]:
    """Each context-parallel rank drops the choices beyond the capacity of its own part of the sequence."""
    kept = layer.kept_choices

    def alone(*given: Any) -> Any:
        *others, cp = given
        return kept(*others, replace(cp, size=1, group=None))

    return mock.patch.object(layer, "kept_choices", alone)


def auxiliary_loss_of_every_tp_rank() -> AbstractContextManager[object]:
    """Each of two tp ranks adds the whole gradient of the auxiliary loss."""
    attach = layer.attach_loss
    return mock.patch.object(layer, "attach_loss", lambda carrier, loss, scale: attach(carrier, loss, 2 * scale))


def auxiliary_loss_of_the_own_part() -> AbstractContextManager[object]:
    """Each context-parallel rank balances the choices of its own part of the sequence."""
    return _load_balancing(lambda tokens, cp: (tokens, replace(cp, group=None)))


def auxiliary_loss_averaged_over_the_own_part() -> AbstractContextManager[object]:
    """Choices of all context-parallel ranks are divided by the tokens of one."""
    return _load_balancing(lambda tokens, cp: (tokens // cp.size, cp))


def _load_balancing(change: Any) -> AbstractContextManager[object]:
    loss = losses.load_balancing_loss

    def wrong(routing: Any, num_tokens: int, cp: ContextParallel, num_groups: int) -> torch.Tensor:
        return loss(routing, *change(num_tokens, cp), num_groups)

    return mock.patch.object(losses, "load_balancing_loss", wrong)
