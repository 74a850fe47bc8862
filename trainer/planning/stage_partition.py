"""Division of the layers over the virtual stages of a pipeline. Torch-free.

By default the stages are balanced by cost (trainer.planning.stage_costs). Explicit counts and layouts are used
unchanged or refused. Every layer is always assigned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainer.config.errors import ConfigError
from trainer.planning.pipeline import pipeline_placement
from trainer.planning.schedule.placement import default_chunks
from trainer.planning.stage_costs import PartCosts, part_costs
from trainer.planning.stage_layout import parse_stage_layout

if TYPE_CHECKING:
    from trainer.config.train_config import TrainConfig
    from trainer.planning.schedule.placement import Placement

_PP, _LAYOUT = "parallel.pipeline_model_parallel_size", "parallel.pipeline_model_parallel_layout"
_VIRTUAL = "parallel.num_virtual_stages_per_pipeline_rank"
_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"


def partition_layers(config: TrainConfig, vocab_size: int) -> tuple[range, ...]:
    """Layer numbers of every virtual stage, in order; together all layers of the model.

    Without explicit counts the partition minimizes the largest cost of a rank, then the largest cost of a virtual
    stage. The minimum is exact if all layers cost the same or each rank holds one virtual stage; otherwise it is
    found by local search. Only the first and the last virtual stage, which hold embedding and LM head, may be without
    layers.

    Args:
        config: the training config.
        vocab_size: rows of the vocabulary, which add to the cost of the stages with embedding and LM head.

    Raises:
        ConfigError: the layers cannot be divided as the config requests.
    """
    parallel, placement = config.parallel, pipeline_placement(config)
    check_enough_parts(config)
    if parallel.pipeline_model_parallel_layout is not None:
        return _by_layout(config, parallel.pipeline_model_parallel_layout)
    if placement.num_virtual_stages == 1:
        return (range(config.model.num_layers),)
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        counts = [parallel.num_layers_per_virtual_pipeline_stage] * placement.num_virtual_stages
        return _ranges(counts)
    costs = part_costs(config, vocab_size)
    if parallel.decoder_first_pipeline_num_layers is None and parallel.decoder_last_pipeline_num_layers is None:
        return _ranges(_balanced(costs, placement))
    return _ranges(_by_counts(config, costs))


def check_enough_parts(config: TrainConfig) -> None:
    """Refuse more virtual stages than parts (layers, embedding and LM head).

    Raises:
        ConfigError: names the key that requests too many, and the largest valid number.
    """
    placement, layers = pipeline_placement(config), config.model.num_layers
    pp, chunks, stages, parts = placement.pp, placement.chunks, placement.num_virtual_stages, layers + 2
    if stages <= parts:
        return
    fewest = default_chunks(config.parallel.pipeline_schedule or "1f1b")
    pipeline = f"a pipeline of at most {parts // fewest}"
    layout = config.parallel.pipeline_model_parallel_layout
    if layout is not None:
        key, what = _LAYOUT, repr(layout)
        remedy = f"use at most {parts // pp * pp}" if parts // pp >= fewest else f"use {pipeline}"
    elif chunks <= parts:
        key, what = _PP, f"{pp} with {chunks} virtual stages per rank" if chunks > 1 else str(pp)
        remedy = f"use at most {parts // chunks}"
    else:
        key, what = _VIRTUAL, f"{chunks} on each of {pp} ranks"
        remedy = f"use at most {parts // pp}" if parts // pp >= fewest else f"use {fewest} on {pipeline}"
    raise ConfigError(
        key,
        f"{what} makes {stages} virtual stages, but {layers} layers, embedding and LM head are only {parts} parts; "
        f"{remedy}, or {stages - 2} layers",
    )


@dataclass(frozen=True)
class _Stages:
    """Virtual stages of a pipeline before layers are assigned."""

    placement: Placement
    base: list[float]
    """Cost of each virtual stage without its layers."""
    least: list[int]
    """Fewest layers of each virtual stage."""

    @classmethod
    def build(cls, costs: PartCosts, placement: Placement) -> _Stages:
        count = placement.num_virtual_stages
        base, least = [0.0] * count, [1] * count
        base[0] += costs.embedding
        base[-1] += costs.head
        least[0] = least[-1] = 0
        return cls(placement, base, least)

    def of_rank(self, pp_rank: int) -> list[int]:
        """Numbers of the virtual stages on ``pp_rank``."""
        return [self.placement.virtual_stage(pp_rank, chunk) for chunk in range(self.placement.chunks)]


def _balanced(costs: PartCosts, placement: Placement) -> list[int]:
    """Layer counts of the virtual stages, balanced over ranks, then within each rank."""
    stages, total = _Stages.build(costs, placement), len(costs.layers)
    mean = sum(costs.layers) / total
    own = [stages.of_rank(rank) for rank in range(placement.pp)]
    per_rank = _fill(
        [sum(stages.base[stage] for stage in held) for held in own],
        [sum(stages.least[stage] for stage in held) for held in own],
        mean,
        total,
    )
    counts = _over_chunks(stages, per_rank, mean)
    if min(costs.layers) == max(costs.layers):
        return counts
    if placement.kind == "one":
        return _contiguous(costs.layers, stages.base, stages.least, _cost_of(counts, costs, stages)[0])
    return _improved(counts, costs, stages)


def _fill(base: Sequence[float], least: Sequence[int], cost: float, total: int) -> list[int]:
    """Divide ``total`` equal layers so that the largest sums are smallest.

    Each layer goes to the place with the smallest sum, which is optimal for equal layers. Ties go to the later place,
    because earlier stages of a pipeline keep more micro-batches in memory.
    """
    counts = list(least)
    for _ in range(total - sum(least)):
        sums = [(base[place] + counts[place] * cost, -place) for place in range(len(counts))]
        counts[-min(sums)[1]] += 1
    return counts


def _over_chunks(stages: _Stages, per_rank: Sequence[int], cost: float) -> list[int]:
    counts = [0] * stages.placement.num_virtual_stages
    for rank, layers in enumerate(per_rank):
        own = stages.of_rank(rank)
        parts = _fill([stages.base[stage] for stage in own], [stages.least[stage] for stage in own], cost, layers)
        for stage, part in zip(own, parts, strict=True):
            counts[stage] = part
    return counts


def _cost_of(counts: Sequence[int], costs: PartCosts, stages: _Stages) -> tuple[float, float, float]:
    """Objective: largest rank cost, largest stage cost, sum of squared rank costs."""
    held = _ranges(counts)
    of_stage = [sum(costs.layers[own.start : own.stop]) + base for own, base in zip(held, stages.base, strict=True)]
    ranks = [sum(of_stage[s] for s in stages.of_rank(rank)) for rank in range(stages.placement.pp)]
    return max(ranks), max(of_stage), sum(rank * rank for rank in ranks)


def _improved(counts: list[int], costs: PartCosts, stages: _Stages) -> list[int]:
    """Move single layers between neighbouring stages as long as the objective improves."""
    best = _cost_of(counts, costs, stages)
    moves = [(stage, stage + step) for stage in range(len(counts)) for step in (-1, 1)]
    improving = True
    while improving:
        improving = False
        for source, target in moves:
            if not 0 <= target < len(counts) or counts[source] <= stages.least[source]:
                continue
            tried = list(counts)
            tried[source], tried[target] = tried[source] - 1, tried[target] + 1
            cost = _cost_of(tried, costs, stages)
            if cost < best:
                counts, best, improving = tried, cost, True
    return counts


def _contiguous(layers: Sequence[float], base: Sequence[float], least: Sequence[int], bound: float) -> list[int]:
    """Exact division of layers into stages: smallest maximum, then smallest sum of squares.

    Dynamic programming over (stages so far, layers so far), twice: for the maximum, then for the sum of squares under
    this maximum.

    Args:
        layers: cost of every layer.
        base: cost of each stage without layers.
        least: fewest layers of each stage.
        bound: an achievable maximum, which prunes the search.
    """
    before = [0.0]
    for cost in layers:
        before.append(before[-1] + cost)
    slack = 1e-9 * before[-1]
    # Cost of stages[stage:] without layers: with the limit this bounds the layers that they can still take.
    after = [sum(base[stage:]) for stage in range(len(base) + 1)]

    def best(limit: float, combine_squares: bool) -> tuple[float, list[int]]:
        # layers given so far -> (objective, counts of the stages so far, as a linked list)
        states: dict[int, tuple[float, tuple[int, object]]] = {0: (0.0, (0, None))}
        for stage, extra in enumerate(base):
            reached: dict[int, tuple[float, tuple[int, object]]] = {}
            most_left = (len(base) - stage) * (limit + slack) - after[stage]
            for start, (value, chain) in states.items():
                if before[-1] - before[start] > most_left:
                    continue
                for stop in range(start + least[stage], len(layers) + 1):
                    cost = before[stop] - before[start] + extra
                    if cost > limit + slack:
                        break
                    total = value + cost * cost if combine_squares else max(value, cost)
                    if stop not in reached or total < reached[stop][0]:
                        reached[stop] = (total, (stop - start, chain))
            states = reached
        value, chain = states[len(layers)]
        counts: list[int] = []
        node: object = chain
        while isinstance(node, tuple) and node[1] is not None:
            counts.append(node[0])
            node = node[1]
        return value, counts[::-1]

    smallest, _ = best(bound, combine_squares=False)
    return best(smallest, combine_squares=True)[1]


def _by_layout(config: TrainConfig, layout: str) -> tuple[range, ...]:
    layers = parse_stage_layout(layout)
    held, total = layers[-1].stop, config.model.num_layers
    if held != total:
        raise ConfigError(
            _LAYOUT,
            f"{layout!r} holds {held} layers, but model.num_layers is {total}; change one of the two",
        )
    empty = next((number for number, own in enumerate(layers[1:-1], 1) if not own), None)
    if empty is not None:
        raise ConfigError(
            _LAYOUT,
            f"virtual stage {empty} of {layout!r} is empty; only the first and the last stage may be without layers",
        )
    return layers


def _by_counts(config: TrainConfig, costs: PartCosts) -> list[int]:
    """Layer counts with explicit numbers for the first or last rank.

    The other ranks share evenly.
    """
    parallel, stages = config.parallel, _Stages.build(costs, pipeline_placement(config))
    asked = {_FIRST: parallel.decoder_first_pipeline_num_layers, _LAST: parallel.decoder_last_pipeline_num_layers}
    counts = _RankCounts.build(stages, config.model.num_layers, {k: n for k, n in asked.items() if n is not None})
    if counts.problem is not None:
        raise counts.refusal()
    per_rank = [counts.share] * pipeline_placement(config).pp
    per_rank[0], per_rank[-1] = counts.given.get(_FIRST, counts.share), counts.given.get(_LAST, counts.share)
    return _over_chunks(stages, per_rank, sum(costs.layers) / len(costs.layers))


@dataclass(frozen=True)
class _RankCounts:
    """Explicit layer counts for the first or the last pipeline rank, or for both."""

    layers: int
    """Number of layers of the whole model."""
    given: dict[str, int]
    """Explicit counts by key."""
    least: dict[str, int]
    """Fewest layers of these ranks, by key."""
    others: int
    """Number of ranks that share the remaining layers."""
    least_share: int
    """Fewest layers of each of the other ranks."""

    @classmethod
    def build(cls, stages: _Stages, layers: int, given: dict[str, int]) -> _RankCounts:
        needed = [sum(stages.least[stage] for stage in stages.of_rank(rank)) for rank in range(stages.placement.pp)]
        others = needed[_FIRST in given : len(needed) - (_LAST in given)]
        least = {key: needed[0 if key == _FIRST else -1] for key in given}
        return cls(layers, given, least, len(others), max(others, default=0))

    @property
    def share(self) -> int:
        """Layers of each of the other ranks."""
        return (self.layers - sum(self.given.values())) // max(1, self.others)

    @property
    def problem(self) -> str | None:
        """Reason why these counts are invalid; None: they are valid."""
        total = sum(self.given.values())
        if total > self.layers:
            return f"is more than the {self.layers} layers of the model"
        left = self.layers - total
        if left and not self.others:
            return f"leaves {left} of {self.layers} layers without a pipeline rank"
        if left % max(1, self.others):
            others = f"{self.others} other pipeline ranks"
            return f"leaves {left} of {self.layers} layers, which do not divide evenly over {others}"
        if self.share < self.least_share:
            return f"leaves {self.share} layers to each other pipeline rank, but some need {self.least_share}"
        short = next((key for key, count in self.given.items() if count < self.least[key]), None)
        return None if short is None else f"leaves a virtual stage empty: {short} must be at least {self.least[short]}"

    def refusal(self) -> ConfigError:
        """Error with the nearest valid numbers for one key while the other stays."""
        counts = range(self.layers + 1)
        fits = {k: [n for n in counts if replace(self, given={**self.given, k: n}).problem is None] for k in self.given}
        key = next((key for key, numbers in fits.items() if numbers), next(iter(self.given)))
        own = self.given[key]
        near = sorted(sorted(fits[key], key=lambda n: abs(n - own))[:3])
        rest = "".join(f" together with {other} {count}" for other, count in self.given.items() if other != key)
        what = "both" if rest else "it"
        remedy = f"use {' or '.join(map(str, near))}" if near else f"leave {what} out, and stages are balanced by cost"
        return ConfigError(f"parallel.{key}", f"{own}{rest} {self.problem}; {remedy}")


def _ranges(counts: Sequence[int]) -> tuple[range, ...]:
    ranges: list[range] = []
    for count in counts:
        start = ranges[-1].stop if ranges else 0
        ranges.append(range(start, start + count))
    return tuple(ranges)
