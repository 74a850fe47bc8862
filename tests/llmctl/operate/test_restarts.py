"""Restarts of real runs on this machine: a rank that kills itself once, and a config error."""

import json
import re

import pytest

from llmctl.cli.main import main
from llmctl.submit import render
from tests.llmctl.operate.faulty_training import write_training
from tests.llmctl.submit.test_submit import attempt_of, ending
from tests.waiting import wait_for

FAULTS = """
import os, signal, time
if os.environ.get("BROKEN"):
    raise RuntimeError("broken")

def kill_once(facts):
    if os.environ["LLMCTL_ATTEMPT"] == "1" and (facts.iteration, facts.mesh.rank) == (5, 1):
        os.kill(os.getpid(), signal.SIGKILL)

def rate(step, config):
    if os.environ.get("STOPS") == os.environ["LLMCTL_ATTEMPT"] and (step, os.environ["RANK"]) == (4, "1"):
        time.sleep(2)  # the heartbeat of this step is written
        os.kill(os.getpid(), signal.SIGSTOP)
    return config.optimizer.lr
"""


@pytest.fixture
def place(home, monkeypatch):
    monkeypatch.chdir(write_training(home, FAULTS, 8, {"checkpoint": {"save_interval": 3}, "job": {"max_restarts": 1}}))
    return home


def submit(run_id, *words):
    return main(["submit", "c.yaml", "--run-id", run_id, *words])


def rows(place, run_id):
    lines = (place / "runs" / run_id / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row.get("lm_loss") is not None]


def status(capsys, run_id):
    capsys.readouterr()
    assert main(["status", run_id, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["runs"][0]


def test_a_killed_rank_costs_steps_and_no_result(place, capsys):
    """The losses are those of an uninterrupted run, bit for bit."""
    hook = ("--set", "hooks.after_step=[faults:kill_once]")
    assert submit("whole") == 0
    assert ending(place, "whole")["reason"] == "completed"
    assert submit("killed", *hook) == 0
    first, second = (ending(place, "killed", number) for number in (1, 2))
    assert (first["reason"], first["class"], first["restarts"], first["code"]) == ("failed", "killed", True, 137)
    assert (first["trained"], first["saved"], first["lost_steps"]) == (5, 3, 2)
    assert second["reason"] == "completed"
    losses = {row["iteration"]: row["lm_loss"] for row in rows(place, "killed")}
    assert losses == {row["iteration"]: row["lm_loss"] for row in rows(place, "whole")}
    assert sorted(losses) == [*range(1, 9)]
    assert [row["iteration"] for row in rows(place, "killed") if row["attempt"] == 2] == [*range(4, 9)]
    run = status(capsys, "killed")
    assert (run["state"], run["attempt"], run["submission"]) == ("completed", 2, 1)
    told = run["costs"]["attempts"]
    assert [(one["reason"], one["failure_class"], one["lost_steps"]) for one in told] == [
        *(("failed", "killed", 2), ("completed", "", 0)),
    ]
    assert told[0]["cause"].startswith("rank 1 on ") and "ended without an error report" in told[0]["cause"]
    assert told[0]["time"]["lost_steps_s"] > 0
    assert 0 < run["costs"]["ettr"] < 1 and run["costs"]["save"]["save_s"] > 0
    assert sum(run["costs"]["time"].values()) == pytest.approx(
        sum(value for one in told for value in one["time"].values())
    )
    assert main(["status", "killed"]) == 0
    page = capsys.readouterr().out
    assert "\nETTR        " in page and "\nattempt 1   failed (killed), iterations 1 to 5, lost 2 steps and " in page
    assert "\nattempt 2   completed, iterations 4 to 8, lost " in page
    # Each attempt has its own logs.
    assert main(["logs", "killed", "--attempt", "2"]) == 0
    assert "at iteration 3" in capsys.readouterr().out
    assert all((attempt_of(place, "killed", number) / "rank-00000.log").exists() for number in (1, 2))


def test_a_hang_costs_steps_and_no_result(place, capsys, monkeypatch):
    """A stopped rank is named and killed with the others; the losses are those of an uninterrupted run."""
    rendered = render.JobSettings
    # Less than the key allows, so that the test does not wait.
    monkeypatch.setattr(render, "JobSettings", lambda **values: rendered(**{**values, "hang_timeout_s": 1}))
    rate = ("--set", "hooks.lr_function=faults:rate")
    assert submit("smooth", *rate) == 0
    assert ending(place, "smooth")["reason"] == "completed"
    assert submit("hung", *rate, "--env", "STOPS=1") == 0
    first, second = (ending(place, "hung", number) for number in (1, 2))
    assert (first["reason"], first["class"], first["restarts"], first["code"]) == ("failed", "hang", True, 1)
    assert re.match(r"rank 1 on \S+ \(phase .*, iteration 4\) is stopped.*; rank 0 waits for it", str(first["cause"]))
    assert second["reason"] == "completed"
    losses = {row["iteration"]: row["lm_loss"] for row in rows(place, "hung")}
    assert losses == {row["iteration"]: row["lm_loss"] for row in rows(place, "smooth")}
    stacks = attempt_of(place, "hung", 1) / "stacks"
    assert "in _iterate" in (stacks / "rank-00000.txt").read_text()  # a stopped rank writes nothing
    assert main(["logs", "hung", "--attempt", "1", "--rank", "failed"]) == 0
    assert f"stacks of ranks at a hang (1): {stacks}" in capsys.readouterr().err
    log = (place / "runs/hung/job.log").read_text()
    assert f"llmctl: hang: {first['cause']}"[:60] in log and "begins again, as attempt 2 of at most 2" in log
    assert status(capsys, "hung")["state"] == "completed"


def test_an_error_of_the_config_does_not_begin_again(place, capsys):
    hook = ("--set", "hooks.after_step=[faults:kill_once]", "--env", "BROKEN=1")
    assert submit("wrong", *hook) == 0
    found = ending(place, "wrong")
    assert (found["class"], found["code"], found.get("restarts")) == ("config", 3, None)
    wait_for(lambda: status(capsys, "wrong")["state"] == "failed", "the end")
    assert status(capsys, "wrong")["detail"].endswith(
        "; not started again: a new attempt would meet the same error of the config"
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-restarts", "-1"], "--max-restarts: -1 is not valid"),
        (["--restart-on", "hunger"], "--restart-on: 'hunger' is not valid: input should be 'killed', 'lost_peer'"),
        (["--hang-timeout", "29"], "--hang-timeout: 29 is not valid: give 30 or more"),
        (["--max-restarts", "0", "--restart-on", "killed"], "there are no restarts; give --max-restarts N"),
    ],
)
@pytest.mark.usefixtures("place")
def test_refused_restarts(words, says, capsys):
    assert submit("r", "--dry-run", *words) == 2
    assert says in capsys.readouterr().err


def test_the_classes_are_those_of_the_supervisor():
    from llmctl.site.job import DEFAULT_RESTARTS, RESTART_CLASSES
    from llmctl.supervisor import restarts
    from trainer.config.sections.job import JobConfig

    names = ("KILLED", "LOST_PEER", "HANG", "NODE", "ROLL_BACK", "ERROR", "UNKNOWN")
    supervisors = {getattr(restarts, name) for name in names}
    assert supervisors == set(DEFAULT_RESTARTS) - {restarts.OUT_OF_MEMORY}
    assert set(RESTART_CLASSES) == supervisors | {restarts.NOT_FINITE, restarts.OUT_OF_MEMORY}
    assert JobConfig(restart_on=",".join(RESTART_CLASSES)).restart_on == [*RESTART_CLASSES]
