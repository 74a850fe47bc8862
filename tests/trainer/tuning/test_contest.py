"""Successive halving, with handmade results."""

from __future__ import annotations

from trainer.tuning.contest import Candidate, Contest, Outcome, TrialResult


def contest_of(times: list[float], results: list[TrialResult], steps: int = 4) -> Contest:
    return Contest([Candidate(f"c{n}", {}, time, int(time * 100)) for n, time in enumerate(times)], results, steps)


def played(
    times: list[float], true: dict[int, float | Outcome], steps: int = 4
) -> tuple[Contest, list[tuple[int, int, int]]]:
    """A whole contest: true times, or the outcomes of those that fail; and its trials."""
    results: list[TrialResult] = []
    trials = []
    while (trial := contest_of(times, results, steps).next_trial()) is not None:
        trials.append((trial.candidate, trial.round, trial.steps))
        found = true[trial.candidate]
        if isinstance(found, Outcome):
            results.append(TrialResult(trial.candidate, trial.round, found, reason="as wanted"))
        else:
            results.append(TrialResult(trial.candidate, trial.round, Outcome.OK, found))
        assert len(trials) < 100
    return contest_of(times, results, steps), trials


def test_half_stays_and_runs_twice_as_long() -> None:
    contest, trials = played([1, 2, 3, 4, 5], {0: 5.0, 1: 2.0, 2: 9.0, 3: 1.0, 4: 3.0})
    assert trials == [
        *((candidate, 0, 4) for candidate in range(5)),
        *((candidate, 1, 8) for candidate in (3, 1, 4)),
        *((candidate, 2, 16) for candidate in (3, 1)),
    ]
    assert [each.candidate for each in contest.ranking()] == [3, 1, 4, 0, 2]


def test_out_of_memory_takes_those_that_need_as_much() -> None:
    times = [1.0, 4.0, 2.0, 5.0, 3.0]
    contest, trials = played(times, {0: 1.0, 1: Outcome.OUT_OF_MEMORY, 2: 2.0, 3: 1.0, 4: 3.0})
    assert [trial[0] for trial in trials if trial[1] == 0] == [0, 1, 2, 4]
    assert [each.candidate for each in contest.ranking()] == [0, 2, 4]


def test_a_failure_takes_only_itself() -> None:
    contest, trials = played([1.0, 2.0, 3.0], {0: Outcome.FAILED, 1: 5.0, 2: 4.0})
    assert [trial[0] for trial in trials] == [0, 1, 2, 2] or [trial[0] for trial in trials] == [0, 1, 2]
    assert [each.candidate for each in contest.ranking()] == [2, 1]


def test_one_candidate_runs_once_and_none_is_no_contest() -> None:
    assert played([1.0], {0: 3.0})[1] == [(0, 0, 4)]
    assert contest_of([], []).next_trial() is None
    assert played([1.0], {0: Outcome.OUT_OF_MEMORY})[0].ranking() == []


def test_a_contest_goes_on_where_it_stopped() -> None:
    times, true = [1.0, 2.0, 3.0, 4.0], {0: 4.0, 1: 3.0, 2: 2.0, 3: 1.0}
    whole, _ = played(times, true)
    for count in range(len(whole.results)):
        following = contest_of(times, list(whole.results[:count])).next_trial()
        assert following is not None
        assert (following.candidate, following.round) == (whole.results[count].candidate, whole.results[count].round)
