"""Record of an ended attempt in the list of bad nodes and its ledger. Python 3.6."""

import os
import re
import socket
from contextlib import suppress
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

from ..attempt import Attempt, tell
from ..cause import text_since
from ..causes.output import find_cause
from ..ends import read_ends
from ..restarts import KILLED, LOST_PEER, UNKNOWN, UNSTARTED, read_object
from ..settings import JobSettings
from ..trust import OWN_FOLDER, TrustError, check_folder
from .entries import (
    FOLDER,
    GPU_HARDWARE,
    PREFLIGHT,
    SILENT,
    START,
    UNCLEAR,
    BadNode,
    is_node_name,
    now,
    one_line,
    write_entry,
)
from .innocence import blamed
from .ledger import FIRST, OK, SILENCE, Row, append_rows, read_rows

_UNCLEAR_CLASSES = (KILLED, LOST_PEER, UNKNOWN)
"""Classes of failures that a fault of the node may explain, and an error of the program as well."""
_ENDED_BY_LAUNCHER = 143
_SILENT_NODE = re.compile(r"node (\d+) \(.*\) has sent no heartbeat for ")
_XID_OF_PROGRAM = re.compile(r"NVRM: Xid \(.*?\): (?:13|31|43|45),")
"""Faults that a program causes, by NVIDIA's list of Xid errors."""
_OUTPUT = re.compile(r"(node|rank)-(\d+)\.log$")
_LEAST_SILENCES = 2


def note_end(job: JobSettings, attempt: Attempt, failure: Mapping[str, Any], lost: str = "") -> None:
    """Note the end of an attempt for its nodes; list the nodes that are certainly bad, or fail far too often.

    The head node alone does. A list that cannot be kept is one line of the job's log.

    Args:
        job: settings.
        attempt: the ended attempt.
        failure: values of exit.json on the failure; without a class if the attempt has not failed.
        lost: sentence on the first machine that fell silent; empty without one.
    """
    own = os.path.realpath(f"{job.run_dir}/{OWN_FOLDER}")
    if attempt.suffix or not os.path.isdir(own):
        return
    try:
        check_folder(own)
        folder = f"{own}/{FOLDER}"
        with suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        check_folder(folder)
        _note(job, attempt, failure, lost, folder)
    except (TrustError, OSError, ValueError) as error:
        tell(f"the list of bad nodes cannot be kept: {error}")


def _note(job: JobSettings, attempt: Attempt, failure: Mapping[str, Any], lost: str, folder: str) -> None:
    nodes = _Nodes(job, attempt)
    found = _named_nodes(attempt, failure, nodes)
    silent = _silent_node(lost, nodes)
    first = _first_to_fail(attempt, nodes) if failure.get("class") in _UNCLEAR_CLASSES and not silent else ""
    ends = {silent: SILENCE, first: FIRST}
    seen = [name for name in dict.fromkeys(nodes.names) if is_node_name(name)]
    append_rows(folder, [Row(name, job.run_id, attempt.number, ends.get(name, OK)) for name in seen])
    if silent or first:
        found = {**_by_history(job, silent, first, read_rows(folder)), **found}
    for name, (kind, cause) in found.items():
        write_entry(folder, BadNode(name, one_line(cause), kind, job.run_id, attempt.number, now()))
        tell(f"{name} is listed as a bad node: {one_line(cause)}")


def _named_nodes(attempt: Attempt, failure: Mapping[str, Any], nodes: "_Nodes") -> Dict[str, Tuple[str, str]]:
    """Nodes that this attempt's failure names with certainty, each with class and cause."""
    found: Dict[str, Tuple[str, str]] = {}
    unstarted = failure.get(UNSTARTED)
    if unstarted:
        listed = {nodes.name_of(host): (START, cause) for host, cause in unstarted.items()}
        return {name: told for name, told in listed.items() if is_node_name(name)}
    culprits = failure.get("culprits", [])
    reports = _reports(attempt)
    if culprits:
        findings = read_object(f"{attempt.folder}/preflight.json").get("findings", [])
        told = next((str(one.get("message", "")) for one in reports if one.get("culprits")), "")
        for host in culprits:
            own = (one for one in findings if isinstance(one, dict) and host in one.get("culprits", []))
            cause = next((str(one.get("sentence", "")) for one in own), "") or told.replace("preflight: ", "", 1)
            found[nodes.name_of(host)] = (PREFLIGHT, cause)
    elif failure.get("class") == "node":
        host, line = _gpu_hardware(attempt, failure, nodes, reports)
        found[host] = (GPU_HARDWARE, line)
    return {name: told for name, told in found.items() if is_node_name(name)}


