"""Nodes that a failed attempt has shown to be its cause: pure, but for the readers of the attempt's files."""

import os
from contextlib import suppress
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from ..cause import failed_parts
from ..causes.starts import names_of
from ..each_host import host_names
from ..ends import part_name, read_ends
from ..restarts import LOST_PEER, NEVER, ROLL_BACK, Failure, culprits_of, read_object
from ..settings import JobSettings

LEAVES_OUT, FIRST_NODE, LEFT_OUT, SHORTAGE = "leaves_out", "first_node", "left_out", "shortage"
"""Keys of exit.json (nodes at fault with the cause; node of the first cause) and of started.json (nodes that the
attempt does without, with the cause; the reason why too few nodes are left)."""
_SIGTERM = 15
_LONGEST = 400


class FailureFacts(NamedTuple):
    """Facts on the nodes of a failed attempt.

    Attributes:
        hosts: of the attempt, the head first.
        culprits: nodes that the first error names.
        hanging: nodes of the ranks for which all others waited.
        failed: node of the first rank with an error of its own, or of the first part that a signal ended; or empty.
        quiet: nodes none of whose ranks has recorded an error, while the ranks of others have.
        unended: nodes whose part has begun and has not recorded its end.
        before: node of the first cause of the attempt before in this job; empty without one.
    """

    hosts: Tuple[str, ...]
    culprits: Tuple[str, ...] = ()
    hanging: Tuple[str, ...] = ()
    failed: str = ""
    quiet: Tuple[str, ...] = ()
    unended: Tuple[str, ...] = ()
    before: str = ""


def first_node(facts: FailureFacts) -> str:
    """The node on which the failure began; empty if the facts name none or several."""
    for nodes in (facts.culprits, facts.hanging, (facts.failed,) if facts.failed else (), facts.quiet):
        if nodes:
            return known_as(nodes[0], facts.hosts) if len(nodes) == 1 else ""
    return ""


def nodes_at_fault(facts: FailureFacts, kind: str, cause: str) -> Dict[str, str]:
    """Nodes that the next attempt leaves out -> the cause in words. The head, which runs the supervisor, is none.

    Args:
        facts: on the nodes.
        kind: class of the failure.
        cause: sentence on the failure; may be empty.
    """
    found: Dict[str, str] = {}
    if facts.culprits:
        found = dict.fromkeys(facts.culprits, cause[:_LONGEST] or "unfit")
    elif len(facts.unended) == 1 and len(facts.hosts) > 1 and not facts.failed and not facts.hanging:
        # After an error or a hang the supervisor itself may have killed a part before its end was recorded.
        found = {facts.unended[0]: "its part of the run was lost without an end"}
    elif kind not in NEVER and kind != ROLL_BACK:
        first = first_node(facts)
        if first and first == facts.before:
            words = f", the last one: {cause[:_LONGEST]}" if cause else ""
            found = {first: f"two failures in a row began there{words}"}
    named = ((known_as(node, facts.hosts), why) for node, why in found.items())
    return {node: why for node, why in named if node in facts.hosts[1:]}


def known_as(node: str, hosts: Sequence[str]) -> str:
    """The scheduler's name of a node: the machine itself may say its name with or without the domain."""
    same = [host for host in hosts if host.split(".")[0] == node.split(".")[0]]
    return node if node in hosts or len(same) != 1 else same[0]


