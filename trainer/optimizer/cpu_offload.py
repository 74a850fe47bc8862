"""Optimizer state in CPU memory, stepped there while gradients and weights of other parts travel.

Source: Ren et al. 2021, "ZeRO-Offload: Democratizing Billion-Scale Model Training" (arXiv:2101.06840), section 4.1:
float32 states and the step are the CPU's, 16-bit weights and all else the device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainer.optimizer.masters import Masters, Moments, new_moments

if TYPE_CHECKING:
    from trainer.config.sections import OptimizerConfig
    from trainer.data_parallel.parameter_shards import ParameterShard

# Elements that travel and are stepped together: 64 MB of gradients, enough for the full speed of a bus, and little
# enough that the first and the last transfer, which nothing hides, are short. A multiple of every kernel's vector.
_CHUNK = 1 << 24


def offloaded_shards(parameter_shards: Sequence[ParameterShard], fraction: float) -> list[ParameterShard]:
    """Whole pieces, from the first on, with about ``fraction`` of all elements."""
    requested, before = fraction * sum(shard.weight.numel() for shard in parameter_shards), 0
    chosen = []
    for shard in parameter_shards:
        # By its middle, so that the sum is off by at most half a piece.
        if before + shard.weight.numel() / 2 < requested:
            chosen.append(shard)
        before += shard.weight.numel()
    return chosen


class OffloadedMasters:
    """Masters and moments of some pieces in CPU memory.

    Where the weights are on a CUDA device, what travels goes through two page-locked buffers in each direction: while
    one portion is stepped, the gradients of the next come in and the weights of the last go out. On a CPU device
    nothing travels and the arithmetic is the same.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        parameter_shards: Sequence[ParameterShard],
        decays: Mapping[str, bool],
        adamw: Callable[..., Any],
    ) -> None:
        """Allocate; the masters start as the weights are.

        Args:
            config: which optimizer, and its constants.
            parameter_shards: what to keep here.
            decays: which of them, by name, weight decay applies to.
            adamw: the operation of trainer.ops.adamw, for CPU memory.
        """
        self._parameter_shards = list(parameter_shards)
        self.masters = {shard.name: shard.weight.to("cpu", torch.float32, copy=True) for shard in parameter_shards}
        """1-D, by name of the parameter, as are the moments."""
        self.moments = new_moments(config, self.masters)
        chunks = list(_chunks(parameter_shards))
        largest = max(map(_numel, chunks), default=0)
        self._traffic = _Traffic(parameter_shards[0].weight.device, largest) if _is_on_gpu(parameter_shards) else None
        self._chunks = []
        for number, flat_ranges in enumerate(chunks):
            weights = [flat_range.weight.detach() for flat_range in flat_ranges]
            targets = weights if self._traffic is None else self._traffic.targets(number, weights)
            self._chunks.append(_Chunk(config, flat_ranges, targets, self.masters, self.moments, decays, adamw))

    def begin_step(self) -> None:
        """Let the first gradients come in, ahead of what is queued on the device from now on."""
        if self._traffic is not None:
            self._traffic.begin()
            self._traffic.fetch(0, self._chunks[0])

    @torch.no_grad()
    def step(self, lr: float, divisor: float) -> None:
        """Update masters and weights from the pieces' gradients / ``divisor``, after ``begin_step``."""
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

    def set_steps(self, steps: int) -> None:
        """See Masters."""
        for chunk in self._chunks:
            chunk.set_steps(steps)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Make the masters follow the weights."""
        for shard in self._parameter_shards:
            self.masters[shard.name].copy_(shard.weight)

    @torch.no_grad()
    def restore_masters(self) -> None:
        """Complete what a checkpoint filled: it holds masters beside 16-bit weights only, which then follow them."""
        for shard in self._parameter_shards:
            if shard.weight.dtype == torch.float32:
                self.masters[shard.name].copy_(shard.weight)
            else:
                shard.weight.copy_(self.masters[shard.name])


@dataclass(frozen=True)
class _FlatRange:
    """Elements ``start`` to ``stop`` of a piece."""

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
            # Less than a vector left: a cut there would leave the kernel a tail that the whole piece has not.
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
    """Stretches that are stepped together, all of one dtype.

    Attributes:
        flat_ranges: of different pieces.
        targets: where each step leaves the new weights, in CPU memory, in order of the stretches.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        flat_ranges: Sequence[_FlatRange],
        targets: Sequence[Tensor],
        masters: Mapping[str, Tensor],
        moments: Moments,
        decays: Mapping[str, bool],
        adamw: Callable[..., Any],
    ) -> None:
        self.flat_ranges, self.targets = flat_ranges, targets

        def cut(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
            # A portion has at most one stretch of each piece.
            return {
                flat_range.shard.name: named[flat_range.shard.name][flat_range.start : flat_range.stop]
                for flat_range in flat_ranges
            }

        own = cut(masters)
        named = dict(zip(own, targets, strict=True))
        # The kernel's own pass writes 16-bit weights; of those of 32 bits it knows the masters alone.
        low = {name: target for name, target in named.items() if target.dtype != torch.float32}
        self._step = Masters(config, own, {kind: cut(named) for kind, named in moments.items()}, decays, adamw, low)
        self._masters = [] if low else list(own.values())

    def step(self, lr: float, divisor: float, gradients: Sequence[Tensor]) -> None:
        """Update masters and targets; ``gradients`` in order of the stretches, in CPU memory."""
        named = {
            flat_range.shard.name: gradient for flat_range, gradient in zip(self.flat_ranges, gradients, strict=True)
        }
        self._step.step(lr, divisor, named)
        if self._masters:
            torch._foreach_copy_(list(self.targets), self._masters)

    def set_steps(self, steps: int) -> None:
        """See Masters."""
        self._step.set_steps(steps)


def _split(buffer: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """The start of a 1-D ``buffer`` in parts of so many elements."""
    return list(torch.split(buffer[: sum(lengths)], list(lengths)))


class _Traffic:
    """What travels between a CUDA device and CPU memory: portions by number, through buffers used by turns."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._incoming = [torch.empty(numel, dtype=torch.float32, pin_memory=True) for _ in range(2)]
        # Weights go out in their own dtype, at most as wide as float32.
        self._outgoing = [torch.empty(4 * numel, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._down, self._up = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]
        self._is_fetched = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._is_sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]

    def targets(self, number: int, weights: Sequence[Tensor]) -> list[Tensor]:
        """The parts of a buffer from which a portion's new ``weights``, all of one dtype, leave."""
        buffer = self._outgoing[number % 2].view(weights[0].dtype)
        return _split(buffer, [weight.numel() for weight in weights])

    def begin(self) -> None:
        """Gradients must be final and weights out of use in what was queued so far."""
        for stream in (self._down, self._up):
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def fetch(self, number: int, chunk: _Chunk) -> None:
        """Start to bring a portion's gradients; the one two before must have been stepped."""
        with torch.cuda.stream(self._down):
            for target, flat_range in zip(self._gradients(number, chunk), chunk.flat_ranges, strict=True):
                target.copy_(flat_range.gradient, non_blocking=True)
            self._is_fetched[number % 2].record(self._down)

    def fetched(self, number: int, chunk: _Chunk) -> list[Tensor]:
        """Its gradients, waited for."""
        self._is_fetched[number % 2].synchronize()
        return self._gradients(number, chunk)

    def _gradients(self, number: int, chunk: _Chunk) -> list[Tensor]:
        return _split(self._incoming[number % 2], [target.numel() for target in chunk.targets])

    def wait_for_room(self, number: int) -> None:
        """Until the last weights have left the buffer of a portion's targets; at once where there were none."""
        self._is_sent[number % 2].synchronize()

    def send(self, number: int, chunk: _Chunk) -> None:
        """Start to bring a portion's new weights to the device, after ``wait_for_room`` and the step."""
        with torch.cuda.stream(self._up):
            for flat_range, target in zip(chunk.flat_ranges, chunk.targets, strict=True):
                flat_range.weight.copy_(target, non_blocking=True)
            self._is_sent[number % 2].record(self._up)

    def end(self) -> None:
        """What is queued from now on finds the new weights."""
        torch.cuda.current_stream(self._device).wait_stream(self._up)
