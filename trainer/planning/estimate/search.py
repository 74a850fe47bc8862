"""Search of the layouts of a model on a number of devices, fastest first. Torch-free.

Layouts are planned in the order of their lower bounds of time, without those whose lower bound of memory exceeds the
device, until no bound beats the last row. A row stands for a mesh: the fastest of its layouts that fits. No layout is
left out unplanned that could be a row, so that "none fits" is said of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.planning.checks import check_world_size
from trainer.planning.estimate.candidates import Candidate, Mesh, candidates
from trainer.planning.estimate.links import Links
from trainer.planning.estimate.memory import memory_of_ranks
from trainer.planning.estimate.plan import RunPlan, changed, check_covered, plan_run
from trainer.planning.estimate.speed import step_seconds
from trainer.planning.schedule.placement import ScheduleError

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.estimate.devices import Device

ROWS = 10


@dataclass(frozen=True)
class TooLarge:
    """A layout that does not fit.

    Attributes:
        candidate: the layout.
        bytes: of the rank with the highest peak, at least.
    """

    candidate: Candidate
    bytes: float


@dataclass(frozen=True)
class Found:
    """The fastest layout of a mesh that fits.

    Attributes:
        candidate: the layout.
        plan: its plan.
        faster: of the layouts of the mesh that would be faster, the one that needs the least memory; None: all fit.
    """

    candidate: Candidate
    plan: RunPlan
    faster: TooLarge | None


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        found: at most ROWS, the fastest first.
        nearest: the layout with the lowest memory; None if a layout fits, or none is valid.
        layouts: number of layouts that were compared.
    """

    found: list[Found]
    nearest: TooLarge | None
    layouts: int


@dataclass(frozen=True)
class _Row:
    candidate: Candidate
    config: TrainConfig
    seconds: float


def search_layouts(config: TrainConfig, vocab_size: int, device: Device, nodes: int, per_node: int) -> SearchResult:
    """The fastest layouts that fit.

    Raises:
        ConfigError: the model has no estimate.
    """
    check_covered(config)
    world = nodes * per_node
    every = sorted(
        candidates(config, vocab_size, Links(per_node, device), world), key=lambda each: (each.seconds, each.rank)
    )
    rows: dict[Mesh, _Row] = {}
    done: set[tuple[Mesh, str, bool]] = set()
    too_large: list[TooLarge] = []
    for one in every:
        if one.seconds > _last(rows):
            break
        own = rows.get(one.mesh)
        # Of twins the first that fits is the fastest.
        if one.twins in done or (own is not None and one.seconds >= own.seconds):
            continue
        tried = _tried(config, vocab_size, Links(per_node, device), world, one)
        if isinstance(tried, TooLarge):
            too_large.append(tried)
        elif tried is not None:
            done.add(one.twins)
            if own is None or tried.seconds < own.seconds:
                rows[one.mesh] = tried
    best = sorted(rows.values(), key=lambda each: each.seconds)[:ROWS]
    found = [
        Found(
            each.candidate,
            plan_run(each.config, vocab_size, device, nodes, per_node),
            _faster(each.candidate, too_large),
        )
        for each in best
    ]
    found.sort(key=lambda each: each.plan.step.total)
    nearest = min(too_large, key=lambda each: each.candidate.bytes, default=None)
    return SearchResult(found, None if found else nearest, len(every))


def _last(rows: dict[Mesh, _Row]) -> float:
    """Seconds of the last row; infinite while there are too few."""
    times = sorted(each.seconds for each in rows.values())
    return times[ROWS - 1] if len(times) >= ROWS else float("inf")


def _tried(config: TrainConfig, vocab_size: int, links: Links, world: int, one: Candidate) -> _Row | TooLarge | None:
    """A layout that fits, or does not; None if the trainer refuses it."""
    if one.bytes > links.device.memory:
        return TooLarge(one, one.bytes)
    try:
        own = changed(config, one.values)
        check_world_size(own, world)
        most = max(rank.total for rank in memory_of_ranks(own, vocab_size, world, links.device.overhead))
        if most > links.device.memory:
            return TooLarge(one, most)
        return _Row(one, own, step_seconds(own, vocab_size, world, links))
    except (ConfigError, ScheduleError):
        return None


def _faster(found: Candidate, too_large: list[TooLarge]) -> TooLarge | None:
    """Of the layouts of the same mesh that would be faster, the one that needs the least memory."""
    others = (
        each for each in too_large if each.candidate.mesh == found.mesh and each.candidate.seconds < found.seconds
    )
    return min(others, key=lambda each: each.candidate.bytes, default=None)
