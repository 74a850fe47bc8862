"""The fastest layouts of a training run on a number of devices, with what limits each."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from llmctl.submit.preview.predict import PlanInputs, PredictedCost, charge, config_error
from trainer.config.errors import ConfigError
from trainer.planning.estimate.search import Found, TooLarge, search_layouts


@dataclass(frozen=True)
class LargerLayout:
    """A layout that does not fit.

    Attributes:
        layout: in words.
        peak_memory_bytes: of the rank with the highest peak, at least.
    """

    layout: str
    peak_memory_bytes: int


@dataclass(frozen=True)
class FoundLayout:
    """The fastest layout of a mesh that fits.

    Attributes:
        layout: in words.
        settings: dotted key -> value, as --set takes them.
        tokens_per_s_per_device: tokens per second and device.
        iteration_time_s: seconds per iteration.
        peak_memory_bytes: of the rank with the highest peak.
        limits: share of the iteration: bubble, messages (of tp, cp, ep), recompute, data_parallel, host, optimizer.
        faster: of the layouts of the same mesh that would be faster, the one that needs the least memory.
        node_hours: node-hours of the whole run.
        cost: of the whole run; None: the nodes cost none.
        tight: True if it fits, but with less room than predictions are wrong by.
    """

    layout: str
    settings: Mapping[str, Any]
    tokens_per_s_per_device: float
    iteration_time_s: float
    peak_memory_bytes: int
    limits: Mapping[str, float]
    faster: LargerLayout | None
    node_hours: float
    cost: PredictedCost | None
    tight: bool


@dataclass(frozen=True)
class SearchedLayouts:
    """Result of a search.

    Attributes:
        layouts: those that fit, the fastest first.
        nearest: the layout with the lowest memory, if none fits.
        compared: number of layouts that were compared.
    """

    layouts: list[FoundLayout]
    nearest: LargerLayout | None
    compared: int

    def as_json(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def search(inputs: PlanInputs) -> tuple[SearchedLayouts, Mapping[str, Any] | None]:
    """Search, and the sections of the best layout's config with the size of its job; None: nothing fits.

    Raises:
        ConfigFileError: the model has no estimate.
    """
    try:
        result = search_layouts(inputs.training, inputs.vocabulary, inputs.device, inputs.nodes, inputs.gpus_per_node)
    except ConfigError as error:
        raise config_error(error) from None
    rows = [_row(inputs, each) for each in result.found]
    found = SearchedLayouts(rows, None if result.nearest is None else _larger(result.nearest), result.layouts)
    if not rows:
        return found, None
    best = result.found[0].plan.config.model_dump(exclude_unset=True, mode="json")
    job = {**best.get("job", {}), "nodes": inputs.nodes, "gpus_per_node": inputs.gpus_per_node}
    return found, {**best, "job": job}


def _row(inputs: PlanInputs, found: Found) -> FoundLayout:
    planned = found.plan
    hours, cost = charge(inputs, planned)
    return FoundLayout(
        layout=str(found.candidate),
        settings={key: value for key, value in found.candidate.values.items() if value not in (None, [])},
        tokens_per_s_per_device=planned.tokens_per_s,
        iteration_time_s=planned.step.total,
        peak_memory_bytes=planned.worst.total,
        limits=planned.limits,
        faster=None if found.faster is None else _larger(found.faster),
        node_hours=hours,
        cost=cost,
        tight=planned.is_tight,
    )


def _larger(one: TooLarge) -> LargerLayout:
    return LargerLayout(str(one.candidate), int(one.bytes))
