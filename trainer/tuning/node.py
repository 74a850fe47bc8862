"""The contest on the nodes of a job: each starts its ranks of a trial; the head node decides, and keeps the results."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from trainer.tuning.contest import Candidate, Contest, Outcome, Trial, TrialResult
from trainer.tuning.measured import is_enough, reason_of, result_of, step_times
from trainer.tuning.meeting import Meeting
from trainer.tuning.ranks import Place, Ranks

RESULTS = "tune.jsonl"
"""File of the run directory with a row for each finished trial."""
_POLL_S = 0.2
_RECORD_S = 10.0
"""Time for a failure to be recorded after the first rank has ended, which need not be the one that records it."""
_ALL_END = timedelta(minutes=2)
_END = "end"


@dataclass(frozen=True)
class Tuning:
    """All that the nodes know beforehand.

    Attributes:
        config: sections of the training config.
        candidates: in the order of their predicted time.
        steps: of a trial of the first round.
        seconds: time for all trials.
        folder: of the run, on a file system that all nodes see.
        environment: of this process.
    """

    config: Mapping[str, Any]
    candidates: Sequence[Candidate]
    steps: int
    seconds: float
    folder: Path
    environment: Mapping[str, str]

    def trial_folder(self, number: int) -> Path:
        """Run directory of a trial."""
        return self.folder / "tune" / f"trial-{number:03d}"


def run_node(tuning: Tuning, place: Place, port: int) -> list[TrialResult]:
    """Take part in all trials; the results, on the head node.

    Collective: all nodes.

    Raises:
        RuntimeError: another node cannot be reached.
    """
    meeting = Meeting(place.address, port, place.node)
    try:
        if place.node == 0:
            return _lead(tuning, place, meeting)
        _follow(tuning, place, meeting)
        return []
    finally:
        meeting.leave(place.node, place.nodes)


def _follow(tuning: Tuning, place: Place, meeting: Meeting) -> None:
    number = 0
    while (words := meeting.wait(f"trial/{number}")) != _END:
        _take_part(tuning, place, meeting, number, words["folder"], words["port"])
        number += 1


def _lead(tuning: Tuning, place: Place, meeting: Meeting) -> list[TrialResult]:
    results = read_results(tuning.folder)
    ends = time.monotonic() + tuning.seconds
    number = 0
    while (trial := Contest(tuning.candidates, results, tuning.steps).next_trial()) is not None:
        left = ends - time.monotonic()
        if left <= 0:
            print("the time for trials is over", flush=True)
            break
        result = _run_trial(tuning, place, meeting, number, trial, results, left)
        number += 1
        if result is None:
            print("the time for trials is over", flush=True)
            break
        results.append(result)
        _keep(tuning.folder, result)
        print(_line(tuning.candidates[trial.candidate], result), flush=True)
    meeting.tell(f"trial/{number}", _END)
    return results


def _run_trial(
    tuning: Tuning,
    place: Place,
    meeting: Meeting,
    number: int,
    trial: Trial,
    results: Sequence[TrialResult],
    left: float,
) -> TrialResult | None:
    """Run a trial on all nodes; None: the time was over before it had its steps.

    Args:
        tuning: the contest.
        place: of this node, the head.
        meeting: of the nodes.
        number: of the trial in this job.
        trial: the trial.
        results: so far.
        left: seconds for it.
    """
    folder = _new_folder(tuning, trial)
    port = _free_port()
    meeting.tell(f"trial/{number}", {"folder": str(folder), "port": port})
    best = min(
        (each.seconds for each in results if each.round == trial.round and each.seconds is not None), default=None
    )
    ranks = Ranks(place, folder / "config.yaml", folder, port, tuning.environment)
    ends, reason = time.monotonic() + left, ""
    try:
        while not reason:
            time.sleep(_POLL_S)
            if is_enough(step_times(folder), trial.steps, best):
                reason = "enough"
            elif time.monotonic() > ends:
                reason = "late"
            elif meeting.heard(f"stop/{number}") or any(ranks.codes()) or None not in ranks.codes():
                reason = "ended"
                await_reason(folder, ranks)
        meeting.tell(f"stop/{number}", reason)
        codes = [code for code in ranks.codes() if code is not None]
    finally:
        ranks.end()
    for other in range(1, place.nodes):
        codes += meeting.wait(f"done/{number}/{other}", _ALL_END)
    return None if reason == "late" else result_of(trial, folder, codes, enough=reason == "enough")


class WithCodes(Protocol):
    """Ranks whose ends can be asked for."""

    def codes(self) -> list[int | None]:
        """Exit code of each rank; None: it runs."""


def await_reason(folder: Path, ranks: WithCodes) -> None:
    """Leave the ranks of this node the time to record why the trial failed: rank 0 alone records a bad config."""
    ends = time.monotonic() + _RECORD_S
    while not reason_of(folder) and None in ranks.codes() and time.monotonic() < ends:
        time.sleep(_POLL_S)


def _take_part(tuning: Tuning, place: Place, meeting: Meeting, number: int, folder: str, port: int) -> None:
    """Run the ranks of this node, not the head, until the trial ends."""
    ranks = Ranks(place, Path(folder) / "config.yaml", Path(folder), port, tuning.environment)
    try:
        while not meeting.heard(f"stop/{number}"):
            time.sleep(_POLL_S)
            codes = ranks.codes()
            if any(codes) or None not in codes:
                meeting.tell(f"stop/{number}", "ended")
        found = [code for code in ranks.codes() if code is not None]
    finally:
        ranks.end()
    meeting.tell(f"done/{number}/{place.node}", found)


def _new_folder(tuning: Tuning, trial: Trial) -> Path:
    """A new run directory for a trial, with its config."""
    number = 0
    while (folder := tuning.trial_folder(number)).exists():
        number += 1
    (folder / "attempts/1/errors").mkdir(parents=True)
    config = {name: dict(section) for name, section in tuning.config.items()}
    for key, value in tuning.candidates[trial.candidate].settings.items():
        section, _, name = key.partition(".")
        config.setdefault(section, {})[name] = value
    # JSON is YAML too.
    (folder / "config.yaml").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def read_results(folder: Path) -> list[TrialResult]:
    """The results that an earlier job of this run has kept. A last line that was cut off is removed from the file."""
    path = folder / RESULTS
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        os.truncate(path, len(whole))
    rows = [json.loads(line) for line in whole.splitlines()]
    return [TrialResult(**{**row, "outcome": Outcome(row["outcome"])}) for row in rows]


def _keep(folder: Path, result: TrialResult) -> None:
    with (folder / RESULTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def _line(candidate: Candidate, result: TrialResult) -> str:
    measured = f"{result.seconds:.3g} s a step" if result.seconds is not None else result.reason
    words = result.outcome.value.replace("_", " ")
    return f"round {result.round + 1}: {candidate.name}: {words}, {measured} (predicted {candidate.seconds:.3g} s)"
