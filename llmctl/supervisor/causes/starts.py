"""Nodes that could not start the program of an attempt while others did. Pure."""

import re
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

COULD_NOT_START = "could not start "
"""Begins the cause of such a node."""
NO_EXEC = (126, 127)
"""Exit codes of a shell for a program that cannot be executed, or is not there (POSIX, XCU 2.8.2)."""
_SRUN_ENDED = re.compile(r"^srun: error: .*: tasks? ([-0-9,]+): Exited with exit code (1|126|127)$", re.MULTILINE)
_PART_ENDED = re.compile(r"^llmctl: the part on (\S+) ended with exit code (1|126|127)$", re.MULTILINE)
_NO_PYTHON = re.compile(r"^llmctl: \S+ has no python3 of version 3\.6 or later", re.MULTILINE)
_NO_SCRIPT = re.compile(r"^\S*bash: (?:line \d+: )?(\S*job\.sh): (\S.*)$", re.MULTILINE)
_SHELL_SAYS = re.compile(r"^\S*job\.sh: (?:line \d+: )?(?:exec: )?(\S.*)$", re.MULTILINE)
_CANNOT = re.compile(r": cannot execute: ")
_LONGEST = 300
_NAMED = 4


class NodeStart(NamedTuple):
    """Facts on the start of the program on one node.

    Attributes:
        host: name of the node.
        has_begun: the supervisor has begun its part there.
        started: of the program, by the end of the part; None if unknown.
        code: exit code of the part; 0 without an end.
        time: of that end, in seconds since 1970.
        output: the last of the node's log.
    """

    host: str
    has_begun: bool = True
    started: Optional[bool] = None
    code: int = 0
    time: float = 0.0
    output: str = ""


class Unstarted(NamedTuple):
    """Nodes at fault -> ``could not start PROGRAM: why``, and a sentence on all of them; empty without one."""

    nodes: Mapping[str, str]
    sentence: str


NOBODY = Unstarted({}, "")


def is_shells_end(code: int, output: str) -> bool:
    """True if job.sh itself has said, as the last words of this output, that a program could not be started."""
    lines = [line for line in output.splitlines() if line.strip()]
    return code in NO_EXEC and bool(lines) and _SHELL_SAYS.match(lines[-1]) is not None


def find_unstarted(
    nodes: Sequence[NodeStart], log: str, parts: int = 1, first_error: Optional[float] = None
) -> Unstarted:
    """Find the nodes that could not start the program, if at least as many others are known to have started it.

    Args:
        nodes: all nodes of the attempt, the head first.
        log: text of the job's log of this attempt.
        parts: processes that the launcher starts on each node.
        first_error: time of the first error that a rank has told as its own; None without one.
    """
    if len({node.host for node in nodes}) != len(nodes):
        return NOBODY
    failed = [node for node in nodes if node.started is False and 0 < node.code < 128]
    if failed:
        if first_error is not None and first_error < min(node.time for node in failed):
            return NOBODY
        others = [node.host for node in nodes if node.started]
        return _unstarted({node.host: _program(node) for node in failed}, others, len(nodes))
    ended = _ended_before_begin(nodes, log, parts) if first_error is None else {}
    # The head's supervisor has read the log: it has begun, even if the launcher has not started its part yet.
    others = [node.host for node in nodes if node.has_begun or node is nodes[0]]
    return _unstarted(ended, [host for host in others if host not in ended], len(nodes))


def _unstarted(found: Dict[str, str], others: Sequence[str], count: int) -> Unstarted:
    if not found or len(found) > len(others):
        return NOBODY
    by_words: Dict[str, List[str]] = {}
    for host, words in found.items():
        by_words.setdefault(words, []).append(host)
    told = [f"{names_of(hosts)} {words}" for words, hosts in by_words.items()]
    who = "the other nodes" if len(others) + len(found) == count and len(others) > 1 else names_of(others)
    return Unstarted(found, "; ".join([*told, f"{who} started it"]))


def names_of(hosts: Sequence[str]) -> str:
    """The names of a few nodes, or the first ones of many and their number."""
    if len(hosts) > _NAMED:
        return f"{', '.join(hosts[:_NAMED])} and {len(hosts) - _NAMED} more nodes"
    return " and ".join([", ".join(hosts[:-1]), hosts[-1]] if len(hosts) > 1 else hosts)


def _program(node: NodeStart) -> str:
    """``could not start`` with the program and the shell's reason, as far as the node's output tells them."""
    said = [_CANNOT.sub(": ", line).strip() for line in _SHELL_SAYS.findall(node.output)]
    if not said:
        return f"{COULD_NOT_START}the program: exit code {node.code}"
    words = said[-1] if node.code in NO_EXEC else f"the program: {said[-1]}"
    return (COULD_NOT_START + words)[:_LONGEST]


def _ended_before_begin(nodes: Sequence[NodeStart], log: str, parts: int) -> Dict[str, str]:
    """Nodes whose part has ended before the supervisor began there, by the words of the launchers."""
    ended: List[Tuple[str, int]] = [(host, int(code)) for host, code in _PART_ENDED.findall(log)]
    for tasks, code in _SRUN_ENDED.findall(log):
        for task in _numbers(tasks):
            if task // parts < len(nodes):
                ended.append((nodes[task // parts].host, int(code)))
    silent = {node.host for node in nodes if not node.has_begun}
    script, has_no_python = _NO_SCRIPT.findall(log), _NO_PYTHON.search(log) is not None
    found: Dict[str, str] = {}
    for host, code in ended:
        if host not in silent or (code == 1 and not has_no_python):
            continue
        words = f"its part of the job: exit code {code}"
        if code == 1:
            words = "python3 of version 3.6 or later, which starts and watches the ranks: it has none"
        elif script:
            words = ": ".join(script[-1])
        found[host] = (COULD_NOT_START + words)[:_LONGEST]
    return found


def _numbers(text: str) -> List[int]:
    """Numbers of a list such as ``0-2,5``."""
    found: List[int] = []
    for one in text.split(","):
        first, _, last = one.partition("-")
        if first.isdigit():
            found += range(int(first), int(last if last.isdigit() else first) + 1)
    return found
