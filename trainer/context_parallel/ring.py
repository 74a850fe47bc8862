"""Attention over tiles of the score matrix, with keys and values that go round a ring where the sequence is divided.

Legend: S sequence, B micro-batch, A heads, G query groups, D head width; ``/c`` = divided over cp.

Ring attention: Liu et al. 2023 (arXiv:2310.01889), algorithm 1. In step s a rank computes with the keys of the rank s
places before it, and merges what it gets by log-sum-exp (Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1).
Backward goes round the ring again, using the final log-sum-exp, with the gradients of keys and values in tow; so no
rank ever keeps another's keys. Keys of the next step travel while a step is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from trainer.context_parallel.axis import ContextParallel
from trainer.context_parallel.tiles import Bounds, Tile, ring_tiles

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_KEYS, _GRADIENTS = 0, 1  # tags


class AttentionKernel(Protocol):
    """Query [B, A, Q, D] attends to key and value [B, G, K, D], scaled by D^-0.5; head a belongs to group a * G // A.

    ``causal``: Q = K, and each query sees the keys up to its own place.
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [B, A, Q, D] and log-sum-exp [B, A, Q], at least float32."""

    def backward(
        self,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        *,
        causal: bool,
    ) -> Gradients:
        """Gradients of query, key and value. ``output`` and ``log_sum_exp`` may be those over more keys than here."""


@runtime_checkable
class PackedKernel(AttentionKernel, Protocol):
    """A kernel that takes many documents in one call."""

    def forward_packed(
        self, tiles: tuple[Tile, ...], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``forward`` of causal tiles that cover all queries and all keys in order."""

    def backward_packed(
        self,
        tiles: tuple[Tile, ...],
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> Gradients:
        """``backward`` of the same."""


@dataclass(frozen=True)
class Exchange:
    """A message to the next rank of the ring and one from the rank before, under way."""

    works: list[dist.Work]
    outgoing: torch.Tensor
    """Kept alive until it has left."""
    incoming: torch.Tensor

    def result(self) -> torch.Tensor:
        """What came, once it is there and what was sent has left."""
        for work in self.works:
            work.wait()
        return self.incoming


def start_exchange(outgoing: torch.Tensor, cp: ContextParallel, tag: int) -> Exchange:
    """Send a contiguous tensor to the next rank of the ring and take one of the same shape from the rank before.

    Collective: all cp ranks, in the same order. Send and receive are posted together, so that no rank waits for another
    to begin.
    """
    assert cp.group is not None
    ranks = dist.get_process_group_ranks(cp.group)
    incoming = torch.empty_like(outgoing)
    after, before = ranks[(cp.rank + 1) % cp.size], ranks[cp.rank - 1]
    operations = [
        dist.P2POp(dist.isend, outgoing, after, cp.group, tag),
        dist.P2POp(dist.irecv, incoming, before, cp.group, tag),
    ]
    return Exchange(dist.batch_isend_irecv(operations), outgoing, incoming)


@dataclass(frozen=True)
class Plan:
    """What a rank computes in each step of the ring; one step where sequences are undivided."""

    cp: ContextParallel
    steps: tuple[tuple[Tile, ...], ...]
    """Of a step no query has more than one tile, of the first every query and every key has one."""
    kernel: AttentionKernel

    def forward_first(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp over the keys of the rank itself."""
        tiles = self.steps[0]
        if len(tiles) == 1:
            return self.kernel.forward(query, key, value, causal=True)
        if isinstance(self.kernel, PackedKernel):
            return self.kernel.forward_packed(tiles, query, key, value)
        output = _empty_like(query, query.dtype)
        log_sum_exp = query.new_empty(query.shape[:3], dtype=_precise(query.dtype))
        for tile in tiles:
            at, keys = tile.queries, tile.keys
            output[at], log_sum_exp[at] = self.kernel.forward(query[at], key[keys], value[keys], causal=True)
        return output, log_sum_exp

    def backward_first(self, *tensors: torch.Tensor) -> Gradients:
        """Gradients from the keys of the rank itself; takes what a kernel's backward takes."""
        tiles = self.steps[0]
        if len(tiles) == 1:
            return self.kernel.backward(*tensors, causal=True)
        if isinstance(self.kernel, PackedKernel):
            return self.kernel.backward_packed(tiles, *tensors)
        grads = tuple(_empty_like(heads, heads.dtype) for heads in tensors[1:4])
        for tile in tiles:
            at, keys = tile.queries, tile.keys
            grads[0][at], grads[1][keys], grads[2][keys] = self._backward(tile, *tensors)
        return grads[0], grads[1], grads[2]

    def backward_later(self, step: int, grad_query: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Add to ``grad_query`` in a step after the first; the gradients of key and value, stacked."""
        key = tensors[2]
        grad_key_value = key.new_zeros((2, *key.shape), dtype=grad_query.dtype)
        for tile in self.steps[step]:
            from_query, from_key, from_value = self._backward(tile, *tensors)
            grad_query[tile.queries] += from_query
            grad_key_value[0][tile.keys] = from_key
            grad_key_value[1][tile.keys] = from_value
        return grad_key_value

    def _backward(
        self,
        tile: Tile,
        grad_output: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
    ) -> Gradients:
        at, keys = tile.queries, tile.keys
        return self.kernel.backward(
            grad_output[at], query[at], key[keys], value[keys], output[at], log_sum_exp[at], causal=tile.causal
        )

    def round_trip(self, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Each step with its keys and values; those of the next travel meanwhile."""
        current = torch.stack((key, value)) if len(self.steps) > 1 else None
        for step in range(len(self.steps)):
            under_way = None
            if current is not None and step + 1 < len(self.steps):
                under_way = start_exchange(current, self.cp, _KEYS)
            # The first step takes the tensors as they are, so that one rank copies nothing.
            yield (step, key, value) if step == 0 or current is None else (step, current[0], current[1])
            current = under_way.result() if under_way is not None else None


class _RingAttention(torch.autograd.Function):
    """See tiled_attention and ring_attention."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan) -> torch.Tensor:
        ctx.plan = plan
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        output, log_sum_exp = plan.forward_first(query, keys, values)
        if len(plan.steps) > 1:
            output = _empty_like(query, _precise(query.dtype)).copy_(output)
        for step, keys, values in steps:
            for tile in plan.steps[step]:
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
        if len(plan.steps) == 1:
            return *plan.backward_first(grad_output, query, key, value, output, log_sum_exp), None
        steps = plan.round_trip(key, value)
        _, keys, values = next(steps)
        first, *own = plan.backward_first(grad_output, query, keys, values, output, log_sum_exp)
        grad_query = _empty_like(query, _precise(query.dtype)).copy_(first)
        pending = start_exchange(torch.stack(own).to(grad_query.dtype), plan.cp, _GRADIENTS)
        for step, keys, values in steps:
            tensors = (grad_output, query, keys, values, output, log_sum_exp)
            grad_key_value = plan.backward_later(step, grad_query, *tensors)
            # What the ranks before have gathered for these keys has come meanwhile, and goes on from here.
            pending = start_exchange(grad_key_value.add_(pending.result()), plan.cp, _GRADIENTS)
        grad_key, grad_value = pending.result().to(key.dtype).unbind()
        return _in_dtype(grad_query, query.dtype), grad_key, grad_value, None


def _merge_(
    output: torch.Tensor, log_sum_exp: torch.Tensor, more: torch.Tensor, more_log_sum_exp: torch.Tensor
) -> None:
    """Add attention over further keys to ``output`` and ``log_sum_exp``; every query has seen its own key by then."""
    both = torch.logaddexp(log_sum_exp, more_log_sum_exp)
    output.mul_((log_sum_exp - both).exp_().unsqueeze(-1))
    output.addcmul_(more.to(output.dtype), (more_log_sum_exp - both).exp_().unsqueeze(-1))
    log_sum_exp.copy_(both)


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _empty_like(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, A, S, D] that lies in memory as [S, B, A, D], as the projections around attention have it."""
    batch, number, length, width = heads.shape
    return heads.new_empty((length, batch, number, width), dtype=dtype).permute(1, 2, 0, 3)


def _in_dtype(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return heads if heads.dtype == dtype else _empty_like(heads, dtype).copy_(heads)


def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tiles: tuple[Tile, ...], kernel: AttentionKernel
) -> torch.Tensor:
    """Attention of undivided sequences, by ``trainer.context_parallel.tiles.whole_tiles``. No communication.

    Args:
        query: [B, A, S, D].
        key: [B, G, S, D].
        value: as ``key``.
        tiles: each query and each key lies in exactly one, in order.
        kernel: computes a tile.

    Returns:
        [B, A, S, D].
    """
    output: torch.Tensor = _RingAttention.apply(query, key, value, Plan(ContextParallel(), (tiles,), kernel))  # type: ignore[no-untyped-call]
    return output


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: Bounds | None,
    cp: ContextParallel,
    kernel: AttentionKernel,
) -> torch.Tensor:
    """Causal attention of sequences of which each cp rank holds two chunks. Collective: all cp ranks.

    Args:
        query: [B, A, S/c, D].
        key: [B, G, S/c, D].
        value: as ``key``.
        bounds: where the documents of whole samples end; None: attention crosses from one to another.
        cp: the ring.
        kernel: computes a tile.

    Returns:
        [B, A, S/c, D].
    """
    length = query.shape[2]
    if length % 2:
        raise ValueError(f"{length} positions per rank of the ring cannot be cut into two chunks")
    sources = [(cp.rank - step) % cp.size for step in range(cp.size)]
    steps = tuple(ring_tiles(cp.rank, source, cp.size, length, bounds) for source in sources)
    output: torch.Tensor = _RingAttention.apply(query, key, value, Plan(cp, steps, kernel))  # type: ignore[no-untyped-call]
    return output
