"""Section ``job``: the request to the cluster."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from trainer.config.sections.section import Section

LEAST_HANG_S = 30
CHAIN_LIMITS = ("points", "node_hours")
"""Limits of a chain on what its jobs may use."""


class JobConfig(Section):
    """Resources that ``llmctl submit`` requests from the cluster.

    The trainer itself reads ``preflight`` alone.
    """

    name: str | None = None
    """Name of the run. Unset: that of the config file."""
    nodes: PositiveInt = 1
    """Number of nodes."""
    gpus_per_node: PositiveInt | None = None
    """Ranks per node. Unset: the GPUs of the node."""
    time: str | None = None
    """Time limit, as ``H:M:S`` in quotes, 90m, 5h or 1h30m. Unset: the cluster's default."""
    group: str | None = None
    """Group, project or account to bill. Unset: the cluster's."""
    resource_type: str | None = None
    """Kind of node, one of the cluster's ``resource_types``. Unset: the cluster's default."""
    queue: str | None = None
    """Queue or partition. Unset: that of the kind of node, or the cluster's default."""
    reservation: str | None = None
    """Reservation of nodes that the job runs in."""
    priority: int | None = None
    """Priority, in the scheduler's numbers. Unset: the cluster's default."""
    exclude: list[str] = []
    """Nodes to leave out."""
    container: str | None = None
    """Container image that the job runs in. Unset: the cluster's environment."""
    mounts: list[str] = []
    """Folders to mount in the container, each as ``SRC:DST``."""
    launcher: Literal["torchrun", "srun", "mpirun"] | None = None
    """Launcher of the ranks. Unset: that of the cluster's profile."""
    env: dict[str, str] = {}
    """Variables for the job, by name; they override the cluster's."""
    secrets: list[str] = []
    """Names of variables whose values reach the job, but never its script or record."""
    code: list[str] = []
    """Paths of your own project, which are copied into the run; Python finds them there."""
    notify: list[str] = []
    """Places that are told how the run goes: https://ADDRESS, mailto:ADDRESS, secret:NAME, command:PROGRAM ARGS."""
    notify_on: list[Literal["begin", "end", "fail", "hang", "restart"]] | None = None
    """Events that are told. Unset: all but begin."""
    max_restarts: NonNegativeInt = 0
    """Number of times that a failed attempt begins again, in the same job. 0: a failure ends the job, and its costs."""
    restart_on: (
        list[
            Literal[
                "killed", "lost_peer", "hang", "node", "not_finite", "roll_back", "out_of_memory", "error", "unknown"
            ]
        ]
        | None
    ) = None
    """Classes of failures after which an attempt begins again. Unset: all but not_finite."""
    spare_nodes: NonNegativeInt = 0
    """Nodes beside ``nodes``: an attempt that begins again takes one in the place of each node that was at fault."""
    hang_timeout_s: NonNegativeInt | None = 300
    """Seconds for which a hang lasts before the attempt ends, 30 at the least. 0 or null: a hang ends nothing."""
    chain: dict[str, int | float] | None = None
    """Limits of jobs that submit each other: ``until`` (iterations), ``points``, ``node_hours``. Unset: one job."""

    preflight: Literal["off", "quick"] = "off"
    """quick: each attempt checks all nodes before it builds the model, in at most 60 s, and ends if one is not fit."""

    @field_validator("preflight", mode="before")
    @classmethod
    def _read_off(cls, word: Any) -> Any:
        # YAML 1.1 reads off without quotes as false.
        return "off" if word is False else word

    @field_validator("notify_on", "restart_on", mode="before")
    @classmethod
    def _divide_words(cls, words: Any) -> Any:
        return [word.strip() for word in words.split(",")] if isinstance(words, str) else words

    @field_validator("chain", mode="before")
    @classmethod
    def _divide_limits(cls, limits: Any) -> Any:
        return limits if limits is None else parse_chain(limits)

    @field_validator("hang_timeout_s")
    @classmethod
    def _check_least_hang(cls, seconds: int | None) -> int | None:
        if seconds and seconds < LEAST_HANG_S:
            raise ValueError(f"give {LEAST_HANG_S} or more, as a file server may pause; 0 never ends a run")
        return seconds

    @field_validator("time", mode="before")
    @classmethod
    def _check_unit(cls, time: Any) -> Any:
        # A number has no unit. YAML 1.1 also reads 1:30:00 without quotes as a number, 5400.
        if isinstance(time, int | float) and not isinstance(time, bool):
            raise ValueError("give units, as in 90m or 5h, or H:M:S in quotes, as in '1:30:00'")
        return time


def parse_chain(limits: Any) -> dict[str, int | float]:
    """The limits of a chain in a mapping, or in text as ``until=5000,points=40``.

    Raises:
        ValueError: names all problems in one sentence.
    """
    pairs = dict(limits) if isinstance(limits, Mapping) else _pairs_of_text(str(limits))
    if set(pairs) <= {"until", *CHAIN_LIMITS} and all(pairs[key] is None for key in pairs):
        raise ValueError(f"give at least one of until, {', '.join(CHAIN_LIMITS)}")
    problems, found = [], dict[str, int | float]()
    for key, value in pairs.items():
        if key not in ("until", *CHAIN_LIMITS):
            problems.append(f"{key} is unknown, the keys are until, {', '.join(CHAIN_LIMITS)}")
        elif value is not None:
            number = _number(value)
            if key == "until" and (number is None or number < 1 or number != int(number)):
                problems.append(f"until is {value!r}, give an iteration from 1 on")
            elif number is None or number <= 0:
                problems.append(f"{key} is {value!r}, give a number above 0")
            else:
                found[key] = int(number) if number == int(number) else number
    if problems:
        raise ValueError("; ".join(problems))
    return found


def _pairs_of_text(text: str) -> dict[str, Any]:
    words = (word.strip().partition("=") for word in text.split(",") if word.strip())
    return {key.strip(): value.strip() for key, _, value in words}


def _number(value: Any) -> float | None:
    try:
        number = None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None
    return number if number is not None and math.isfinite(number) else None
