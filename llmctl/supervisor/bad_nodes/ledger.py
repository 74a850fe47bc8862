"""Ledger of the attempts of a user's nodes on a cluster: one line per attempt and node. Python 3.6."""

import json
import os
from contextlib import suppress
from typing import Dict, List, NamedTuple, Sequence

from ..trust import TrustError, check_file
from .entries import is_node_name, open_own

OK, FIRST, SILENCE = "ok", "first", "silent"
"""Ends of an attempt on a node: no failure of the node; a failure of unclear cause whose first ranks were the node's;
the machine has fallen silent."""
_NAMES = ("ledger.1.jsonl", "ledger.jsonl")
"""The older file first. A full file takes the place of the older one."""
_MOST_BYTES = 1 << 22


class Row(NamedTuple):
    """End of one attempt on one node."""

    node: str
    run: str
    attempt: int
    end: str


def append_rows(folder: str, rows: Sequence[Row]) -> None:
    """Append rows, all in one write, so that those of two jobs do not mix.

    Raises:
        TrustError: another user has made the file.
        OSError: the file cannot be written.
    """
    path = f"{folder}/{_NAMES[1]}"
    if os.path.lexists(path):
        check_file(path)
        if os.stat(path).st_size >= _MOST_BYTES:
            os.replace(path, f"{folder}/{_NAMES[0]}")
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, "".join(json.dumps(row._asdict()) + "\n" for row in rows).encode())
    finally:
        os.close(descriptor)


def read_rows(folder: str) -> List[Row]:
    """All rows, the oldest first, the last one of an attempt and node; damaged lines are skipped."""
    found: Dict[object, Row] = {}
    for name in _NAMES:
        data = b""
        with suppress(TrustError, OSError):
            data = open_own(f"{folder}/{name}", 2 * _MOST_BYTES)
        for line in data.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                values = json.loads(line.decode())
                row = Row(str(values["node"]), str(values["run"]), int(values["attempt"]), str(values["end"]))
                if is_node_name(row.node) and row.end in (OK, FIRST, SILENCE):
                    found[row[:3]] = row
    return list(found.values())
