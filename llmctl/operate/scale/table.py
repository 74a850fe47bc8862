"""The numbers of a scaling: speed and efficiency of each size, and the error of the prediction. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypedDict

from llmctl.job_state import JobState
from llmctl.operate.scale.kept import Scaling, SizeRun


class ScaleRow(TypedDict):
    """One number of nodes."""

    nodes: int
    """Number of nodes."""
    devices: int
    """Number of ranks."""
    global_batch_size: int
    """Samples of a step."""
    run_id: str | None
    """The run; null before its submission."""
    state: str | None
    """State of the run; null before its submission."""
    detail: str
    """The reason of the state, as a sentence; empty if there is nothing to say."""
    iteration_time_s: float | None
    """Median time of a step without the first ones; null until the run has completed."""
    tokens_per_s: float | None
    """Tokens per second of all devices."""
    tokens_per_s_per_device: float | None
    """Tokens per second and device."""
    efficiency: float | None
    """Tokens per second and device, as a share of those of the smallest measured size."""
    predicted_iteration_time_s: float | None
    """Time of a step as ``llmctl plan`` predicts it; null without a prediction."""
    predicted_tokens_per_s: float | None
    """Tokens per second of all devices, as predicted."""
    predicted_efficiency: float | None
    """Efficiency as predicted, against the smallest size with a prediction."""
    prediction_error: float | None
    """Predicted by measured time, less 1: below 0 the prediction is too fast."""


class ScaleDocument(TypedDict):
    """The facts of a scaling."""

    name: str
    """Name of the scaling."""
    cluster: str
    """Name of the profile."""
    weak: bool
    """True if the global batch grows with the nodes."""
    steps: int
    """Iterations of each run."""
    node_hours: float | None
    """Node-hours of all jobs at most; null for the site's default time, and where there is no scheduler."""
    points: float | None
    """Charge of all jobs at most, in the site's unit; null if unknown."""
    unit: str | None
    """Unit of the points."""
    rows: list[ScaleRow]
    """The sizes, the smallest first."""


@dataclass(frozen=True)
class SizeState:
    """A size, and what is known of its run.

    Attributes:
        run: as planned.
        state: of the run; None before its submission.
        detail: the reason of the state.
        step_s: measured seconds of a step; None until the run has completed.
    """

    run: SizeRun
    state: JobState | None = None
    detail: str = ""
    step_s: float | None = None

    @property
    def summary(self) -> str:
        """The state with its reason, as ``llmctl status`` has it; some reasons begin with the state's word."""
        word = "" if self.state is None else self.state.value
        return self.detail if word and self.detail.startswith(word) else f"{word}: {self.detail}".removesuffix(": ")

    @property
    def is_going(self) -> bool:
        """True if the run has been submitted and has not ended."""
        return self.state is not None and not self.state.is_finished

    @property
    def has_failed(self) -> bool:
        """True if the run has ended without a measured step."""
        return self.state is not None and self.state.is_finished and self.step_s is None


def document_of(scaling: Scaling, sizes: Sequence[SizeState]) -> ScaleDocument:
    """The document of ``--json``."""
    points = _sum([size.run.points for size in sizes])
    return {
        "name": scaling.name,
        "cluster": scaling.cluster,
        "weak": scaling.is_weak,
        "steps": scaling.steps,
        "node_hours": _sum([size.run.node_hours for size in sizes]),
        "points": points,
        "unit": scaling.unit if points is not None else None,
        "rows": rows_of(sizes),
    }


def rows_of(sizes: Sequence[SizeState]) -> list[ScaleRow]:
    """A row for each size, the smallest first."""
    rows: list[ScaleRow] = []
    first: dict[bool, float] = {}
    for size in sizes:
        run = size.run
        measured, predicted = _rate(run, size.step_s), _rate(run, run.predicted_s)
        # The first size that has a number is what the others are compared with.
        of_device = {
            is_measured: rate / run.devices
            for is_measured, rate in ((True, measured), (False, predicted))
            if rate is not None
        }
        first = {**of_device, **first}
        shares = {is_measured: rate / first[is_measured] for is_measured, rate in of_device.items()}
        error = None if size.step_s is None or run.predicted_s is None else run.predicted_s / size.step_s - 1
        rows.append(
            {
                "nodes": run.nodes,
                "devices": run.devices,
                "global_batch_size": run.global_batch_size,
                "run_id": None if size.state is None else run.run_id,
                "state": None if size.state is None else size.state.value,
                "detail": size.detail,
                "iteration_time_s": size.step_s,
                "tokens_per_s": measured,
                "tokens_per_s_per_device": of_device.get(True),
                "efficiency": shares.get(True),
                "predicted_iteration_time_s": run.predicted_s,
                "predicted_tokens_per_s": predicted,
                "predicted_efficiency": shares.get(False),
                "prediction_error": error,
            }
        )
    return rows


def _rate(run: SizeRun, step_s: float | None) -> float | None:
    return None if not step_s else run.tokens_per_step / step_s


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
