"""Ring attention: keys and values of a divided sequence are passed around the cp ranks.

Legend: S sequence, B micro-batch, A heads, G query groups, D width of a query or key head, V of a value head; ``/c`` =
divided over cp.

Ring attention: Liu et al. 2023 (arXiv:2310.01889), algorithm 1. In step s a rank computes with the keys of the rank s
places before it, and merges the result by log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1).
Backward goes around the ring again, using the final log-sum-exp, and sends the gradients of keys and values along; no
rank keeps another rank's keys. The keys of the next step are sent during the current step. Sinks enter after the
last step, once, as one more key would.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.distributed.collectives import message_device
from trainer.model.context_parallel.axis import ContextParallel
from trainer.ops.attention.interface import empty_heads, precise
from trainer.ops.attention.tiled import TileAttention, Tiling, add_sinks_, grad_sinks
from trainer.ops.attention.tiles import Tile, ring_tiles

if TYPE_CHECKING:
    from trainer.data.samples.document_places import Documents

Merged = tuple[tuple[Tile, ...], ...]
"""The tiles of each step whose results are merged into those of the first tiling; most often none in step 0."""
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
    """Tiles of the rank's own keys, with each query in one tile."""
    merged: Merged
    steps: tuple[TileAttention, ...]
    """Computes the tiles of each step; with dropout each step has its own weights."""

    def merge_(self, step: int, output: torch.Tensor, log_sum_exp: torch.Tensor, *heads: torch.Tensor) -> None:
        """Merge the tiles of a step into ``output`` and ``log_sum_exp``; ``heads``: query, key and value."""
        query, key, value = heads
        for tile in self.merged[step]:
            at, keys = tile.queries, tile.keys
            _merge_(output[at], log_sum_exp[at], *self.steps[step].forward(tile, query[at], key[keys], value[keys]))

    def backward_(
        self,
        step: int,
        grad_query: torch.Tensor,
        grad_key: torch.Tensor,
        grad_value: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> None:
        """Add the gradients of the merged tiles of a step."""
        for tile in self.merged[step]:
            from_query, from_key, from_value = self.steps[step].backward_from_whole(tile, *tensors)
            grad_query[tile.queries] += from_query
            grad_key[tile.keys] += from_key
            grad_value[tile.keys] += from_value

    def round_trip(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each step with its keys and values; those of the next step are sent meanwhile."""
        current = _Pair.of(key, value)
        for step in range(self.cp.size):
            under_way = start_shift(current.packed, self.cp, _KEYS) if step + 1 < self.cp.size else None
            # The first step takes the tensors as they are: kernels get them in the projections' memory layout.
            yield (step, key, value) if step == 0 else (step, *current.parts())
            if under_way is not None:
                current = replace(current, packed=under_way.result())


@dataclass(frozen=True)
class _Pair:
    """Keys and values, or their gradients, in one tensor for a message."""

    packed: torch.Tensor
    """[2, B, G, S/c, D], or [B, G, S/c, D + V] if values have another width."""
    widths: tuple[int, int]

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> _Pair:
        widths = key.shape[-1], value.shape[-1]
        packed = torch.stack((key, value)) if widths[0] == widths[1] else torch.cat((key, value), dim=-1)
        return cls(packed.contiguous(), widths)

    @classmethod
    def zeros(cls, key: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> _Pair:
        widths = key.shape[-1], value.shape[-1]
        shape = (2, *key.shape) if widths[0] == widths[1] else (*key.shape[:-1], sum(widths))
        return cls(key.new_zeros(shape, dtype=dtype), widths)

    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of keys and values."""
        if self.widths[0] == self.widths[1]:
            return self.packed[0], self.packed[1]
        return self.packed[..., : self.widths[0]], self.packed[..., self.widths[0] :]


class _RingAttention(torch.autograd.Function):
    """See ring_attention."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: Plan,
    ) -> torch.Tensor:
        ctx.plan = plan
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        output, log_sum_exp = plan.first.forward(plan.steps[0], query, keys, values)
        output = empty_heads(query, precise(query.dtype), value.shape[-1]).copy_(output)
        plan.merge_(0, output, log_sum_exp, query, keys, values)
        for step, keys, values in steps:
            plan.merge_(step, output, log_sum_exp, query, keys, values)
        if sinks is not None:
            add_sinks_(output, log_sum_exp, sinks)
        output = _in_dtype(output, query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, sinks)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        plan: Plan = ctx.plan
        query, key, value, output, log_sum_exp, sinks = ctx.saved_tensors
        from_sinks = None if sinks is None else grad_sinks(grad_output, output, log_sum_exp, sinks)
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        tensors = (grad_output, query, keys, values, output, log_sum_exp)
        first, *own = plan.first.backward(plan.steps[0], *tensors)
        grad_query = empty_heads(query, precise(query.dtype)).copy_(first)
        grads = _Pair.of(*own)
        grads = replace(grads, packed=grads.packed.to(grad_query.dtype))
        plan.backward_(0, grad_query, *grads.parts(), *tensors)
        pending = start_shift(grads.packed, plan.cp, _GRADIENTS)
        for step, keys, values in steps:
            tensors = (grad_output, query, keys, values, output, log_sum_exp)
            grads = _Pair.zeros(key, value, grad_query.dtype)
            plan.backward_(step, grad_query, *grads.parts(), *tensors)
            # The sum of the previous ranks' gradients for these keys has arrived by now; add to it and send it on.
            pending = start_shift(grads.packed.add_(pending.result()), plan.cp, _GRADIENTS)
        grad_key, grad_value = replace(grads, packed=pending.result().to(key.dtype)).parts()
        return _in_dtype(grad_query, query.dtype), grad_key, grad_value, from_sinks, None


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


def _in_order(
    documents: Documents | None, cp: ContextParallel, length: int, window: int | None
) -> tuple[Tiling, Merged]:
    bounds = documents.bounds if documents is not None else None
    own = ring_tiles(cp.rank, cp.rank, cp.size, length, bounds, window)
    # With a window a rank's two chunks are apart: the later one may see the end of the earlier one in a second tile.
    apart = tuple(tile for tile in own if (tile.query[0] < length // 2) != (tile.key[0] < length // 2))
    sources = ((cp.rank - step) % cp.size for step in range(1, cp.size))
    others = (ring_tiles(cp.rank, source, cp.size, length, bounds, window) for source in sources)
    return Tiling(tuple(tile for tile in own if tile not in apart)), (apart, *others)


def _by_step(attention: TileAttention, cp: ContextParallel) -> tuple[TileAttention, ...]:
    """The attention of each step: dropout has the weights of the step's keys."""
    if attention.weights is None:
        return (attention,) * cp.size
    weights = attention.weights
    sources = (replace(cp, rank=(cp.rank - step) % cp.size) for step in range(cp.size))
    return tuple(
        replace(attention, weights=replace(weights, columns=source.shard(weights.columns, 0))) for source in sources
    )


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    documents: Documents | None,
    cp: ContextParallel,
    attention: TileAttention,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of sequences of which each cp rank holds two sequence chunks.

    Collective: all cp ranks.

    Args:
        query: [B, A, S/c, D].
        key: [B, G, S/c, D].
        value: [B, G, S/c, V].
        documents: bounds of the documents of whole samples; None lets attention cross documents.
        cp: the ring.
        attention: computes one tile; its dropout weights have all S keys, in order of positions.
        sinks: logits [A] that take part in each head's softmax without a value; None: no sinks.

    Returns:
        [B, A, S/c, V].
    """
    length, window = query.shape[2], attention.settings.window
    if length % 2:
        raise ValueError(f"{length} positions per rank of the ring cannot be cut into two chunks of equal length")
    if documents is None:
        first, merged = _in_order(None, cp, length, window)
    else:
        key_of_tiles = ("ring", cp.rank, cp.size, length, window)
        first, merged = documents.once(key_of_tiles, lambda: _in_order(documents, cp, length, window))
    plan = Plan(cp, first, merged, _by_step(attention, cp))
    output: torch.Tensor = _RingAttention.apply(query, key, value, sinks, plan)  # type: ignore[no-untyped-call]
    return output
