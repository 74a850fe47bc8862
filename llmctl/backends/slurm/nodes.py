"""Parser of ``scontrol --details --oneliner show nodes``, the only text with untruncated reasons.

Sources: scontrol(1), "NODE STATE CODES" of sinfo(1). ``sinfo -R`` cuts a reason off after 20 characters.
"""

import re
from collections.abc import Mapping, Sequence

from llmctl.backends.base import NodeReport, NodeState

_BASES: Mapping[str, NodeState] = {
    "IDLE": "idle",
    "ALLOCATED": "allocated",
    "ALLOC": "allocated",
    "COMPLETING": "allocated",
    "COMP": "allocated",
    "BLOCKED": "allocated",
    "MIXED": "mixed",
    "MIX": "mixed",
    "RESERVED": "allocated",
    "RESV": "allocated",
    "DOWN": "down",
    "ERROR": "down",
    "INVAL": "down",
    "FAIL": "down",
    "FUTURE": "down",
    "DRAINED": "drained",
    "DRAINING": "draining",
    "DRNG": "draining",
    "FAILING": "draining",
}
_IN_USE = ("allocated", "mixed")
_IDLE_BUT: Sequence[tuple[str, str, NodeState]] = (
    # Nodes that do not answer, power down or are about to reboot get no jobs.
    ("*%!@^", "NOT_RESPONDING REBOOT_ISSUED REBOOT_REQUESTED POWER_DOWN POWERING_DOWN INVALID_REG FAIL", "down"),
    ("$", "MAINT MAINTENANCE", "drained"),
    # Reserved, or powering up for a job.
    ("#", "COMPLETING RESERVED POWERING_UP BLOCKED", "allocated"),
)
"""True state of an idle node with one of these suffixes or flags; the first match counts."""
_SUFFIXES = "*~#!%$@^-+"
"""Suffixes of sinfo's states: * no answer, ~ # ! % powered down or changing, $ maintenance, @ ^ reboot, - planned."""


def parse_nodes(output: str) -> list[NodeReport]:
    """Nodes in the output; other lines are skipped."""
    return [_parse_node(line) for line in output.splitlines() if line.startswith("NodeName=")]


def node_state(raw: str) -> NodeState:
    """Neutral state for ``MIXED+DRAIN``, ``down*``, ``IDLE+CLOUD+POWERED_DOWN``, ``drng``."""
    base, *flags = raw.upper().split("+")
    word = _BASES.get(base.rstrip(_SUFFIXES), "unknown")
    if word == "down" or "DOWN" in flags:
        return "down"
    if "DRAIN" in flags or base.rstrip(_SUFFIXES) == "DRAIN":
        return "draining" if word in _IN_USE or "COMPLETING" in flags else "drained"
    if word != "idle":
        return word
    suffixes = base[len(base.rstrip(_SUFFIXES)) :]
    found = (
        state for marks, names, state in _IDLE_BUT if set(marks) & set(suffixes) or set(names.split()) & set(flags)
    )
    return next(found, word)


def _parse_node(line: str) -> NodeReport:
    raw = _word(line, "State")
    memory_mib = _word(line, "RealMemory")
    gpus = _gpus(_word(line, "Gres"))
    used = _word(line, "GresUsed")
    return NodeReport(
        name=_word(line, "NodeName"),
        state=node_state(raw),
        raw=raw,
        reason=_reason(line),
        gpus=gpus,
        gpus_used=_gpus(used) if used else None,
        cores=_number(_word(line, "CPUTot")),
        cores_used=_number(_word(line, "CPUAlloc")),
        memory_gib=round(int(memory_mib) / 1024, 1) if memory_mib.isdecimal() else None,
        queues=tuple(part for part in _word(line, "Partitions").split(",") if part),
    )


def _word(line: str, key: str) -> str:
    # The reason is free text and may look like a key, so only the text before it is searched.
    match = re.search(rf"(?:^| ){key}=(\S*)", line.partition(" Reason=")[0])
    return match[1] if match else ""


def _reason(line: str) -> str:
    text = line.partition(" Reason=")[2]
    # The reason ends with its author and time; other keys may follow.
    match = re.match(r"(.*?) \[([^\[\]@ ]+)@([0-9T:-]+|Unknown)\]", text)
    return f"{match[1]} ({match[2]}, {match[3]})" if match else text.strip()


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _gpus(gres: str) -> int:
    """GPUs of ``gpu:a100:4(S:0-1),shard:8``, ``gpu:2(IDX:0-1)``; 0 without any."""
    # Parentheses may hold commas.
    entries = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [re.fullmatch(r"gpu(?::[^:]+)?:(\d+)", entry) for entry in entries]
    return sum(int(match[1]) for match in counts if match)
