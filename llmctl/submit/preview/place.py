"""Rows about the place of a job, and the value that all rows go into. Needs nothing of the trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llmctl.submit.job import Job


@dataclass(frozen=True)
class Preview:
    """A submission for people.

    Attributes:
        rows: label and text, in order.
        facts: the numbers behind the rows, for ``--json``.
    """

    rows: tuple[tuple[str, str], ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


def command_preview(job: Job) -> Preview:
    """The rows of a COMMAND."""
    return Preview((("command", " ".join(job.spec.command)), *place_rows(job)))


def place_rows(job: Job) -> list[tuple[str, str]]:
    """Nodes, image and folder of a job."""
    request, profile = job.request, job.profile
    if job.cost is not None:
        queue = f", queue {request.queue}" if request.queue else ""
        place = f"{job.cost}{queue}"
    else:
        where = ", ".join(request.hosts) if request.hosts else "this machine"
        place = f"{counted(request.nodes, 'node')} x {counted(request.ranks_per_node, 'rank')} on {where}"
    image = [("image", job.image)] if job.image else []
    return [("job", f"{place} ({profile.name})"), *image, ("folder", str(job.run_dir))]


def counted(number: int, word: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"
