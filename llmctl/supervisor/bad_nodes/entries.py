"""Entries of the list of bad nodes: one small JSON file per node in the user's own folder. Python 3.6.

The supervisor writes the entries. llmctl reads them on the cluster, also at the far end of a connection.
"""

import json
import os
import re
import time
from contextlib import suppress
from typing import Any, Dict, List, NamedTuple, Tuple

from ..trust import TrustError, check_file, check_folder, check_root

FOLDER = "nodes"
"""Folder of the entries, in the user's own folder beside the runs."""
PREFLIGHT, GPU_HARDWARE, SILENT, UNCLEAR, START = "preflight", "gpu_hardware", "silent", "unclear", "start"
CLASSES = (PREFLIGHT, GPU_HARDWARE, SILENT, UNCLEAR, START)
_NODE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:-]{0,252}")
"""A name of one node, without the brackets and commas of a list. A name of a file and a word of a directive too."""
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SUFFIX = ".json"
_MOST_ENTRIES = 1000
_MOST_BYTES = 16384
_LONGEST = 300
"""Characters of a cause."""
_LATEST = 1e11


class BadNode(NamedTuple):
    """One entry of the list.

    Attributes:
        node: name of the node, as the scheduler or the profile has it.
        cause: sentence, on one line.
        kind: one of CLASSES; ``class`` in the file.
        run: run id of the newest failure.
        attempt: number of its attempt.
        time: of that failure, in seconds since 1970.
        failures: number of failures since the node was listed.
    """

    node: str
    cause: str
    kind: str
    run: str
    attempt: int
    time: float
    failures: int = 1


def is_node_name(text: str) -> bool:
    """True for the name of one node that can be listed."""
    return _NODE.fullmatch(text) is not None


def entry_file(folder: str, node: str) -> str:
    """Path of a node's entry."""
    return f"{folder}/{node}{_SUFFIX}"


def write_entry(folder: str, bad: BadNode) -> None:
    """Write a node's entry in place of an earlier one, whose failures are added. Readers never see half of a file.

    Raises:
        OSError: the file cannot be written.
    """
    path = entry_file(folder, bad.node)
    with suppress(TrustError, OSError, ValueError):
        bad = bad._replace(failures=_read_entry(path, bad.node).failures + 1)
    values = dict(bad._asdict())
    values["class"] = values.pop("kind")
    aside = f"{folder}/.{bad.node}.{os.getpid()}.{os.urandom(4).hex()}"
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(json.dumps(values) + "\n")
        os.replace(aside, path)
    except OSError:
        with suppress(OSError):
            os.unlink(aside)
        raise


def read_entries(runs_root: str) -> Dict[str, Any]:
    """The list of this user beside the runs: ``folder``, ``entries`` as plain values, and ``remarks``.

    A file that another user has made or may change, a link, and a damaged or large file are never believed: a remark
    names each.

    Args:
        runs_root: folder of the runs, on this machine.
    """
    own = f"{runs_root}/.llmctl-{os.geteuid()}"
    folder = f"{own}/{FOLDER}"
    entries: List[Dict[str, Any]] = []
    remarks: List[str] = []
    names: List[str] = []
    try:
        if os.path.lexists(folder):
            check_root(runs_root)
            check_folder(own)
            check_folder(folder)
            names = sorted(name for name in os.listdir(folder) if name.endswith(_SUFFIX) and name[0] != ".")
    except (TrustError, OSError) as error:
        remarks.append(_remark(folder, error))
    if len(names) > _MOST_ENTRIES:
        remarks.append(f"{folder}: only {_MOST_ENTRIES} of {len(names)} entries are read")
    for name in names[:_MOST_ENTRIES]:
        try:
            entries.append(dict(_read_entry(f"{folder}/{name}", name[: -len(_SUFFIX)])._asdict()))
        except (TrustError, OSError, ValueError) as error:
            remarks.append(_remark(f"{folder}/{name}", error))
    return {"folder": folder, "entries": entries, "remarks": remarks}


def open_own(path: str, limit: int) -> bytes:
    """Content of a plain file of this user alone, no link; from its end if it is longer than the limit.

    Raises:
        TrustError: another user has made the file or may change it, or the path is a link.
        OSError: the file cannot be read.
    """
    check_file(path)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit)


def one_line(text: str) -> str:
    """The text on one line, without control characters, cut at a length that fits a message."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:_LONGEST]


def _read_entry(path: str, node: str) -> BadNode:
    data = open_own(path, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES} bytes")
    try:
        values = json.loads(data.decode())
        words = tuple(values[key] for key in ("node", "cause", "class", "run"))
        numbers = tuple(values[key] for key in ("attempt", "time", "failures"))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("it is not an entry of this list") from None
    if not is_node_name(node) or words[0] != node:
        raise ValueError("it does not name the node of its file")
    _check_values(words, numbers)
    return BadNode(node, one_line(words[1]), words[2], words[3], numbers[0], float(numbers[1]), numbers[2])


def _check_values(words: Tuple[Any, ...], numbers: Tuple[Any, ...]) -> None:
    is_whole = type(numbers[0]) is int and type(numbers[2]) is int and type(numbers[1]) in (int, float)
    is_text = all(isinstance(word, str) for word in words)
    if not is_whole or not is_text or words[2] not in CLASSES or not _RUN.fullmatch(words[3]):
        raise ValueError("it is not an entry of this list")
    if not 0 <= numbers[1] < _LATEST or not all(0 < numbers[place] < _LATEST for place in (0, 2)):
        raise ValueError("it is not an entry of this list")


def _remark(path: str, error: Exception) -> str:
    shown = one_line(path.encode(errors="replace").decode(errors="replace"))
    why = getattr(error, "strerror", None) or str(error)
    return f"{shown} is left out of account: {one_line(why.encode(errors='replace').decode())}"


def now() -> float:
    """Time of an entry, to the second."""
    return float(int(time.time()))
