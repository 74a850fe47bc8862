"""Nodes that a job leaves out of its own accord: those of the user's list of bad nodes on the cluster."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llmctl.backends.base import NodeReport, QueueBackend
from llmctl.context import ClusterSession
from llmctl.durations import duration_text
from llmctl.errors import LlmctlError
from llmctl.runs.scheduler_query import run_with_retries
from llmctl.submit.job import Job
from llmctl.supervisor.bad_nodes.entries import BadNode, is_node_name

COUNTS_S = 14 * 86400.0
"""Age from which an entry no longer counts."""
SHARE = 10
"""At most one in so many nodes of the queue is left out, but always one."""
_MOST_REMARKS = 5
_UNUSABLE = ("draining", "drained", "down")
WORDS = {
    "preflight": "preflight",
    "gpu_hardware": "fault of a GPU",
    "silent": "lost",
    "unclear": "too many failures",
    "start": "start of the program",
}
"""Class of an entry -> words for it."""


@dataclass(frozen=True)
class QueueNodes:
    """Nodes that a job can get.

    Attributes:
        names: of the nodes of the job's queue that accept jobs.
        all_names: of all nodes of the cluster.
    """

    names: tuple[str, ...]
    all_names: frozenset[str]


@dataclass(frozen=True)
class Choice:
    """Listed nodes that a job leaves out, and sentences on those that it does not."""

    left_out: tuple[BadNode, ...] = ()
    remarks: tuple[str, ...] = ()


def without_listed(
    session: ClusterSession,
    job: Job,
    listed: Mapping[str, Any],
    warnings: list[str],
    *,
    dry_run: bool,
    moves: bool = True,
) -> Job:
    """The job without the nodes of the user's list. Only if the list has entries, the scheduler is asked for its nodes.

    Args:
        session: of the cluster.
        job: with every value decided.
        listed: the answer of ``read_bad_nodes``.
        warnings: gets a sentence on each listed node.
        dry_run: query no scheduler.
        moves: False for a run that must stay on its hosts.

    Raises:
        SchedulerError: the machine cannot be reached.
    """
    cluster, now = job.profile.name, session.transport.now()
    bad, remarks = entries_of(listed)
    bad = [one for one in bad if now - one.time <= COUNTS_S and one.node not in job.request.exclude]
    if not bad:
        warnings += shortened(remarks)
        return job
    if "exclude" not in job.backend.job_keys or not moves:
        why = "the run stays on its hosts" if not moves else f"{cluster} has no way to leave out nodes"
        warnings += shortened([*remarks, *(not_left_out(one, why, cluster, now) for one in bad)])
        return job
    nodes = QueueNodes(tuple(job.profile.hosts), frozenset(job.profile.hosts))
    if not job.profile.hosts:
        nodes = _nodes_of_queue(session, job) if not dry_run else QueueNodes((), frozenset())
    choice = choose(bad, job, nodes, now)
    warnings += [f"left out: {_listed(one, now)}; {readmit(cluster, one.node)}" for one in choice.left_out]
    warnings += shortened([*remarks, *choice.remarks])
    return _without(job, choice.left_out)


def choose(bad: Iterable[BadNode], job: Job, nodes: QueueNodes, now: float) -> Choice:
    """Choose the nodes to leave out, the newest failure first. Pure.

    Args:
        bad: entries that count.
        job: with every value decided.
        nodes: of the job's queue; empty if unknown.
        now: time on the cluster, in seconds since 1970.
    """
    request, cluster = job.request, job.profile.name
    free = [name for name in nodes.names if name not in request.exclude]
    most, needed = max(1, len(nodes.names) // SHARE), request.nodes + request.spare_nodes
    chosen: list[BadNode] = []
    remarks: list[str] = []
    for one in sorted(bad, key=lambda entry: (-entry.time, entry.node)):
        name = _known_name(one.node, nodes)
        if nodes.all_names and name in nodes.all_names and name not in nodes.names:
            continue  # of another queue, or it accepts no jobs anyway
        why = ""
        if nodes.all_names and not name:
            why = f"{cluster} has no such node"
        elif _is_asked_for(name or one.node, request.site_options):
            why = "the options of the profile ask for it"
        elif len(chosen) >= most:
            why = "at most one node in ten is, or one"
        elif nodes.names and len(free) - len(chosen) - 1 < needed:
            why = f"the job needs {needed} of the {len(free)} nodes that accept jobs"
        if why:
            remarks.append(not_left_out(one, why, cluster, now))
        else:
            chosen.append(one._replace(node=name or one.node))
    return Choice(tuple(chosen), tuple(remarks))


def entries_of(listed: Mapping[str, Any]) -> tuple[list[BadNode], list[str]]:
    """Entries of the user's list, and remarks on files that are not believed, of an answer of ``read_bad_nodes``."""
    entries = [BadNode(**values) for values in listed["entries"]]
    return [one for one in entries if is_node_name(one.node)], [*listed["remarks"]]


