"""Successive halving over layouts. Pure, torch-free.

In each round the layouts that are left run, each for twice as many steps as in the round before, and the faster half
stays (Jamieson and Talwalkar 2016, arXiv:1502.07943, algorithm 1). A layout that runs out of memory takes those with
it that are predicted to need as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

WARM_UP = 3
"""First steps of a trial that do not count."""


class Outcome(str, Enum):
    """End of a trial."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    FAILED = "failed"


@dataclass(frozen=True)
class Candidate:
    """A layout.

    Attributes:
        name: in words.
        settings: dotted key -> value, over the config.
        seconds: predicted time of a step.
        bytes: predicted peak memory of a rank.
    """

    name: str
    settings: Mapping[str, Any]
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Trial:
    """A short run of a candidate.

    Attributes:
        candidate: its number.
        round: counted from 0.
        steps: that count, after ``WARM_UP``.
    """

    candidate: int
    round: int
    steps: int


@dataclass(frozen=True)
class TrialResult:
    """Result of a trial.

    Attributes:
        candidate: its number.
        round: of the trial.
        outcome: the end.
        seconds: median time of the steps that count; None unless it is OK.
        bytes: highest peak memory of a rank; None: unknown.
        reason: of a failure, one line; else empty.
    """

    candidate: int
    round: int
    outcome: Outcome
    seconds: float | None = None
    bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class Contest:
    """Candidates, and the results so far.

    Attributes:
        candidates: in the order of their predicted time.
        results: in the order of their ends.
        steps: of a trial of the first round.
    """

    candidates: Sequence[Candidate]
    results: Sequence[TrialResult]
    steps: int

    def next_trial(self) -> Trial | None:
        """The trial that comes next; None at the end, when one candidate is left, or none."""
        number, alive = 0, list(range(len(self.candidates)))
        while True:
            alive = [one for one in alive if not self._is_out(one)]
            waiting = [one for one in alive if not self._has_run(one, number)]
            if waiting and (number == 0 or len(alive) > 1):
                return Trial(waiting[0], number, self.steps * 2**number)
            if len(alive) <= 1:
                return None
            alive = self._fastest(alive, number)[: -(-len(alive) // 2)]
            number += 1

    def ranking(self) -> list[TrialResult]:
        """The last result of each candidate that ran: those of the last rounds first, in each round the fastest."""
        last = {}
        for result in self.results:
            if result.outcome is Outcome.OK:
                last[result.candidate] = result
        return sorted(last.values(), key=lambda each: (-each.round, each.seconds))

    def _fastest(self, alive: Sequence[int], number: int) -> list[int]:
        times = {each.candidate: each.seconds for each in self.results if each.round == number and each.seconds}
        return sorted(alive, key=lambda one: times.get(one, float("inf")))

    def _has_run(self, candidate: int, number: int) -> bool:
        return any((each.candidate, each.round) == (candidate, number) for each in self.results)

    def _is_out(self, candidate: int) -> bool:
        """True if it failed, or has not run and is predicted to need as much as one that ran out of memory."""
        own = [each for each in self.results if each.candidate == candidate]
        if own:
            return any(each.outcome is not Outcome.OK for each in own)
        sizes = (
            self.candidates[each.candidate].bytes for each in self.results if each.outcome is Outcome.OUT_OF_MEMORY
        )
        return self.candidates[candidate].bytes >= min(sizes, default=float("inf"))
