"""The views that the screen shows, and the protocol of their source: clusters, or a demonstration."""

from dataclasses import dataclass, field
from typing import Protocol

from llmctl.operate.report.gather import Attempt
from llmctl.runs.facts import Heartbeat
from llmctl.runs.log_selection import LogChoice
from llmctl.runs.logs import LogLine
from llmctl.runs.series.curves import RunCurves
from llmctl.runs.view import RunView

KEYS = ("lm_loss", "valid_loss", "tokens_per_s", "grad_norm", "peak_memory_bytes")
"""Keys of metrics.jsonl that the screen draws."""


@dataclass(frozen=True)
class Listing:
    """The runs to show.

    Attributes:
        runs: run id -> cluster, in the order of the table.
        hidden: number of runs that ended too long ago.
    """

    runs: dict[str, str]
    hidden: int = 0


@dataclass(frozen=True)
class ClusterLook:
    """The runs of one cluster, at one moment.

    Attributes:
        views: in any order.
        problem: one sentence if the cluster is out of reach; the views are then those last seen.
    """

    views: tuple[RunView, ...]
    problem: str = ""


@dataclass(frozen=True)
class RunPage:
    """One run, at one moment.

    Attributes:
        view: as in the table.
        now: time by the clock of the run's files.
        read: time at which the heartbeats were read.
        heartbeats: of the last attempt, in the order of ranks.
        attempts: all of them, in order.
        curves: of the whole run.
        newest: key of metrics.jsonl -> its newest number, where a point of a curve is a mean.
        lines: lines of the log that came since the last page.
        log: name of the log's source, such as ``rank 0``; empty if there is no log yet.
    """

    view: RunView
    now: float
    read: float
    heartbeats: tuple[Heartbeat, ...]
    attempts: tuple[Attempt, ...]
    curves: RunCurves
    newest: dict[str, float]
    lines: tuple[LogLine, ...] = field(default=())
    log: str = ""


class OpenedRun(Protocol):
    """One run whose page is read again and again, by one thread."""

    def read(self, choice: LogChoice | None) -> RunPage:
        """The page now. A choice of logs that differs from the last one starts the log again.

        Args:
            choice: logs to follow; None: those of ``llmctl logs``.

        Raises:
            LlmctlError: the run cannot be read.
        """


class RunSource(Protocol):
    """Runs of many clusters. Different clusters are read by different threads at the same time."""

    def list_runs(self, *, every: bool) -> Listing:
        """The runs to show; reads no cluster.

        Args:
            every: also runs that ended long ago.

        Raises:
            LlmctlError: the list cannot be read.
        """

    def look(self, cluster: str, run_ids: tuple[str, ...]) -> ClusterLook:
        """The views of runs of one cluster.

        Raises:
            LlmctlError: the runs cannot be read.
        """

    def open_run(self, run_id: str) -> OpenedRun:
        """A run of the list, for its page. Called by the thread that reads the page: it may wait for the cluster.

        Raises:
            LlmctlError: the run cannot be read.
        """


@dataclass(frozen=True)
class Watching:
    """The source of the screens, and how they read and show it.

    Attributes:
        encoding: of the terminal; without UTF-8, curves are of ASCII characters.
        interval_s: seconds between two looks.
        patience_s: seconds after which a screen says that a cluster does not answer.
    """

    source: RunSource
    encoding: str | None = "utf-8"
    interval_s: float = 2.0
    patience_s: float = 10.0
