"""JobSpec: the user's request, a training run or any command, checked on construction."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A job's name becomes a folder name and a scheduler's job name."""
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+=,-]{0,127}")
"""Groups, queues, resource types and reservations: such words need no quotes in a directive."""
NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:%\[\],-]{0,254}")
"""Names of nodes, also as Slurm's lists: ``n[1-3,7]``."""
DEFAULT_EVENTS = ("end", "fail", "hang", "restart")
"""Events of a run that are told if the user names none."""
RESTART_CLASSES = (
    "killed",
    "lost_peer",
    "hang",
    "node",
    "not_finite",
    "roll_back",
    "out_of_memory",
    "error",
    "unknown",
)
"""Classes of failures that a new attempt may help (llmctl/supervisor/restarts.py)."""
DEFAULT_RESTARTS = tuple(each for each in RESTART_CLASSES if each != "not_finite")
"""Without the one that the same weights and the same data bring again. Attempts without a new step end a run anyway."""
DEFAULT_HANG_TIMEOUT_S = 300
PREFLIGHTS = ("off", "quick")
LEAST_HANG_TIMEOUT_S = 30
"""A shorter silence may be a pause of the file server."""
WORD_RULE = "use letters, digits and ._:@/+=,- after a letter or digit"


class JobError(ValueError):
    """An invalid value of a job.

    Attributes:
        key: key of the value in the ``job`` section.
        problem: what is wrong and what is valid.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"job.{key}: {problem}")
        self.key = key
        self.problem = problem


@dataclass(frozen=True)
class JobSpec:
    """One job, in words that hold for every scheduler. Profile and backend check the site's limits.

    Attributes:
        name: name of the run; its run ids begin with this name.
        nodes: number of nodes.
        gpus_per_node: ranks per node; None: as in the resource type, or the GPUs found on the node.
        time_s: time limit in seconds; None: the site's default.
        group: group, project or account to bill.
        resource_type: kind of node, in the site's words.
        queue: queue, partition or class.
        reservation: id of nodes reserved earlier.
        priority: priority, in the scheduler's own numbers.
        exclude: names of nodes to leave out.
        after: run that must complete first; ``any:RUN``: run that must end first, in any way.
        container: image that the job runs in.
        mounts: ``SRC:DST``, visible inside the container.
        launcher: program that starts the ranks; None: the profile's.
        env: variables for the job.
        secrets: names of variables whose values are transferred separately and never written to script or record.
        code: paths of the user's project to copy.
        command: argv run once on every node; empty: the trainer.
        torchrun: the command is a Python program, started in every rank by torchrun.
        notify: places that are told of the run's events (see llmctl/site/notify.py).
        notify_on: the events; None: the default ones.
        max_restarts: how often a failed attempt begins again in the same job.
        restart_on: classes of failures after which it does; None: the default ones.
        hang_timeout_s: seconds for which a hang lasts before the attempt ends; 0 or None: for ever.
        preflight: ``quick``: the trainer checks all nodes before it builds the model; else ``off``.
        spare_nodes: nodes beside ``nodes``, which take the place of nodes at fault when an attempt begins again.
        chain: limits of a chain of jobs, of which each submits the next one: until, points, node_hours; None: no chain.
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
    exclude: tuple[str, ...] = ()
    after: str | None = None
    container: str | None = None
    mounts: tuple[str, ...] = ()
    launcher: str | None = None
    env: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = ()
    code: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    torchrun: bool = False
    notify: tuple[str, ...] = ()
    notify_on: tuple[str, ...] | None = None
    max_restarts: int = 0
    restart_on: tuple[str, ...] | None = None
    hang_timeout_s: int | None = DEFAULT_HANG_TIMEOUT_S
    preflight: str = "off"
    chain: tuple[tuple[str, float], ...] | None = None
    spare_nodes: int = 0

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise JobError(
                "name", f"{self.name!r} is not valid: up to 64 letters, digits, dots, dashes and underscores"
            )
        self._check_words()
        if self.notify or self.notify_on:
            self._check_notices()
        self._check_restarts()
        for name, _ in self.env:
            if not VARIABLE.fullmatch(name):
                raise JobError(f"env.{name}", f"{name!r} cannot name a variable; use letters, digits and underscores")
        for name in self.secrets:
            if not VARIABLE.fullmatch(name):
                # The text after "=" is a value that its owner meant to hide.
                shown = name.partition("=")[0]
                raise JobError("secrets", f"{shown!r}: give the name of a variable alone, never its value")
        given = {"env": dict(self.env).values(), "command": self.command, "mounts": self.mounts, "code": self.code}
        for key, texts in {**given, "container": (self.container or "",)}.items():
            if any("\0" in text for text in texts):
                raise JobError(key, "a value contains a NUL character, which the operating system does not allow")

    def _check_words(self) -> None:
        for key in ("group", "resource_type", "queue", "reservation"):
            word = getattr(self, key)
            if word is not None and not WORD.fullmatch(word):
                raise JobError(key, f"{word!r} is not valid: {WORD_RULE}")
        for host in self.exclude:
            if not NODE.fullmatch(host):
                raise JobError("exclude", f"{host!r} cannot name a node; use letters, digits and ._@:%[],-")

    def _check_notices(self) -> None:
        from llmctl.site.notify import event_problem, place_problem

        for place in self.notify:
            if problem := place_problem(place, self.secrets):
                raise JobError("notify", problem)
        for event in self.notify_on or ():
            if problem := event_problem(event):
                raise JobError("notify_on", problem)
        if self.notify_on and not self.notify:
            raise JobError("notify_on", "there is no place to tell; give --notify WHERE, or --mail-user ADDRESS")

    def _check_restarts(self) -> None:
        if self.max_restarts < 0:
            raise JobError("max_restarts", f"{self.max_restarts} is not valid: give a number from 0 on")
        if self.spare_nodes < 0:
            raise JobError("spare_nodes", f"{self.spare_nodes} is not valid: give a number from 0 on")
        if self.spare_nodes and not self.max_restarts:
            text = "a spare node takes part only in a later attempt; give --max-restarts N, or job.max_restarts, too"
            raise JobError("spare_nodes", text)
        for word in self.restart_on or ():
            if word not in RESTART_CLASSES:
                raise JobError("restart_on", f"{word!r} is none of {', '.join(RESTART_CLASSES)}")
        if self.restart_on and not self.max_restarts and self.chain is None:
            raise JobError("restart_on", "there are no restarts; give --max-restarts N, or job.max_restarts, too")
        if self.hang_timeout_s and self.hang_timeout_s < LEAST_HANG_TIMEOUT_S:
            text = f"{self.hang_timeout_s} is not valid: give {LEAST_HANG_TIMEOUT_S} or more, or 0 to end no run"
            raise JobError("hang_timeout_s", text)
        if self.preflight not in PREFLIGHTS:
            raise JobError("preflight", f"{self.preflight!r} is not valid: give {' or '.join(PREFLIGHTS)}")
        if self.preflight != "off" and self.command:
            raise JobError("preflight", "a COMMAND has none, as the trainer itself checks the nodes; leave it out")

    @classmethod
    def from_plain(cls, values: Mapping[str, Any]) -> "JobSpec":
        """Build the job from the output of ``as_plain``.

        Raises:
            JobError: a value is invalid.
            TypeError: ``values`` has unknown keys.
        """
        known = {field.name for field in fields(cls)}
        if not known >= values.keys():
            raise TypeError(f"unknown keys of a job: {', '.join(sorted(values.keys() - known))}")
        env = values.get("env", {}).items()
        lists = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        chain = values.get("chain")
        limits = None if chain is None else tuple(chain.items())
        return cls(**{**values, **lists, "env": tuple(env), "chain": limits})

    def as_plain(self) -> dict[str, Any]:
        """The fields as plain values, for the run record."""
        return {**asdict(self), "env": dict(self.env), "chain": None if self.chain is None else dict(self.chain)}


