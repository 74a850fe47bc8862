"""Ring attention: keys and values of a divided sequence travel around the cp ranks.

Legend: S sequence, B micro-batch, A heads, G query groups, D head width; ``/c`` = divided over cp.

Ring attention: Liu et al. 2023 (arXiv:2310.01889), algorithm 1. In step s a rank computes with the keys of the rank s
places before it, and merges the result by log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1).
Backward goes around the ring again, using the final log-sum-exp, and sends the gradients of keys and values along; no
rank keeps another rank's keys. The keys of the next step travel during the current step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.distributed.collectives import message_device
from trainer.model.context_parallel.axis import ContextParallel
from trainer.ops.attention.tiled import AttentionKernel, Tiling, empty_heads, precise, tile_backward
from trainer.ops.attention.tiles import Tile, ring_tiles

if TYPE_CHECKING:
    from trainer.data.samples.document_places import Documents

Later = tuple[tuple[Tile, ...], ...]
"""The tiles of each step after the first; no query is in two tiles of one step."""
_KEYS, _GRADIENTS = 0, 1  # tags


@dataclass(frozen=True)
class Shift:
    """A pending send to the next rank and receive from the previous rank."""

    works: list[dist.Work]
    outgoing: torch.Tensor
    """Kept alive until the send has finished."""
    incoming: torch.Tensor
    device: torch.device
    """Device of the result."""

    def result(self) -> torch.Tensor:
        """The received tensor, after send and receive have finished."""
        for work in self.works:
            work.wait()
        return self.incoming.to(self.device)


def start_shift(outgoing: torch.Tensor, cp: ContextParallel, tag: int) -> Shift:
    """Start to send a tensor to the next rank, and receive from the previous.

    ``outgoing`` is contiguous, and both tensors have the same shape.

    Collective: all cp ranks, in the same order. Send and receive are posted together, so that no rank waits for another
    to begin. Goes through host memory if the backend cannot send from the tensor's device.
    """
    assert cp.group is not None
    device = outgoing.device
    outgoing = outgoing.to(message_device(cp.group, device))
    ranks = dist.get_process_group_ranks(cp.group)
    incoming = torch.empty_like(outgoing)
    after, before = ranks[(cp.rank + 1) % cp.size], ranks[cp.rank - 1]
    operations = [
        dist.P2POp(dist.isend, outgoing, after, cp.group, tag),
        dist.P2POp(dist.irecv, incoming, before, cp.group, tag),
    ]
    return Shift(dist.batch_isend_irecv(operations), outgoing, incoming, device)


@dataclass(frozen=True)
class Plan:
    """Tiles that a rank computes in each step of the ring."""

    cp: ContextParallel
    first: Tiling
    """Tiles of the rank's own keys."""
    later: Later
    kernel: AttentionKernel

    def backward_later(self, step: int, grad_query: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Add a later step's gradient to ``grad_query``.

        Returns the gradients of key and value, stacked.
        """
        key = tensors[2]
        grad_key_value = key.new_zeros((2, *key.shape), dtype=grad_query.dtype)
        for tile in self.later[step - 1]:
            from_query, from_key, from_value = tile_backward(self.kernel, tile, *tensors)
            grad_query[tile.queries] += from_query
            grad_key_value[0][tile.keys] = from_key
            grad_key_value[1][tile.keys] = from_value
        return grad_key_value

    def round_trip(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each step with its keys and values; those of the next step travel meanwhile."""
        current = torch.stack((key, value))
        for step in range(self.cp.size):
            under_way = start_shift(current, self.cp, _KEYS) if step + 1 < self.cp.size else None
            # The first step takes the tensors as they are: kernels get them in the projections' memory layout.
            yield (step, key, value) if step == 0 else (step, current[0], current[1])
            if under_way is not None:
                current = under_way.result()


class _RingAttention(torch.autograd.Function):
    """See ring_attention."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        output, log_sum_exp = plan.first.forward(plan.kernel, query, keys, values)
        output = empty_heads(query, precise(query.dtype)).copy_(output)
        for step, keys, values in steps:
            for tile in plan.later[step - 1]:
                part = plan.kernel.forward(query[tile.queries], keys[tile.keys], values[tile.keys], causal=tile.causal)
                _merge_(output[tile.queries], log_sum_exp[tile.queries], *part)
        output = _in_dtype(output, query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum_exp)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        plan: Plan = ctx.plan
        query, key, value, output, log_sum_exp = ctx.saved_tensors
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        first, *own = plan.first.backward(plan.kernel, grad_output, query, keys, values, output, log_sum_exp)
        grad_query = empty_heads(query, precise(query.dtype)).copy_(first)
        pending = start_shift(torch.stack(own).to(grad_query.dtype), plan.cp, _GRADIENTS)
        for step, keys, values in steps:
            tensors = (grad_output, query, keys, values, output, log_sum_exp)
            grad_key_value = plan.backward_later(step, grad_query, *tensors)
            # The sum of the previous ranks' gradients for these keys has arrived by now; add to it and send it on.
            pending = start_shift(grad_key_value.add_(pending.result()), plan.cp, _GRADIENTS)
        grad_key, grad_value = pending.result().to(key.dtype).unbind()
        return _in_dtype(grad_query, query.dtype), grad_key, grad_value, None


def _merge_(
    output: torch.Tensor, log_sum_exp: torch.Tensor, more: torch.Tensor, more_log_sum_exp: torch.Tensor
) -> None:
    """Merge attention over more keys into ``output`` and ``log_sum_exp``.

    Every query has seen its own key in the first step.
    """
    both = torch.logaddexp(log_sum_exp, more_log_sum_exp)
    output.mul_((log_sum_exp - both).exp_().unsqueeze(-1))
    output.addcmul_(more.to(output.dtype), (more_log_sum_exp - both).exp_().unsqueeze(-1))
    log_sum_exp.copy_(both)


def _in_dtype(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return heads if heads.dtype == dtype else empty_heads(heads, dtype).copy_(heads)


def _in_order(documents: Documents | None, cp: ContextParallel, length: int) -> tuple[Tiling, Later]:
    bounds = documents.bounds if documents is not None else None
    own = ring_tiles(cp.rank, cp.rank, cp.size, length, bounds)
    sources = ((cp.rank - step) % cp.size for step in range(1, cp.size))
    return Tiling(own), tuple(ring_tiles(cp.rank, source, cp.size, length, bounds) for source in sources)


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | None,
    cp: ContextParallel,
    kernel: AttentionKernel,
) -> torch.Tensor:
    """Causal attention of sequences of which each cp rank holds two sequence chunks.

    Collective: all cp ranks.

    Args:
        query: [B, A, S/c, D].
        key: [B, G, S/c, D].
        value: as ``key``.
        documents: bounds of the documents of whole samples; None lets attention cross documents.
        cp: the ring.
        kernel: computes one tile.

    Returns:
        [B, A, S/c, D].
    """
    length = query.shape[2]
    if length % 2:
        raise ValueError(f"{length} positions per rank of the ring cannot be cut into two chunks of equal length")
    if documents is None:
        first, later = _in_order(None, cp, length)
    else:
        first, later = documents.once(("ring", cp.rank, cp.size, length), lambda: _in_order(documents, cp, length))
    output: torch.Tensor = _RingAttention.apply(query, key, value, Plan(cp, first, later, kernel))  # type: ignore[no-untyped-call]
    return output