def _gpu_hardware(
    attempt: Attempt, failure: Mapping[str, Any], nodes: "_Nodes", reports: List[Dict[str, Any]]
) -> Tuple[str, str]:
    """The one node whose rank or output tells of an uncorrectable fault of a GPU, and the words; empty without one."""
    own = [one for one in reports if one.get("consequence") is False]
    if own:
        words = f"{own[0].get('type', '')}: {own[0].get('message', '')}"
        cause = find_cause(words)
        is_fault = cause is not None and cause.kind == GPU_HARDWARE and not _XID_OF_PROGRAM.search(words)
        return (nodes.of_rank(own[0].get("rank")), own[0]["message"]) if is_fault else ("", "")
    output = failure.get("output", {})
    line = str(output.get("line", ""))
    if output.get("kind") != GPU_HARDWARE or not line or _XID_OF_PROGRAM.search(line):
        return "", ""
    hosts: Set[str] = set()
    for name in os.listdir(attempt.folder):
        match = _OUTPUT.match(name)
        if match is not None and line in text_since(f"{attempt.folder}/{name}", 0):
            number = int(match.group(2))
            hosts.add(nodes.of_rank(number) if match.group(1) == "rank" else nodes.at(number))
    return (hosts.pop(), line) if len(hosts) == 1 else ("", "")


def _silent_node(lost: str, nodes: "_Nodes") -> str:
    match = _SILENT_NODE.match(lost)
    return nodes.at(int(match.group(1))) if match is not None else ""


def _by_history(job: JobSettings, silent: str, first: str, rows: List[Row]) -> Dict[str, Tuple[str, str]]:
    """Nodes that the ledger speaks against after this attempt, each with class and cause."""
    found: Dict[str, Tuple[str, str]] = {}
    if first:
        for blame in blamed(rows):
            if blame.node == first:
                cause = (
                    f"first to fail in {blame.failures} of its {blame.runs} runs; "
                    f"other nodes in {100 * blame.rate:.2g} % of theirs"
                )
                found[first] = (UNCLEAR, cause)
    attempts = [row.attempt for row in rows if row.node == silent and row.run == job.run_id and row.end == SILENCE]
    if silent and len(attempts) >= _LEAST_SILENCES:
        found[silent] = (SILENT, f"fell silent in attempts {' and '.join(map(str, attempts[-_LEAST_SILENCES:]))}")
    return found


def _first_to_fail(attempt: Attempt, nodes: "_Nodes") -> str:
    """The node whose rank or part was the first to fail by itself; empty if none is known."""
    failures = [
        (float(one["time"]), nodes.of_rank(one.get("rank")))
        for one in _reports(attempt)
        if one.get("consequence") is False and isinstance(one.get("time"), (int, float))
    ]
    for part, end in read_ends(attempt.folder).items():
        if end.code not in (0, _ENDED_BY_LAUNCHER):
            failures.append((end.time, nodes.of_part(part)))
    return min(failures)[1] if failures else ""


def _reports(attempt: Attempt) -> List[Dict[str, Any]]:
    """Records of the failed ranks, the first one first."""
    names: List[str] = []
    with suppress(OSError):
        names = sorted(os.listdir(f"{attempt.folder}/errors"))
    found = [read_object(f"{attempt.folder}/errors/{name}") for name in names]
    return sorted((one for one in found if isinstance(one.get("time"), (int, float))), key=lambda one: one["time"])


class _Nodes:
    """Names of an attempt's nodes, as the scheduler or the profile has them.

    Attributes:
        names: in the order of the node numbers.
    """

    def __init__(self, job: JobSettings, attempt: Attempt) -> None:
        self._job = job
        self.names: List[str] = list(job.hosts)
        with suppress(OSError), open(f"{attempt.folder}/hostfile", errors="replace") as file:
            self.names = self.names or [line.split()[0] for line in file if line.strip()]
        here = socket.gethostname()
        self.names = [here if name.startswith("127.") else name for name in self.names]
        self._hosts: Dict[str, Set[str]] = {}
        for part, end in read_ends(attempt.folder).items():
            self._hosts.setdefault(end.host, set()).add(self.of_part(part))

    def at(self, number: int) -> str:
        """Name of the node of this number; empty for an unknown one."""
        return self.names[number] if 0 <= number < len(self.names) else ""

    def of_rank(self, rank: Optional[object]) -> str:
        """Name of the node of a rank."""
        return self.at(rank // self._job.ranks_per_node) if isinstance(rank, int) else ""

    def of_part(self, part: str) -> str:
        """Name of the node of a part, node-00002 or rank-00012."""
        number = int(part[-5:]) if part[-5:].isdigit() else -1
        return self.of_rank(number) if part.startswith("rank") else self.at(number)

    def name_of(self, host: str) -> str:
        """Name of the node with this host name; empty if several nodes have it."""
        short = [name for name in dict.fromkeys(self.names) if name.split(".")[0] == host.split(".")[0]]
        if host in self.names or len(short) == 1:
            return host if host in self.names else short[0]
        found = self._hosts.get(host, set())
        return host if not found else found.copy().pop() if len(found) == 1 else ""
