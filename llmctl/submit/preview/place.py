"""Rows about the place of a job, and the value that all rows go into. Needs nothing of the trainer."""

from dataclasses import dataclass

from typing_extensions import TypedDict

from llmctl.submit.job import Job


class TrainingFacts(TypedDict):
    """The numbers of a training run before it starts. None: not known before."""

    parameters: int | None
    """Parameters of the model."""
    vocabulary: int | None
    """Token ids of the model, without padding."""
    data_tokens: int | None
    """Tokens of the training data."""
    train_tokens: int
    """Tokens of the whole run."""
    fits: bool | None
    """True if no rank is predicted to need more memory than its device has."""
    peak_memory_bytes: int | None
    """Predicted peak memory of the rank with the highest, in bytes."""
    iteration_time_s: float | None
    """Predicted time of an iteration, in seconds."""
    device: str | None
    """Device of the prediction."""


class TrainingPlan(TrainingFacts):
    """The plan of a training run."""

    rows: dict[str, str]
    """Label -> text, as the command shows the plan to people; the texts change between versions."""


class CommandPlan(TypedDict):
    """The plan of a COMMAND."""

    rows: dict[str, str]
    """Label -> text, as the command shows the plan to people; the texts change between versions."""


@dataclass(frozen=True)
class Preview:
    """A submission for people.

    Attributes:
        rows: label and text, in order.
        facts: the numbers behind the rows, for ``--json``; None for a COMMAND.
    """

    rows: tuple[tuple[str, str], ...]
    facts: TrainingFacts | None = None


def command_preview(job: Job) -> Preview:
    """The rows of a COMMAND."""
    return Preview((("command", " ".join(job.spec.command)), *place_rows(job)))


def place_rows(job: Job) -> list[tuple[str, str]]:
    """Nodes, image and folder of a job."""
    request, profile = job.request, job.profile
    if job.cost is not None:
        queue = f", queue {request.queue}" if request.queue else ""
        spares = f", {request.spare_nodes} of the nodes spare" if request.spare_nodes else ""
        place = f"{job.cost}{queue}{spares}"
    else:
        where = ", ".join(request.hosts) if request.hosts else "this machine"
        place = f"{counted(request.nodes, 'node')} x {counted(request.ranks_per_node, 'rank')} on {where}"
    image = [("image", job.image)] if job.image else []
    return [("job", f"{place} ({profile.name})"), *image, ("folder", str(job.run_dir))]


def counted(number: int, word: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
