"""Slurm's nodes, from one line each of ``scontrol --details --oneliner show nodes``: the only text with whole reasons.

Sources: scontrol(1), "NODE STATE CODES" of sinfo(1). ``sinfo -R`` cuts a reason off after 20 characters.
"""

import re

from llmctl.backends.base import NodeReport

_BASES = {
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
_IDLE_BUT = (
    # A node that does not answer, is being switched off or is about to start again gets no job.
    ("*%!@^", "NOT_RESPONDING REBOOT_ISSUED REBOOT_REQUESTED POWER_DOWN POWERING_DOWN INVALID_REG FAIL", "down"),
    ("$", "MAINT MAINTENANCE", "drained"),
    # Kept for those who have the reservation, or being switched on for a job.
    ("#", "COMPLETING RESERVED POWERING_UP BLOCKED", "allocated"),
)
"""What an idle node with one of these suffixes or flags truly is: the first that fits."""
_SUFFIXES = "*~#!%$@^-+"
"""What sinfo puts behind a state: * no answer, ~ # ! % off or being switched, $ maintenance, @ ^ reboot, - planned."""


def parse_nodes(output: str) -> list[NodeReport]:
    """The nodes in the output; lines that name none are passed over."""
    return [_parse_node(line) for line in output.splitlines() if line.startswith("NodeName=")]


def node_state(raw: str) -> str:
    """The neutral word for a state: ``MIXED+DRAIN``, ``down*``, ``IDLE+CLOUD+POWERED_DOWN``, ``drng``."""
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
    # The reason is anybody's text and may look like a key: what stands before it counts.
    match = re.search(rf"(?:^| ){key}=(\S*)", line.partition(" Reason=")[0])
    return match[1] if match else ""


def _reason(line: str) -> str:
    text = line.partition(" Reason=")[2]
    # Who set it and when ends it; other keys may follow.
    match = re.match(r"(.*?) \[([^\[\]@ ]+)@([0-9T:-]+|Unknown)\]", text)
    return f"{match[1]} ({match[2]}, {match[3]})" if match else text.strip()


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _gpus(gres: str) -> int:
    """GPUs of ``gpu:a100:4(S:0-1),shard:8``, ``gpu:2(IDX:0-1)``; 0 where none are named."""
    # Commas also stand in parentheses.
    entries = re.sub(r"\([^)]*\)", "", gres).split(",")
    counts = [re.fullmatch(r"gpu(?::[^:]+)?:(\d+)", entry) for entry in entries]
    return sum(int(match[1]) for match in counts if match)
