"""States of a cluster's nodes: one query, grouped for display."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from llmctl.backends.base import NodeReport, NodeState, QueueBackend
from llmctl.context import ClusterSession
from llmctl.errors import ProgramMissing, SchedulerError
from llmctl.runs.scheduler_query import last_line, run_with_retries
from llmctl.transport.host_group import HostGroup
from llmctl.transport.protocol import Transport, program_of

STATES: tuple[NodeState, ...] = get_args(NodeState)
_TOLD = ("draining", "drained", "down", "unknown")
_TIMEOUT_S = 30.0
_MACHINE = (
    "cat",
    *("/proc/sys/kernel/hostname", "/sys/devices/system/cpu/online", "/proc/loadavg", "/proc/meminfo"),
)
_GPUS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
_GPU_PROCESSES = ("nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader")
"""nvidia-smi(1): ids of the GPUs, and ids of the GPUs with compute processes."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes with the same queues, kind, state and reason.

    Attributes:
        nodes: at least one.
        names: the nodes' names, folded.
    """

    nodes: tuple[NodeReport, ...]
    names: str


@dataclass(frozen=True)
class QueueSummary:
    """Counts of one queue. None: the scheduler does not report this number.

    Attributes:
        queue: its name; empty where there are no queues.
        nodes: number of nodes.
        states: state -> number of nodes, in the order of STATES.
        gpus: number of GPUs.
        gpus_used: GPUs allocated to jobs.
        gpus_idle: GPUs available at once: unused, on nodes that accept jobs.
    """

    queue: str
    nodes: int
    states: dict[NodeState, int]
    gpus: int | None
    gpus_used: int | None
    gpus_idle: int | None


def read_nodes(session: ClusterSession) -> list[NodeReport]:
    """The nodes of a cluster, in order of name.

    Raises:
        SchedulerError: the scheduler does not answer, or no machine can be reached.
    """
    if session.backend is not None:
        found = _ask(session.backend, session.transport)
    elif isinstance(session.transport, HostGroup):
        found = _read_hosts(session.transport)
    else:
        found = [read_machine(session.transport)]
    return sorted(found, key=lambda node: _sort_key(node.name))


def read_machine(transport: Transport) -> NodeReport:
    """One machine without a scheduler: its resources, and their present use."""
    # By a command: these files have no size and cannot be read from their end.
    host, online, load, *memory = [*_lines(transport, _MACHINE), "", "", ""]
    cores = _count_span(online)
    busy = float(load.split()[0]) if re.match(r"\d+\.\d+ ", load) else 0.0
    total = re.search(r"^MemTotal:\s+(\d+) kB", "\n".join(memory), re.MULTILINE)
    gpus = _lines(transport, _GPUS)
    used = len(set(_lines(transport, _GPU_PROCESSES)) & set(gpus))
    share = used / len(gpus) if gpus else busy / cores if cores else 0.0
    return NodeReport(
        name=host or transport.host,
        state="idle" if share < 0.05 else "allocated" if share > 0.95 else "mixed",
        raw=f"load {busy:g}",
        gpus=len(gpus),
        gpus_used=used,
        cores=cores or None,
        cores_used=min(cores, round(busy)) if cores else None,
        memory_gib=round(int(total[1]) / 2**20, 1) if total else None,
    )


def group_nodes(nodes: Sequence[NodeReport]) -> list[NodeGroup]:
    """Group similar nodes, available ones first."""
    groups: dict[tuple[object, ...], list[NodeReport]] = {}
    for node in nodes:
        # Only nodes that accept no jobs show a reason; elsewhere reasons would split the groups.
        reason = (node.reason, node.raw) if node.state in _TOLD else ()
        groups.setdefault((node.queues, node.gpus, node.cores, node.memory_gib, node.state, reason), []).append(node)
    ordered = sorted(groups.values(), key=lambda group: (group[0].queues, _rank(group[0]), _sort_key(group[0].name)))
    return [NodeGroup(tuple(group), fold_names(node.name for node in group)) for group in ordered]


def summarize(nodes: Sequence[NodeReport]) -> list[QueueSummary]:
    """Counts per queue; a node of several queues counts in each."""
    queues = sorted({queue for node in nodes for queue in node.queues}) or [""]
    return [_summary(queue, [node for node in nodes if not queue or queue in node.queues]) for queue in queues]


def fold_names(names: Iterable[str]) -> str:
    """``n[1-4,7], login`` for n1 n2 n3 n4 n7 login: fold names that differ only in their last number."""
    groups: dict[tuple[str, str, int], list[int]] = {}
    for name in sorted(names, key=_sort_key):
        match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
        prefix, digits, suffix = match.groups() if match else (name, "", "")
        # Only numbers with leading zeros have a fixed width.
        width = len(digits) if digits.startswith("0") and len(digits) > 1 else 0
        known = groups.setdefault((prefix, suffix, width), [])
        known += [int(digits)] if digits else []
    return ", ".join(_fold(prefix, numbers, suffix, width) for (prefix, suffix, width), numbers in groups.items())


def _ask(backend: QueueBackend, transport: Transport) -> list[NodeReport]:
    outputs = []
    for argv in backend.nodes_argv():
        result = run_with_retries(backend, argv, transport)
        if result.exit_status != 0:
            advice = backend.advice(result.stderr)
            raise SchedulerError(
                f"{program_of(argv)}: {last_line(result)}" + (f"; {advice}" if advice else ""),
                transient=backend.is_transient(result.exit_status, result.stderr),
                argv=argv,
                exit_status=result.exit_status,
                stderr_tail=result.stderr,
            )
        outputs.append(result.stdout)
    return backend.parse_nodes(outputs)


def _read_hosts(hosts: HostGroup) -> list[NodeReport]:
    """Query every host of a group concurrently; an unreachable host is down."""
    problems = []

    def read(host: str, transport: Transport) -> NodeReport:
        try:
            return replace(read_machine(transport), name=host)
        except SchedulerError as error:
            problems.append(error)
            return NodeReport(host, "down", "unreachable", reason="; ".join(error.message.splitlines()))

    found = hosts.on_each(hosts.hosts, read)
    if problems and len(problems) == len(found):
        raise problems[0]
    return list(found.values())


def _lines(transport: Transport, argv: Sequence[str]) -> list[str]:
    try:
        result = transport.run(argv, timeout_s=_TIMEOUT_S)
    except ProgramMissing:
        return []  # without nvidia-smi there is no such GPU
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.exit_status == 0 else []


def _count_span(text: str) -> int:
    """Count the numbers in ``0-3,8``."""
    spans = re.findall(r"(\d+)(?:-(\d+))?", text)
    return sum(int(last or first) - int(first) + 1 for first, last in spans)


def _summary(queue: str, nodes: Sequence[NodeReport]) -> QueueSummary:
    states = {state: sum(node.state == state for node in nodes) for state in STATES}
    takers = [node for node in nodes if node.state in ("idle", "mixed")]
    free = [node.gpus - node.gpus_used for node in takers if node.gpus is not None and node.gpus_used is not None]
    return QueueSummary(
        queue=queue,
        nodes=len(nodes),
        states={state: count for state, count in states.items() if count},
        gpus=_sum(node.gpus for node in nodes),
        gpus_used=_sum(node.gpus_used for node in nodes),
        gpus_idle=sum(free) if len(free) == len(takers) else None,
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _rank(node: NodeReport) -> int:
    return STATES.index(node.state)


def _sort_key(name: str) -> tuple[tuple[str, int], ...]:
    return tuple((text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name))


def _fold(prefix: str, numbers: Sequence[int], suffix: str, width: int) -> str:
    if len(numbers) < 2:
        return prefix + "".join(f"{number:0{width}d}" for number in numbers) + suffix
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    words = [f"{span[0]:0{width}d}" + (f"-{span[-1]:0{width}d}" if len(span) > 1 else "") for span in spans]
    return f"{prefix}[{','.join(words)}]{suffix}"
