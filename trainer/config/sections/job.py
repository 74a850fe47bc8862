"""Section ``job``: the request to the cluster."""

from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from trainer.config.sections.section import Section


class JobConfig(Section):
    """Resources that ``llmctl submit`` requests from the cluster.

    The trainer itself reads none of these keys.
    """

    name: str | None = None
    nodes: PositiveInt = 1
    gpus_per_node: PositiveInt | None = None
    time: str | None = None
    group: str | None = None
    resource_type: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    exclude: list[str] = []
    container: str | None = None
    mounts: list[str] = []
    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    env: dict[str, str] = {}
    secrets: list[str] = []
    code: list[str] = []
    notify: list[str] = []
    """Places that are told how the run goes: https://ADDRESS, mailto:ADDRESS, secret:NAME, command:PROGRAM ARGS."""
    notify_on: list[Literal["begin", "end", "fail", "hang", "restart"]] | None = None
    """Events that are told. Unset: all but begin."""

    @field_validator("notify_on", mode="before")
    @classmethod
    def _divide_events(cls, events: Any) -> Any:
        return [event.strip() for event in events.split(",")] if isinstance(events, str) else events

    @field_validator("time", mode="before")
    @classmethod
    def _check_unit(cls, time: Any) -> Any:
        # A number has no unit. YAML 1.1 also reads 1:30:00 without quotes as a number, 5400.
        if isinstance(time, int | float) and not isinstance(time, bool):
            raise ValueError("give units, as in 90m or 5h, or H:M:S in quotes, as in '1:30:00'")
        return time