def fault_values(
    job: JobSettings, folder: str, failure: Failure, kind: str, cause: str, hanging: Sequence[int]
) -> Dict[str, object]:
    """Values of exit.json on the nodes at fault, of a failed attempt in this folder.

    Args:
        job: settings, with spare nodes.
        folder: of the attempt.
        failure: facts on it.
        kind: its class.
        cause: sentence on it.
        hanging: ranks for which all others waited.
    """
    hosts: List[str] = []
    with suppress(OSError):
        hosts = host_names(f"{folder}/hostfile")
    if len(hosts) != job.nodes:
        return {}
    earlier = read_earlier(job, int(os.path.basename(folder)))
    before = earlier.get(FIRST_NODE)
    facts = FailureFacts(
        tuple(hosts),
        culprits=tuple(culprits_of(failure).get("culprits", ())),
        hanging=tuple(dict.fromkeys(hosts[rank // job.ranks_per_node] for rank in hanging)),
        failed=_first_failed(job, folder, failure, hosts),
        quiet=_quiet(job, failure, hosts) if kind in (LOST_PEER, "killed") else (),
        unended=_unended(job, folder, hosts),
        before=before if isinstance(before, str) else "",
    )
    own = min((rank for rank in failure.ranks if not rank.consequence), key=lambda rank: rank.time, default=None)
    words = cause or (own.message if own is not None else "")
    leaves_out = nodes_at_fault(facts, kind, words)
    leaves_out.update((node, why) for node, why in failure.unstarted.items() if node in leaves_out)
    return {FIRST_NODE: first_node(facts), LEAVES_OUT: leaves_out}


def unstarted_again(job: JobSettings, folder: str, unstarted: Mapping[str, str]) -> str:
    """The reason why a new attempt would meet nodes that cannot start the program; empty if spare nodes replace them.

    Args:
        job: settings.
        folder: of the failed attempt.
        unstarted: its nodes that could not start the program, with the cause.
    """
    if not unstarted:
        return ""
    hosts: List[str] = []
    with suppress(OSError):
        hosts = host_names(f"{folder}/hostfile")
    if hosts and hosts[0] in unstarted and job.spare_nodes:
        return f"{hosts[0]} could not start the program, and the first node of a job always takes part"
    gone = read_object(f"{folder}/started.json").get(LEFT_OUT)
    left = max(0, job.spare_nodes - (len(gone) if isinstance(gone, dict) else 0))
    if left >= len(unstarted):
        return ""
    spare = "too few spare nodes are left" if job.spare_nodes else "the job has no spare node"
    return f"{names_of(list(unstarted))} would fail to start the program again, and {spare}"


def read_earlier(job: JobSettings, attempt: int) -> Dict[str, object]:
    """exit.json and the left-out nodes of the attempt before, if the same job has made it; else empty."""
    started, before = (read_object(f"{job.attempt_dir(number)}/started.json") for number in (attempt, attempt - 1))
    if attempt < 2 or not before or before.get("job_id") != started.get("job_id"):
        return {}
    values = read_object(f"{job.attempt_dir(attempt - 1)}/exit.json")
    return {**values, LEFT_OUT: before.get(LEFT_OUT)}


def _first_failed(job: JobSettings, folder: str, failure: Failure, hosts: Sequence[str]) -> str:
    own = min((rank for rank in failure.ranks if not rank.consequence), key=lambda rank: rank.time, default=None)
    if own is not None:
        node = own.rank // job.ranks_per_node
        return hosts[node] if 0 <= node < len(hosts) else ""
    for part, end in failed_parts(folder):
        if end.signal not in (0, _SIGTERM):
            node = int(part[-5:]) // (job.ranks_per_node if job.one_process_per_rank else 1)
            return hosts[node] if node < len(hosts) else ""
    return ""


def _quiet(job: JobSettings, failure: Failure, hosts: Sequence[str]) -> Tuple[str, ...]:
    recorded = {rank.rank // job.ranks_per_node for rank in failure.ranks}
    return tuple(host for node, host in enumerate(hosts) if node not in recorded) if recorded else ()


def _unended(job: JobSettings, folder: str, hosts: Sequence[str]) -> Tuple[str, ...]:
    parts = job.ranks_per_node if job.one_process_per_rank else 1
    ends = read_ends(folder)
    found = []
    for node, host in enumerate(hosts):
        own = [part_name(job, node * parts + part) for part in range(parts)]
        if os.path.exists(f"{folder}/node-{node:05d}.log") and not any(name in ends for name in own):
            found.append(host)
    return tuple(found) if len(found) < len(hosts) else ()
