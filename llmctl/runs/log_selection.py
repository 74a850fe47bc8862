"""Selection of a run's log files: ranks, failed ranks, or job.sh and agents."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmctl.errors import UsageError
from llmctl.runs.logs import node_logs, rank_logs

MAX_RANKS = 100_000
_ERROR = re.compile(r"rank-(\d{5,})\.json")


@dataclass(frozen=True)
class LogChoice:
    """The choice made by ``--rank`` or ``--job``.

    Attributes:
        kind: ``ranks``, ``all``, ``failed`` or ``job``.
        ranks: the numbers, for ``ranks``.
    """

    kind: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "LogChoice":
        """Parse the value of ``--rank``.

        Raises:
            UsageError: ``text`` is none of N, N,N,..., N-M, all, failed.
        """
        if text in ("all", "failed"):
            return cls(text)
        ranks: list[int] = []
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or not (last.isdecimal() if dash else True):
                raise UsageError(
                    f"--rank: {text!r} is not valid: give a rank, as in 3, several (0,3,8-11), all, or failed"
                )
            span = range(int(first), int(last or first) + 1)
            if len(span) > MAX_RANKS:
                raise UsageError(f"--rank: {part.strip()} is more than {MAX_RANKS} ranks; all selects every rank")
            ranks += span
        return cls("ranks", tuple(dict.fromkeys(ranks)))

    def files(self, run_dir: str, attempt: int, names: Sequence[str], failed: Sequence[int]) -> dict[str, str]:
        """Chosen sources (``rank 3``, ``node 0``, ``job``) -> path, in display order.

        Args:
            run_dir: the run directory.
            attempt: number of the attempt.
            names: file names in the attempt's directory.
            failed: ranks that left an error, in order of failure.
        """
        folder = f"{run_dir}/attempts/{attempt}"
        if self.kind == "job":
            nodes = {f"node {node}": f"{folder}/{name}" for node, name in node_logs(names).items()}
            return {"job": f"{run_dir}/job.log", **nodes}
        present = rank_logs(names)
        wanted: Sequence[int] = self.ranks
        if self.kind == "all":
            wanted = list(present)
        elif self.kind == "failed":
            wanted = failed
        return {f"rank {rank}": f"{folder}/{present[rank]}" for rank in wanted if rank in present}

    def absence(self, names: Sequence[str]) -> str:
        """A sentence on chosen ranks without a log while other ranks have logs; empty if there are none.

        Args:
            names: file names in the attempt's directory.
        """
        present = rank_logs(names)
        absent = [rank for rank in self.ranks if rank not in present]
        if not present or not absent:
            return ""
        return f"this attempt has no log of rank {spans(absent)}; there are ranks {spans(sorted(present))}"


def ranks_of_errors(names: Sequence[str]) -> list[int]:
    """Ranks with a file in ``errors/``, by the folder's file names."""
    return [int(match[1]) for name in names if (match := _ERROR.fullmatch(name))]


def spans(numbers: Sequence[int]) -> str:
    """``0-3, 7`` for ascending numbers."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
