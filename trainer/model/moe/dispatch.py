"""Dispatch of tokens to the experts, and return of the results.

Legend: S sequence, B micro-batch, T = S*B tokens of this rank's part of the micro-batch, H hidden, E experts, K experts
chosen per token, P <= T*K choices that were not dropped, R rows that this rank's experts receive; ``/e`` = divided over
ep. A rank of the ep axis holds E/e consecutive experts, so that rows sorted by expert are also sorted by rank.

The all-to-all of Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2, without padding, as in dropless MoE (Gale et al.
2022, arXiv:2211.15841). Every sum here adds the K choices of a token in their order, by looking up its rows: the same
result on every device, without atomic additions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from trainer.ops.moe_permute import MOE_PERMUTE, MOE_UNPERMUTE

if TYPE_CHECKING:
    from trainer.model.context import ExpertParallel
    from trainer.model.moe.grouped_products import Offsets
    from trainer.ops.dispatch.registry import Kernels


@dataclass(frozen=True)
class Dispatch:
    """Destination of each row.

    Attributes:
        choices: int64 [P], numbers (token * K + place) of the kept choices, sorted by expert, then by number.
        rows: int64 [T, K], position of each choice in ``choices``; P for dropped choices.
        send_sizes: rows for each ep rank; empty if nothing is sent.
        receive_sizes: rows from each ep rank; empty if nothing is sent.
        by_expert: int64 [R], the received rows sorted by expert, then by rank; None if they arrive sorted.
        offsets: E/e + 1 numbers: expert i of this rank has the sorted rows from offsets[i] to offsets[i + 1]; on the
            device if the experts have a grouped kernel.
        ep: the ep axis.
    """

    choices: torch.Tensor
    rows: torch.Tensor
    send_sizes: Sequence[int]
    receive_sizes: Sequence[int]
    by_expert: torch.Tensor | None
    offsets: Offsets
    ep: ExpertParallel

    @classmethod
    def plan(
        cls,
        experts: torch.Tensor,
        kept: torch.Tensor | None,
        num_experts: int,
        ep: ExpertParallel,
        *,
        has_grouped_kernel: bool = False,
    ) -> Dispatch:
        """Exchange the row counts of all ranks. Collective: all ep ranks.

        Waits for the device, except with ``has_grouped_kernel`` on a single ep rank that drops nothing.

        Args:
            experts: int64 [T, K].
            kept: bool [T, K]; None drops nothing.
            num_experts: E.
            ep: the ep axis.
            has_grouped_kernel: the experts take offsets on the device.
        """
        flat = (experts if kept is None else experts.masked_fill(~kept, num_experts)).flatten()
        sorted_experts, order = flat.sort(stable=True)
        edges = torch.arange(num_experts + 1, device=flat.device)
        bounds = torch.searchsorted(sorted_experts, edges, out_int32=True)
        rows = torch.empty_like(order)
        rows[order] = torch.arange(len(order), device=order.device)
        if has_grouped_kernel and kept is None and ep.group is None:
            return cls(order, rows.view_as(experts), (), (), None, bounds, ep)
        counts = bounds.diff()  # [E], without the dropped choices, which are sorted to the end
        received = counts
        if ep.group is not None:
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts, group=ep.group)
        sent_sizes, received_sizes = torch.stack((counts, received)).tolist()
        local = num_experts // ep.size
        num_kept = sum(sent_sizes)
        is_sent = ep.group is not None
        return cls(
            choices=order[:num_kept],
            rows=rows.clamp_(max=num_kept).view_as(experts),
            send_sizes=_sums(sent_sizes, local) if is_sent else (),
            receive_sizes=_sums(received_sizes, local) if is_sent else (),
            by_expert=_sorted_by_expert(received, local, sum(received_sizes)) if is_sent else None,
            offsets=_device_offsets(received, local) if has_grouped_kernel else _host_offsets(received_sizes, local),
            ep=ep,
        )

    def to_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, H] sorted by expert from the ep ranks' [P, H]. Collective: all ep ranks."""
        if self.by_expert is None:
            return rows
        return self._exchange(rows, self.send_sizes, self.receive_sizes).index_select(0, self.by_expert)

    def from_experts(self, rows: torch.Tensor) -> torch.Tensor:
        """Inverse of ``to_experts``: [P, H] from the ep ranks' [R, H]. Collective: all ep ranks."""
        if self.by_expert is None:
            return rows
        by_rank = torch.empty_like(rows).index_copy_(0, self.by_expert, rows)
        return self._exchange(by_rank, self.receive_sizes, self.send_sizes)

    def _exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        result = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=self.ep.group)
        return result


def _sums(sizes: Sequence[int], local: int) -> list[int]:
    """Rows of each ep rank, from those of each expert."""
    return [sum(sizes[first : first + local]) for first in range(0, len(sizes), local)]


def _host_offsets(received: Sequence[int], local: int) -> list[int]:
    return [0, *accumulate(sum(received[expert::local]) for expert in range(local))]


def _device_offsets(received: torch.Tensor, local: int) -> torch.Tensor:
    return F.pad(received.view(-1, local).sum(0).cumsum(0), (1, 0)).to(torch.int32)


def _sorted_by_expert(received: torch.Tensor, local: int, total: int) -> torch.Tensor:
    """Order that sorts received rows by expert, then by rank.

    The rows arrive by rank, then by expert.
    """
    experts = torch.arange(local, device=received.device).repeat(len(received) // local)
    return experts.repeat_interleave(received, output_size=total).sort(stable=True).indices


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        return dispatch.to_experts(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.dispatch.from_experts(grad_rows), None


class _FromExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
        ctx.dispatch = dispatch
        return dispatch.from_experts(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.dispatch.to_experts(grad_rows), None


def to_experts(tokens: torch.Tensor, dispatch: Dispatch, kernels: Kernels) -> torch.Tensor:
    """[R, H], sorted by expert, from tokens [T, H]. Collective: all ep ranks, in backward too."""
    chosen = kernels[MOE_PERMUTE](tokens, dispatch.choices, dispatch.rows)
    if dispatch.by_expert is None:
        return chosen
    rows: torch.Tensor = _ToExperts.apply(chosen, dispatch)  # type: ignore[no-untyped-call]
    return rows


def weights_to_experts(weights: torch.Tensor, dispatch: Dispatch) -> torch.Tensor:
    """Weights [R] of the rows of ``to_experts``, from [T, K]; dropped choices get no gradient.

    Collective: all ep ranks, in backward too.
    """
    chosen = weights.flatten().index_select(0, dispatch.choices)
    if dispatch.by_expert is None:
        return chosen
    rows: torch.Tensor = _ToExperts.apply(chosen.unsqueeze(1), dispatch)  # type: ignore[no-untyped-call]
    return rows.squeeze(1)


def from_experts(
    outputs: torch.Tensor, weights: torch.Tensor | None, dispatch: Dispatch, kernels: Kernels
) -> torch.Tensor:
    """The experts' outputs back at their tokens, weighted and summed: [T, H].

    Collective: all ep ranks, in backward too.

    Args:
        outputs: [R, H], sorted by expert.
        weights: [T, K]; those of dropped choices are ignored and have no gradient. None: the experts have already
            multiplied by them.
        dispatch: the dispatch that brought the tokens to the experts.
        kernels: the kernel registry.
    """
    if dispatch.by_expert is not None:
        outputs = _FromExperts.apply(outputs, dispatch)  # type: ignore[no-untyped-call]
    return kernels[MOE_UNPERMUTE](outputs, weights, dispatch.choices, dispatch.rows)
