"""Optimizer state in CPU memory, stepped there in overlap with the copies.

The CPU steps one chunk while gradients and weights of other chunks are copied.

Source: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv:2101.06840), section 4.1:
the CPU holds float32 states and makes the step; the device holds 16-bit weights and everything else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainer.optimizer.masters import Masters, Moments, Traits, new_moments

if TYPE_CHECKING:
    from trainer.config.sections.optimizer import OptimizerConfig
    from trainer.data_parallel.parameter_shards import ParameterShard
    from trainer.ops.dispatch.registry import Kernels

# Elements copied and stepped together: 64 MB of gradients. That is enough for the full speed of a bus, and little
# enough that the first and the last copy, which nothing overlaps, are short. A multiple of every kernel's vector.
_CHUNK = 1 << 24


def offloaded_shards(parameter_shards: Sequence[ParameterShard], fraction: float) -> list[ParameterShard]:
    """Whole parameter shards, from the first on, with about ``fraction`` of all elements."""
    requested, before = fraction * sum(shard.weight.numel() for shard in parameter_shards), 0
    chosen = []
    for shard in parameter_shards:
        # Decided by the shard's middle, so that the sum is off by at most half a shard.
        if before + shard.weight.numel() / 2 < requested:
            chosen.append(shard)
        before += shard.weight.numel()
    return chosen


class OffloadedMasters:
    """Masters and moments of some parameter shards in CPU memory.

    For weights on a CUDA device, copies go through two page-locked buffers in each direction: while the CPU steps one
    chunk, the gradients of the next chunk arrive and the weights of the last chunk leave. On a CPU device nothing is
    copied; the arithmetic is the same.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameter_shards: Sequence[ParameterShard],
        traits: Mapping[str, Traits],
        kernels: Kernels,
    ) -> None:
        """Allocate the tensors; the masters start from the weights.

        Args:
            config: the optimizer and its constants.
            parameter_shards: shards with their state in CPU memory.
            traits: by name.
            kernels: the kernel registry for CPU memory.
        """
        self._parameter_shards = list(parameter_shards)
        self.masters = {shard.name: shard.weight.to("cpu", torch.float32, copy=True) for shard in parameter_shards}
        """1-D, by parameter name, as are the moments."""
        self.moments = new_moments(config, self.masters)
        chunks = list(_chunks(parameter_shards))
        largest = max(map(_numel, chunks), default=0)
        self._traffic = _Traffic(parameter_shards[0].weight.device, largest) if _is_on_gpu(parameter_shards) else None
        self._chunks = []
        for number, flat_ranges in enumerate(chunks):
            weights = [flat_range.weight.detach() for flat_range in flat_ranges]
            targets = weights if self._traffic is None else self._traffic.targets(number, weights)
            self._chunks.append(_Chunk(config, flat_ranges, targets, self.masters, self.moments, traits, kernels))

    def begin_step(self) -> None:
        """Start to copy the first gradients, before the device's next work."""
        if self._traffic is not None:
            self._traffic.begin()
            self._traffic.fetch(0, self._chunks[0])

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """Update masters and weights from the shards' gradients / ``divisor``, after ``begin_step``."""
        if self._traffic is None:
            for chunk in self._chunks:
                chunk.step(lr, divisor, [flat_range.gradient for flat_range in chunk.flat_ranges])
            return
        for number, chunk in enumerate(self._chunks):
            if number + 1 < len(self._chunks):
                self._traffic.fetch(number + 1, self._chunks[number + 1])
            gradients = self._traffic.fetched(number, chunk)
            self._traffic.wait_for_room(number)
            chunk.step(lr, divisor, gradients)
            self._traffic.send(number, chunk)
        self._traffic.end()

    def set_weight_decay(self, weight_decay: float) -> None:
        """See Masters."""
        for chunk in self._chunks:
            chunk.set_weight_decay(weight_decay)

    def set_decoupled_lr(self, lr: float) -> None:
        """See Masters."""
        for chunk in self._chunks:
            chunk.set_decoupled_lr(lr)

    def set_steps(self, steps: int) -> None:
        """See Masters."""
        for chunk in self._chunks:
            chunk.set_steps(steps)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Copy the weights into the masters."""
        for shard in self._parameter_shards:
            self.masters[shard.name].copy_(shard.weight)

    @torch.no_grad()
    def restore_masters(self) -> None:
        """Finish a load: copy 32-bit weights into their masters.

        The loaded masters are copied into 16-bit weights.
        """
        for shard in self._parameter_shards:
            if shard.weight.dtype == torch.float32:
                self.masters[shard.name].copy_(shard.weight)
            else:
                shard.weight.copy_(self.masters[shard.name])


@dataclass(frozen=True)
class _FlatRange:
    """Elements ``start`` to ``stop`` of a parameter shard."""

    shard: ParameterShard
    start: int
    stop: int

    @property
    def gradient(self) -> Tensor:
        return self.shard.gradient[self.start : self.stop]

    @property
    def weight(self) -> Tensor:
        return self.shard.weight[self.start : self.stop]


def _chunks(parameter_shards: Sequence[ParameterShard]) -> Iterator[list[_FlatRange]]:
    chunk: list[_FlatRange] = []
    room = _CHUNK
    for shard in parameter_shards:
        start = 0
        if chunk and chunk[0].weight.dtype != shard.weight.dtype:
            yield chunk
            chunk, room = [], _CHUNK
        while start < shard.weight.numel():
            stop = min(start + room, shard.weight.numel())
            chunk.append(_FlatRange(shard, start, stop))
            room -= stop - start
            # Less than a vector is left: a cut here would give the kernel a tail that the whole shard does not have.
            if room < 64:
                yield chunk
                chunk, room = [], _CHUNK
            else:
                room -= room % 64
            start = stop
    if chunk:
        yield chunk


def _is_on_gpu(parameter_shards: Sequence[ParameterShard]) -> bool:
    return bool(parameter_shards) and parameter_shards[0].weight.is_cuda


def _numel(flat_ranges: Sequence[_FlatRange]) -> int:
    return sum(flat_range.stop - flat_range.start for flat_range in flat_ranges)


class _Chunk:
    """Flat ranges that are stepped together, all of one dtype.

    Attributes:
        flat_ranges: of different parameter shards.
        targets: CPU tensors that receive the new weights of each step, in order of the flat ranges.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        flat_ranges: Sequence[_FlatRange],
        targets: Sequence[Tensor],
        masters: Mapping[str, Tensor],
        moments: Moments,
        traits: Mapping[str, Traits],
        kernels: Kernels,
    ) -> None:
        self.flat_ranges, self.targets = flat_ranges, targets

        def cut(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            # A chunk has at most one flat range of each shard.
            return {
                flat_range.shard.name: named[flat_range.shard.name][flat_range.start : flat_range.stop]
                for flat_range in flat_ranges
            }

        own = cut(masters)
        named = dict(zip(own, targets, strict=True))
        # The kernel writes 16-bit weights in its own pass; for 32-bit weights it updates the masters only.
        low = {name: target for name, target in named.items() if target.dtype != torch.float32}
        self._step = Masters(config, own, {kind: cut(named) for kind, named in moments.items()}, traits, kernels, low)
        self._masters = [] if low else list(own.values())

    def step(self, lr: float, divisor: float, gradients: Sequence[Tensor]) -> None:
        """Update masters and targets.

        ``gradients`` are in CPU memory, in order of the flat ranges.
        """
        named = {
            flat_range.shard.name: gradient for flat_range, gradient in zip(self.flat_ranges, gradients, strict=True)
        }
        self._step.step(lr, divisor, named)
        if self._masters:
            torch._foreach_copy_(list(self.targets), self._masters)

    def set_weight_decay(self, weight_decay: float) -> None:
        """See Masters."""
        self._step.set_weight_decay(weight_decay)

    def set_decoupled_lr(self, lr: float) -> None:
        """See Masters."""
        self._step.set_decoupled_lr(lr)

    def set_steps(self, steps: int) -> None:
        """See Masters."""
        self._step.set_steps(steps)


def _split(buffer: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The start of a 1-D ``buffer``, split into parts of ``lengths`` elements."""
    return list(torch.split(buffer[: sum(lengths)], list(lengths)))


class _Traffic:
    """Copies of numbered chunks between a CUDA device and CPU memory.

    Each direction has two alternating buffers.
    """

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._incoming = [torch.empty(numel, dtype=torch.float32, pin_memory=True) for _ in range(2)]
        # Weights go out in their own dtype, at most as wide as float32.
        self._outgoing = [torch.empty(4 * numel, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._down, self._up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._is_fetched = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._is_sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def targets(self, number: int, weights: Sequence[Tensor]) -> list[Tensor]:
        """Parts of the outgoing buffer for a chunk's new ``weights`` of one dtype."""
        buffer = self._outgoing[number % 2].view(weights[0].dtype)
        return _split(buffer, [weight.numel() for weight in weights])

    def begin(self) -> None:
        """Order the copies after all work queued so far.

        That work makes gradients final and last uses the old weights.
        """
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, number: int, chunk: _Chunk) -> None:
        """Start to copy a chunk's gradients to the CPU.

        The chunk two before must have been stepped.
        """
        with torch.cuda.stream(self._down):
            for target, flat_range in zip(self._gradients(number, chunk), chunk.flat_ranges, strict=True):
                target.copy_(flat_range.gradient, non_blocking=True)
            self._is_fetched[number % 2].record(self._down)

    def fetched(self, number: int, chunk: _Chunk) -> list[Tensor]:
        """The chunk's gradients, after their copy has finished."""
        self._is_fetched[number % 2].synchronize()
        return self._gradients(number, chunk)

    def _gradients(self, number: int, chunk: _Chunk) -> list[Tensor]:
        return _split(self._incoming[number % 2], [target.numel() for target in chunk.targets])

    def wait_for_room(self, number: int) -> None:
        """Wait until the chunk's outgoing buffer is free."""
        self._is_sent[number % 2].synchronize()

    def send(self, number: int, chunk: _Chunk) -> None:
        """Start to copy a chunk's new weights to the device.

        Call after ``wait_for_room`` and the step.
        """
        with torch.cuda.stream(self._up):
            for flat_range, target in zip(chunk.flat_ranges, chunk.targets, strict=True):
                flat_range.weight.copy_(target, non_blocking=True)
            self._is_sent[number % 2].record(self._up)

    def end(self) -> None:
        """Order all work queued from now on after the copies of the new weights."""
        torch.cuda.current_stream(self._device).wait_stream(self._up)
