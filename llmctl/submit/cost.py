"""What a job will be asked for and charged, told before it is submitted. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmctl.backends.base import JobRequest


@dataclass(frozen=True)
class JobCost:
    """The size of a request, and what it costs at most.

    Attributes:
        nodes: number of nodes.
        gpus_per_node: GPUs of each; 0 for a job on CPUs.
        resource_type: the site's word for the kind of node; None where it has none.
        hours: time limit; None: the site's own default.
        points: charge for the whole time; None where the rate or the time is not known.
        unit: of the points.
    """

    nodes: int
    gpus_per_node: int
    resource_type: str | None
    hours: float | None
    points: float | None
    unit: str

    @classmethod
    def of(cls, request: JobRequest) -> "JobCost":
        """The cost of a request, by the rates of its profile."""
        cost, resource = request.profile.cost, request.resource
        hours = request.time_s / 3600 if request.time_s is not None else None
        points = None
        if hours is not None and resource is not None and resource.points_per_hour is not None:
            points = resource.points_per_hour * request.nodes * hours
            points *= cost.reserved_factor if request.reservation is not None else 1.0
            points *= cost.priority_factors.get(request.priority, 1.0) if request.priority is not None else 1.0
        return cls(request.nodes, request.gpus_per_node, request.resource_type, hours, points, cost.unit)

    @property
    def node_hours(self) -> float | None:
        """Nodes x hours; None where the time is the site's own default."""
        return None if self.hours is None else self.nodes * self.hours

    def __str__(self) -> str:
        """One line: ``8 nodes of rt_HF x 8 GPUs x 2 h = 16 node-hours, at most 96 points``."""
        kind = f" of {self.resource_type}" if self.resource_type else ""
        size = f"{_count(self.nodes, 'node')}{kind}"
        if self.gpus_per_node:
            size += f" x {_count(self.gpus_per_node, 'GPU')}"
        if self.hours is None:
            return f"{size}, for the site's default time"
        points = f", at most {self.points:,.10g} {self.unit}" if self.points is not None else ""
        return f"{size} x {self.hours:.4g} h = {self.node_hours:.6g} node-hours{points}"

    def as_json(self) -> Mapping[str, Any]:
        """Plain values."""
        return {
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node,
            "resource_type": self.resource_type,
            "hours": self.hours,
            "node_hours": self.node_hours,
            "points": self.points,
            "unit": self.unit if self.points is not None else None,
        }


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
