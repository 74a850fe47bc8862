"""The end of a failed command in its output: torchrun's root cause and a Python traceback. Pure.

A COMMAND writes no error report, and neither does a rank that ends before the trainer begins.
"""

import re
from collections.abc import Sequence

SEARCHED_LINES = 4000
"""Last lines of an output that are searched: torchrun's report of a node with 8 ranks has some 100."""
TRACEBACK_LINES = 20
"""Lines shown of one traceback: the innermost calls and the error are at its end."""

_TRACEBACK = "Traceback (most recent call last):"
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANKS = re.compile(r"rank +: (\d+) \(local_rank: (\d+)\)")
_PREFIX = re.compile(r"\[[\w-]+\]: ?")
"""Of torch (``[rank3]: ``) and of torchrun's --tee (``[default3]:``)."""
_REPORT_ERROR = "ChildFailedError"
"""torch.distributed.elastic.multiprocessing.errors: torchrun's own error, which names the root cause below."""


def failure_words(lines: Sequence[str]) -> list[str]:
    """The traceback that ended the user's program, and torchrun's root cause; empty without either."""
    report = _root_cause(lines)
    block = _fatal(_tracebacks(lines), report)
    if len(block) > TRACEBACK_LINES:
        block = [block[0], "  ...", *block[-TRACEBACK_LINES + 2 :]]
    return block + report


def _fatal(tracebacks: Sequence[list[str]], report: Sequence[str]) -> list[str]:
    """The traceback of torchrun's first failed rank; of one program, the last, since it may survive others."""
    own = [block for block in tracebacks if _REPORT_ERROR not in block[-1]]
    if not own:
        return []
    ranks = next((match for line in report if (match := _RANKS.search(line))), None)
    if ranks is None:
        return own[-1]
    names = (f"[rank{ranks[1]}]", f"[default{ranks[2]}]")
    # Ranks that lose their peer fail later, with tracebacks of their own.
    return next((block for block in own if block[0].startswith(names)), own[0])


def _tracebacks(lines: Sequence[str]) -> list[list[str]]:
    """Every traceback with the line of its error, in the order of the output."""
    found: list[list[str]] = []
    for start, line in enumerate(lines):
        before, is_traceback, _ = line.partition(_TRACEBACK)
        # The report of torchrun has a traceback too, behind the name of its field.
        if not is_traceback or (before and not _PREFIX.fullmatch(before)):
            continue
        block = [line]
        for following in lines[start + 1 :]:
            is_other = not following.startswith(before.rstrip()) if before else _PREFIX.match(following)
            if is_other:
                continue  # the line of another rank
            block.append(following)
            if following[len(before) :].strip() and not following[len(before) :].startswith(" "):
                found.append(block)
                break
    return found


def _root_cause(lines: Sequence[str]) -> list[str]:
    """The last report of torchrun from its root cause on: rank, host, exit code, and the error file's traceback."""
    starts = [number for number, line in enumerate(lines) if line.strip().endswith(_ROOT_CAUSE)]
    if not starts:
        return []
    report: list[str] = []
    for line in lines[starts[-1] :]:
        if line.strip().startswith("====="):
            break
        report.append(line)
    return report
