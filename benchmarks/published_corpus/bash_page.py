"""The page of a comparison with bash: sources by results, and the reasons without a ground truth."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

EQUAL, UNKNOWN, DIFFERENT, NO_TRUTH = "equal", "equal but for parts of the job", "different", "no ground truth"


@dataclass(frozen=True)
class Comparison:
    """Result for a script.

    Attributes:
        kind: EQUAL, UNKNOWN (a part of a word is known inside the job alone), DIFFERENT or NO_TRUTH.
        reason: of NO_TRUTH, in words that fit several scripts.
        detail: of a difference, with words of the script.
        lost: flags that the result of the import mentions nowhere.
        swallowed: flags that stand where llmctl has a part that only the job knows.
        words: number of words that the program received.
        unknown: number of words of llmctl with a part that only the job knows.
    """

    kind: str
    reason: str = ""
    detail: str = ""
    lost: tuple[str, ...] = ()
    swallowed: tuple[str, ...] = ()
    words: int = 0
    unknown: int = 0


_RESULTS = (EQUAL, UNKNOWN, DIFFERENT, NO_TRUTH)


def page_of(rows: Sequence[tuple[str, Comparison]], head: str) -> list[str]:
    """Lines of the page.

    Args:
        rows: source and result of each script.
        head: a sentence with version and day.
    """
    titles = ("scripts", *_RESULTS, "lost flags", "words", "words with an unknown part")
    lines = ["# Published scripts against bash", "", head, ""]
    lines += [
        "Every known script that `import-script` reads, with the same answers, under bash in a sandbox. The words"
    ]
    lines += ["behind `pretrain_*.py` that the recorded training program receives are compared with those that llmctl"]
    lines += [
        "reads. A part that only the job knows, such as the number of the job, may be any text. A lost flag stands"
    ]
    lines += ["nowhere in the config: neither as a value's origin nor in a remark.", ""]
    lines += [f"| source | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    by_source: dict[str, list[Comparison]] = {}
    for source, row in rows:
        by_source.setdefault(source, []).append(row)
    lines += [_line(source, found) for source, found in by_source.items()]
    lines += [_line("all", [row for _, row in rows]), "", "## No ground truth", ""]
    lines += ["bash starts no training program with these answers, apart from files of another machine.", ""]
    lines += ["| scripts | reason |", "|---|---|"]
    reasons = Counter(row.reason for _, row in rows if row.kind == NO_TRUTH)
    lines += [
        f"| {count} | {_as_text(reason)} |"
        for reason, count in sorted(reasons.items(), key=lambda one: (-one[1], one[0]))
    ]
    return lines


def _line(source: str, rows: Sequence[Comparison]) -> str:
    kinds = Counter(row.kind for row in rows)
    lost = sum(len(row.lost) + len(row.swallowed) for row in rows)
    counts = [len(rows), *(kinds[kind] for kind in _RESULTS), lost]
    counts += [sum(row.words for row in rows), sum(row.unknown for row in rows)]
    return f"| {source} | {' | '.join(map(str, counts))} |"


def _as_text(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").replace("`", "'").split())
