"""Gradient bucket plan: ranges of the gradient buffer by parameter and by message. Torch-free.

Plain buckets and the distributed optimizer's buckets follow the same plan: gloo's order of addition depends on the
position in the message, so that a common plan gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from trainer.distributed.mesh import ParallelMesh
    from trainer.model.sharding import ParameterLayout

# Parameters and shards begin on a multiple of this many elements: whole cache lines, whole vectors of every kernel, and
# the 128 bytes that GPUs read at once, in 16 bits as in 32. Kernels then need no scalar tail where a parameter is cut.
ALIGNMENT = 64


@dataclass(frozen=True)
class PlannedBucket:
    """A gradient bucket: a range of the buffer.

    Attributes:
        spans: start and stop of each of the bucket's parameters in the buffer.
        start: first element.
        stop: position after the last element; the length is a multiple of ``copies`` x ALIGNMENT.
        copies: ranks that hold the same parameters and sum their gradients.
        is_expert: these are the ranks of expert_dp, not of dp_cp.
        first_use: place of the bucket's earliest parameter in the order of use in forward.
    """

    spans: Mapping[str, tuple[int, int]]
    start: int
    stop: int
    copies: int
    is_expert: bool
    first_use: int

    def shard(self, place: int) -> tuple[int, int]:
        """Start and stop, in the buffer, of the shard of copy number ``place``."""
        length = (self.stop - self.start) // self.copies
        return self.start + place * length, self.start + (place + 1) * length


def plan_buckets(
    parameters: Mapping[str, torch.nn.Parameter],
    layouts: Mapping[str, ParameterLayout],
    mesh: ParallelMesh,
    bucket_size: int | None,
) -> list[PlannedBucket]:
    """Buckets in the order in which backward fills them.

    The plan is the same on all ranks with the same tp and pp rank.

    Parameters lie in reverse order of use. A bucket ends at ``bucket_size`` elements. A parameter with other copies or
    another dtype begins a new bucket. A table that two stages share has its own, so that both stages cut it alike.

    Args:
        parameters: this rank's, by global name, in order of use in forward.
        layouts: of at least these parameters.
        mesh: this rank's place.
        bucket_size: in elements; None makes as few buckets as possible.
    """
    planned: list[PlannedBucket] = []
    end = 0
    for is_expert in (False, True):
        copies = mesh.copies(is_expert)
        names = [name for name in reversed(list(parameters)) if layouts[name].is_expert == is_expert]
        for bucket in _divide(names, parameters, layouts, bucket_size):
            spans: dict[str, tuple[int, int]] = {}
            start = end
            for name in bucket:
                spans[name] = (end, end + parameters[name].numel())
                end = _round_up(spans[name][1], ALIGNMENT)
            end = start + _round_up(end - start, copies * ALIGNMENT)
            planned.append(PlannedBucket(spans, start, end, copies, is_expert, _first_use(parameters, bucket)))
    return sorted(planned, key=lambda bucket: -bucket.first_use)


def _divide(
    names: list[str],
    parameters: Mapping[str, torch.nn.Parameter],
    layouts: Mapping[str, ParameterLayout],
    bucket_size: int | None,
) -> Iterator[list[str]]:
    bucket: list[str] = []
    size = 0
    for name in names:
        is_full = bucket_size is not None and size >= bucket_size
        if bucket and (is_full or not _may_share(bucket[-1], name, parameters, layouts)):
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += parameters[name].numel()
    if bucket:
        yield bucket


def _may_share(
    one: str, other: str, parameters: Mapping[str, torch.nn.Parameter], layouts: Mapping[str, ParameterLayout]
) -> bool:
    has_tied = layouts[one].tied_over_stages or layouts[other].tied_over_stages
    return not has_tied and parameters[one].dtype == parameters[other].dtype


def _first_use(parameters: Mapping[str, torch.nn.Parameter], names: list[str]) -> int:
    places = {name: place for place, name in enumerate(parameters)}
    return min(places[name] for name in names)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
