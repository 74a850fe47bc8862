"""Attempts whose copies may be used, by the records of the run."""

import pytest

from trainer.checkpoint.copies.start import first_attempt, submission_of
from trainer.process.run_directory import RunDirectory, write_json


def run_of(folder, attempts):
    """A run whose next attempt begins after ``attempts``: submission, values of exit.json, module of an error."""
    for number, (submission, ending, module) in enumerate(attempts, 1):
        attempt = folder / f"attempts/{number}"
        write_json(attempt / "started.json", {"submission": submission})
        if ending is not None:
            write_json(attempt / "exit.json", ending)
        if module:
            write_json(attempt / "errors/rank-00002.json", {"module": module, "type": "SomeError"})
    write_json(folder / f"attempts/{len(attempts) + 1}/started.json", {"submission": 2})
    return RunDirectory(folder, len(attempts) + 1)


def ended(trained, kind="killed"):
    return {"class": kind, "trained": trained}


SPIKE = "trainer.training.soundness.loss_spikes"
FAR, NEAR = ended(20), ended(10)
REPEATED = "attempt 3 has met an error and gone no further than those before"


@pytest.mark.parametrize(
    ("attempts", "first", "reason"),
    [
        ([(2, NEAR, ""), (2, FAR, "builtins")], 1, ""),
        ([(1, NEAR, ""), (2, FAR, "")], 2, "attempt 1 is of another submission"),
        ([(2, NEAR, SPIKE), (2, FAR, "")], 2, "attempt 1 has ended by losses or weights that are not sound"),
        ([(2, NEAR, ""), (2, FAR, SPIKE)], 3, "attempt 2 has ended by losses or weights that are not sound"),
        ([(2, NEAR, ""), (2, FAR, ""), (2, ended(20, "error"), "")], 4, REPEATED),
        # A node, and not the state, is at fault.
        ([(2, NEAR, ""), (2, FAR, ""), (2, ended(20, "lost_peer"), "")], 1, ""),
        ([(2, NEAR, ""), (2, FAR, ""), (2, ended(21, "error"), "")], 1, ""),
        ([(2, ended(20, "error"), "")], 1, ""),
        ([(2, None, ""), (2, None, "")], 1, ""),
    ],
)
def test_copies_are_of_this_submission_and_of_sound_weights(tmp_path, attempts, first, reason):
    assert first_attempt(run_of(tmp_path, attempts)) == (first, reason)


def test_a_run_without_a_supervisor_has_one_submission(tmp_path):
    run = RunDirectory(tmp_path, 2)
    assert (submission_of(run, 1), first_attempt(run)) == (0, (1, ""))