def readmit(cluster: str, node: str) -> str:
    """The command that takes a node off the list."""
    return f"llmctl nodes --cluster {cluster} --readmit {node}"


def not_left_out(bad: BadNode, why: str, cluster: str, now: float) -> str:
    """Sentence on a listed node that a job may get."""
    return f"not left out: {_listed(bad, now)}: {why}; {readmit(cluster, bad.node)}"


def shortened(remarks: Sequence[str]) -> list[str]:
    """The first remarks, and the number of the others."""
    more = len(remarks) - _MOST_REMARKS
    return [*remarks[:_MOST_REMARKS], *([f"and {more} more remarks on listed nodes"] if more > 0 else [])]


def _listed(bad: BadNode, now: float) -> str:
    return f"{bad.node} ({WORDS[bad.kind]}: {bad.cause}, {duration_text(now - bad.time)} ago)"


def _without(job: Job, left_out: tuple[BadNode, ...]) -> Job:
    if not left_out:
        return job
    request = replace(job.request, exclude=(*job.request.exclude, *(one.node for one in left_out)))
    if request.hosts:
        hosts = [host for host in job.profile.hosts if host not in request.exclude]
        request = replace(request, hosts=tuple(hosts[: request.nodes]))
    return replace(job, request=request, left_out=left_out)


def _known_name(node: str, nodes: QueueNodes) -> str:
    """The scheduler's name of a node, which may be listed by its full host name; empty for an unknown node."""
    if node in nodes.all_names:
        return node
    same = [name for name in sorted(nodes.all_names) if name.split(".")[0] == node.split(".")[0]]
    return same[0] if len(same) == 1 and is_node_name(same[0]) else ""


def _is_asked_for(node: str, options: Iterable[str]) -> bool:
    """True if an option of the profile names the node, other than to leave it out."""
    plain = [option for option in options if "exclude" not in option and "!" not in option and option[:2] != "-x"]
    separators = str.maketrans(dict.fromkeys("=,:|@()", " "))
    return any(node in option.translate(separators).split() for option in plain)


def _nodes_of_queue(session: ClusterSession, job: Job) -> QueueNodes:
    """The nodes of the job's queue, by one query; empty if the scheduler does not answer."""
    backend: QueueBackend | None = job.queue
    found: list[NodeReport] = []
    if backend is not None:
        try:
            answers = [run_with_retries(backend, argv, session.transport) for argv in backend.nodes_argv()]
            found = backend.parse_nodes([answer.stdout for answer in answers])
        except LlmctlError:
            found = []  # the submission itself meets the problem
    queue = job.request.queue
    usable = [one for one in found if one.state not in _UNUSABLE and (not queue or queue in one.queues)]
    return QueueNodes(tuple(one.name for one in usable), frozenset(one.name for one in found))
