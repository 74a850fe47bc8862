"""Cause of death of a program, from the last lines of its output. Pure.

A rule names the message of one program or library. Of several messages in one output, three things decide, in this
order: words of the system on how it ended the program; messages that stand in the lines of the death, not in lines
after which the program went on; and the most special rule, of the rank that met it first, since peers that lose a rank
fail next.
"""

import re
from typing import Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .messages import HINT, MESSAGES, PLAIN, SYSTEM

SEARCHED_LINES = 4000
"""Last lines of an output that are searched: the report of a node with 8 ranks has some 100."""
LONGEST_LINE = 2000
"""Characters of a line that are searched, and of a cause."""
_WENT_ON = 12
"""A program that prints so many lines of its own between two errors has survived the first."""
_WENT_ON_AT_END = 60
"""The same after the last error: some programs print a summary as they end."""


class LogCause(NamedTuple):
    """A cause of death.

    Attributes:
        kind: of KINDS.
        line: of the output, without the names of ranks and times before it.
        order: the lower, the more the line tells.
    """

    kind: str
    line: str
    order: Tuple[int, bool] = (SYSTEM, False)

    @property
    def is_of_system(self) -> bool:
        """True for the word of the scheduler or the kernel on how it ended the program."""
        return self.order[0] == SYSTEM


_EXCEPTION = re.compile(
    r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout)\b(?:: |:?$)"
)
_TRACEBACK = "Traceback (most recent call last):"
_RULES = tuple(
    (rank, kind, re.compile("|".join("(?:{})".format(one) for one in patterns))) for rank, kind, patterns in MESSAGES
)
_PREFIX = re.compile(
    r"^(?:\[(?:rank|default)?\d+\]: ?|\[\d+,\d+\]<std(?:err|out)>: ?|\(\w+ pid=\d+[^)]*\) |\d{1,5}: )+"
)
"""Names of ranks: of torch, torchrun --tee, mpirun --tag-output, Ray, and srun --label."""
_TIME = re.compile(r"^\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*\S*\]? ?")
_REPORT = re.compile(
    r"torch\.distributed\.elastic|\bChildFailedError\b|^srun: |^slurmstepd: |^(?:Root Cause|Failures:|=+$|-+$)"
    r"|^\s*(?:exitcode|error_file|traceback|time|host|rank)\s+: |^W\d{4} |^\[\d\]:$"
)
"""Lines with which launchers report an end: they do not show that the program went on."""
_REPORTED = ("crash", "killed", "no_program", "limits", "container", "cancelled")
"""Kinds that a launcher's report may tell first."""
_WARNING = re.compile(r"[A-Z]\w*Warning: |\b(?:WARN(?:ING)?|DEBUG|INFO)\b|^\[?W\d{4} ")
_SOURCE = " " * 4
"""Begins the source lines of a traceback, also of one that the lines of another rank interrupt."""
_FATAL = ("crash", "usage", "no_program")
_FATAL_WORDS = re.compile(r"^\s*(?:terminate called|what\(\): |Fatal |fatal|ERROR)|: fatal error:")


class _Found(NamedTuple):
    number: int
    rank: int
    kind: str
    is_fatal: bool


def find_cause(text: str) -> Optional[LogCause]:
    """The cause of death of the program that printed ``text``; None if no line tells one."""
    lines = [_bare(line) for line in text.splitlines()[-SEARCHED_LINES:]]
    dying = _of_death(lines)
    if not dying:
        return None
    best = min(dying, key=lambda one: (one.rank, not one.is_fatal, one.number))
    return LogCause(best.kind, lines[best.number].strip(), (best.rank, not best.is_fatal))


def find_cause_in_outputs(texts: Iterable[str]) -> Optional[LogCause]:
    """The cause of death in several outputs; of causes that tell alike, that of the first output."""
    found = [cause for cause in map(find_cause, texts) if cause is not None]
    return min(found, key=lambda cause: cause.order, default=None)


def _bare(line: str) -> str:
    return _TIME.sub("", _PREFIX.sub("", line.rstrip()[:LONGEST_LINE]))


def _of_death(lines: Sequence[str]) -> List[_Found]:
    """Messages after which the program did not go on, and those of the system."""
    kept: List[_Found] = []
    total = _own_words(lines)
    after = total[-1] if total else 0
    limit = _WENT_ON_AT_END
    for one in reversed(list(_messages(lines))):
        went_on = after - total[one.number] >= limit
        if one.rank == SYSTEM:
            kept.append(one)
        elif not went_on:
            kept.append(one)
            after, limit = total[one.number], _WENT_ON
        else:
            break
    return kept


def _own_words(lines: Sequence[str]) -> List[int]:
    """For each line, how many of the lines so far are the program's own words, not those of a traceback or launcher."""
    total, counts, is_traceback = 0, [], False
    for line in lines:
        is_traceback = _TRACEBACK in line or (is_traceback and line.startswith(" "))
        total += not (is_traceback or not line.strip() or _REPORT.search(line) or _WARNING.search(line))
        counts.append(total)
    return counts


def _messages(lines: Sequence[str]) -> Iterator[_Found]:
    is_traceback = False
    for number, line in enumerate(lines):
        was_traceback = is_traceback
        is_traceback = _TRACEBACK in line or (is_traceback and line.startswith(" "))
        # The calls and the source in a traceback may speak of errors that did not happen.
        if is_traceback or line.startswith(_SOURCE) or not line.strip():
            continue
        one = _message(line, ends_traceback=was_traceback)
        if one is not None:
            yield _Found(number, one[0], one[1], one[2])


def _message(line: str, *, ends_traceback: bool) -> Optional[Tuple[int, str, bool]]:
    """Rank and kind of a line, and True if it is the last word of a program; None if it tells no cause."""
    rank, kind = next(((rank, kind) for rank, kind, pattern in _RULES if pattern.search(line)), (PLAIN, "exception"))
    is_exception = ends_traceback or bool(_EXCEPTION.match(line))
    if rank == SYSTEM:
        return rank, kind, True
    if _REPORT.search(line):
        return (rank, kind, False) if kind in _REPORTED else None
    if not is_exception and _WARNING.search(line):
        return (rank, kind, False) if rank == HINT else None
    if kind == "exception" and not is_exception:
        return None
    return rank, kind, is_exception or kind in _FATAL or bool(_FATAL_WORDS.search(line))
