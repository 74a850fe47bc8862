"""Section ``job``: the request to the cluster."""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator

from trainer.config.sections.section import Section

LEAST_HANG_S = 30


class JobConfig(Section):
    """Resources that ``llmctl submit`` requests from the cluster.

    The trainer itself reads none of these keys.
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
        list[Literal["killed", "lost_peer", "hang", "node", "not_finite", "out_of_memory", "error", "unknown"],] | None
    ) = None
    """Classes of failures after which an attempt begins again. Unset: all but not_finite."""
    hang_timeout_s: NonNegativeInt | None = 300
    """Seconds for which a hang lasts before the attempt ends, 30 at the least. 0 or null: a hang ends nothing."""

    @field_validator("notify_on", "restart_on", mode="before")
    @classmethod
    def _divide_words(cls, words: Any) -> Any:
        return [word.strip() for word in words.split(",")] if isinstance(words, str) else words

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
