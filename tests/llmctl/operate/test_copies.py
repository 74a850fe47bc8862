"""Real runs on two nodes of this machine that begin again from the copies of their newest state."""

import pytest

from llmctl.supervisor.copies import PREFIX, remove_copies
from tests.llmctl.operate.faulty_training import write_training
from tests.llmctl.operate.test_restarts import rows, status, submit
from tests.llmctl.submit.test_submit import attempt_of, ending
from tests.waiting import wait_for

FAULTS = """
import os, pathlib, signal, time

def kill(facts):
    if os.environ["LLMCTL_ATTEMPT"] not in os.environ["KILLED"] or (facts.iteration, facts.mesh.rank) != (6, 1):
        return
    copies = pathlib.Path(facts.config.checkpoint.copy_folder)
    while len(list(copies.glob("*/rank-*.iter-0000005.*.json"))) < 4:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def place(home, monkeypatch):
    checkpoint = {"save_interval": 3, "copy_interval": 5, "copy_folder": str(home / "copies")}
    training = write_training(home, FAULTS, 8, {"checkpoint": checkpoint, "job": {"max_restarts": 1}})
    monkeypatch.chdir(training)
    return home


HOOK = ("--set", "hooks.after_step=[faults:kill]")


def test_a_run_begins_again_from_its_copies(place, capsys):
    assert submit("whole", *HOOK, "--env", "KILLED=none") == 0
    assert ending(place, "whole")["reason"] == "completed"
    told = (attempt_of(place, "whole") / "rank-00000.log").read_text()
    assert f"iteration 5 copied to {place / 'copies'}, and those of each node on its neighbour, in " in told
    assert submit("killed", *HOOK, "--env", "KILLED=1") == 0
    first, second = (ending(place, "killed", number) for number in (1, 2))
    assert (first["reason"], first["class"], first["trained"], first["saved"]) == ("failed", "killed", 6, 3)
    assert second["reason"] == "completed"
    log = (attempt_of(place, "killed", 2) / "rank-00000.log").read_text()
    line = f"goes on from the copies of iteration 5 in {place / 'copies'}; the newest checkpoint is that of iteration 3"
    assert line in log
    assert [row["iteration"] for row in rows(place, "killed") if row["attempt"] == 2] == [6, 7, 8]
    losses = {row["iteration"]: row["lm_loss"] for row in rows(place, "killed")}
    assert losses == {row["iteration"]: row["lm_loss"] for row in rows(place, "whole")}
    # Lost is what was trained again, and not all since the newest checkpoint.
    run = status(capsys, "killed")
    assert [each["lost_steps"] for each in run["costs"]["attempts"]] == [1, 0]
    # The job removes them after it has recorded its end.
    wait_for(lambda: not list((place / "copies").iterdir()), "a folder without copies")


@pytest.mark.proof
def test_a_run_that_fails_leaves_no_copies(place, capsys):
    assert submit("lost", *HOOK, "--env", "KILLED=12") == 0
    first, second = (ending(place, "lost", number) for number in (1, 2))
    assert (first["restarts"], second["reason"]) == (True, "failed")
    wait_for(lambda: status(capsys, "lost")["state"] == "failed", "the end")
    # The job removes them after it has recorded its end.
    wait_for(lambda: not list((place / "copies").iterdir()), "a folder without copies")


def test_only_the_folder_of_the_run_and_of_the_user_is_removed(tmp_path):
    from trainer.checkpoint.copies.folder import PREFIX as OF_TRAINER

    assert PREFIX == OF_TRAINER
    for name in ("run", "run-2"):
        (tmp_path / f"{PREFIX}{name}").mkdir()
        (tmp_path / f"{PREFIX}{name}" / "rank-00000").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / f"{PREFIX}run-2")
    for run_id in ("run", "link", "none"):
        remove_copies(str(tmp_path), run_id)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{PREFIX}link", f"{PREFIX}run-2"]
    assert (tmp_path / f"{PREFIX}run-2" / "rank-00000").exists()