def parse_nodes(text: str) -> list[str]:
    """Names in ``a,b``; a comma in brackets, as in Slurm's ``n[1,3]``, is a part of the name."""
    return [name for part in re.split(r",(?![^\[]*\])", text) if (name := part.strip())]


def parse_time(text: str) -> int:
    """Seconds of ``H:M:S``, ``M:S``, ``D-H:M``, ``D-H:M:S``, or of numbers with units, as in ``1h30m``.

    Raises:
        JobError: the text has another format, or the duration is zero.
    """
    match = (
        re.fullmatch(r"(?:(?:(?P<d>\d+)-)?(?P<h>\d+):)?(?P<m>\d+):(?P<s>[0-5]?\d)", text)
        or re.fullmatch(r"(?P<d>\d+)-(?P<h>\d+):(?P<m>\d+)", text)
        or re.fullmatch(
            r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?", text.lower().replace(" ", "")
        )
    )
    days, hours, minutes, seconds = (int(match.groupdict().get(unit) or 0) if match else 0 for unit in "dhms")
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if not total or (":" in text and minutes > 59 and match is not None and match["h"] is not None):
        unit = "has no unit: " if text.isdigit() else "is not valid: "
        raise JobError("time", f"{text!r} {unit}give H:M:S, as in 1:30:00, or units, as in 90m, 5h, 1h30m or 2d")
    return total
