"""JobSpec: what the user asked for, a training run or any command, checked at birth."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A job's name becomes a folder's name and a scheduler's job name."""
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=,-]{0,127}")
"""Groups, queues, resource types and reservations: words that stand in a directive as they are."""


class JobError(ValueError):
    """A value of the job that cannot be used.

    Attributes:
        key: its name in the ``job`` section.
        problem: what is wrong and what is valid.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"job.{key}: {problem}")
        self.key = key
        self.problem = problem


@dataclass(frozen=True)
class JobSpec:
    """One job, the same for every scheduler. Whether the site can give it is asked of profile and backend.

    Attributes:
        name: of the run; its ids begin with it.
        nodes: number of nodes.
        gpus_per_node: ranks per node; None leaves it to the resource type, or to the GPUs that are there.
        time_s: limit in seconds; None leaves it to the site.
        group: what the site bills to.
        resource_type: kind of node, in the site's words.
        queue: queue, partition or class.
        reservation: id of nodes reserved earlier.
        priority: the scheduler's number.
        after: run that must have ended well before; ``any:RUN``: however.
        container: image that the job runs in.
        mounts: ``SRC:DST`` seen inside the container.
        launcher: what starts the ranks; None leaves it to the profile.
        env: variables for the job.
        secrets: names of variables whose values travel apart and are never written down.
        code: paths of the user's project to take along.
        command: argv run once on every node; empty: the trainer.
    """

    name: str
    nodes: int = 1
    gpus_per_node: int | None = None
    time_s: int | None = None
    group: str | None = None
    resource_type: str | None = None
    queue: str | None = None
    reservation: str | None = None
    priority: int | None = None
    after: str | None = None
    container: str | None = None
    mounts: tuple[str, ...] = ()
    launcher: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise JobError(
                "name", f"{self.name!r} is not valid: up to 64 letters, digits, dots, dashes and underscores"
            )
        for key in ("group", "resource_type", "queue", "reservation"):
            word = getattr(self, key)
            if word is not None and not WORD.fullmatch(word):
                raise JobError(key, f"{word!r} is not valid: letters, digits and ._:@/+=,- beginning with the former")
        for name, _ in self.env:
            if not VARIABLE.fullmatch(name):
                raise JobError(f"env.{name}", f"{name!r} cannot name a variable; use letters, digits and underscores")
        for name in self.secrets:
            if not VARIABLE.fullmatch(name):
                # What stands behind a = is a value that its owner meant to hide.
                shown = name.partition("=")[0]
                raise JobError("secrets", f"{shown!r}: give the name of a variable alone, never its value")
        if any("\0" in text for text in (*(value for _, value in self.env), *self.command)):
            raise JobError("env", "a value holds a NUL character, which no process can be given")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "JobSpec":
        """The job that ``as_plain`` wrote.

        Raises:
            JobError: a value cannot be used.
            TypeError: ``values`` are not those of a job.
        """
        known = {field.name for field in fields(cls)}
        if not known >= values.keys():
            raise TypeError(f"unknown keys of a job: {', '.join(sorted(values.keys() - known))}")
        env = values.get("env", {}).items()
        lists = {key: tuple(values.get(key, ())) for key in ("mounts", "secrets", "code", "command")}
        return cls(**{**values, **lists, "env": tuple(env)})

    def as_plain(self) -> dict[str, Any]:
        """Plain values for the run record."""
        return {**asdict(self), "env": dict(self.env)}


def parse_time(text: str) -> int:
    """Seconds of ``H:M:S``, ``M:S`` or ``D-H:M:S``.

    Raises:
        JobError: the text is none of these, or no time at all.
    """
    match = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text)
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0, 0)
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if match is None or seconds > 59 or (match[2] is not None and minutes > 59) or not total:
        raise JobError("time", f"{text!r} is not valid: give H:M:S, as in 1:30:00")
    return total
