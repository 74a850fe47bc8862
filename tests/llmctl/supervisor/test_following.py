"""The other machines of a run behind ssh, which follow the head node into the next attempt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.paths import PACKAGE
from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.cause import cause_of_failure
from llmctl.supervisor.machines.following import find_absence
from tests.llmctl.supervisor.test_supervisor import run_job, settings
from tests.waiting import HANG_S

HOSTS = {"hosts": ("a", "b", "c"), "nodes": 3, "max_restarts": 2}


def write(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def test_the_first_machine_that_takes_part_in_no_further_attempt_is_named(tmp_path):
    job, attempt = settings(tmp_path, **HOSTS), Attempt(1, str(tmp_path))
    assert find_absence(settings(tmp_path, max_restarts=2), attempt).sentence == ""
    assert find_absence(job, attempt).sentence == "node 0 (a) has told the other machines no address and port"
    (tmp_path / "rendezvous").write_text("10.0.0.1 20000\n")
    write(tmp_path / "exit-00001.json", {"code": 1, "stays": True})
    found = find_absence(job, attempt)
    assert found.sentence == "node 2 (c) does not answer, and the run has no spare machine" and found.is_lost
    write(tmp_path / "exit-00002.json", {"code": 1, "stays": False})
    found = find_absence(job, attempt)
    assert found.sentence == "node 2 (c) has left the run" and not found.is_lost
    write(tmp_path / "exit-00002.json", {"code": 0, "stays": True})
    assert find_absence(job, attempt).sentence == ""


@pytest.mark.parametrize(
    ("hosts", "shared", "restarts", "may"),
    [
        ((), True, 1, True),
        ((), True, 0, False),
        (("a", "b"), True, 1, True),
        (("a", "b"), False, 1, False),
        (("a",), False, 1, True),
    ],
)
def test_several_machines_begin_again_only_with_one_run_directory(tmp_path, hosts, shared, restarts, may):
    job = settings(tmp_path, hosts=hosts, nodes=len(hosts) or 2, shared=shared, max_restarts=restarts)
    assert job.may_begin_again is may


@pytest.mark.parametrize("begins_again", [True, False])
def test_another_machine_does_as_the_head_node_has_recorded(tmp_path, begins_again):
    """The head node has ended the second attempt before its ranks could start."""
    attempts = tmp_path / "attempts"
    write(attempts / "4/exit.json", {"code": 1, "restarts": begins_again})
    (attempts / "4/rendezvous").write_text("10.0.0.1 20000\n")
    (attempts / "4/job.sh").write_text("exit 5\n")
    write(attempts / "5/started.json", {})
    write(attempts / "5/exit.json", {"code": 1})
    job = run_job(tmp_path, "", "1", "4", **HOSTS)
    assert job.wait(HANG_S) == (1 if begins_again else 5)
    ending = json.loads((attempts / "4/exit-00001.json").read_text())
    assert (ending["code"], ending["stays"]) == (5, True), ending
    assert (attempts / "5/started-00001.json").exists() == begins_again
    if begins_again:
        log = (attempts / "5/node-00001.log").read_text()
        assert "the head node has ended attempt 5 before its ranks could start" in log


WAIT = """import sys
from llmctl.supervisor.attempt import Attempt
from llmctl.supervisor.end_request import EndBySignal
from llmctl.supervisor.machines import following
from llmctl.supervisor.settings import JobSettings
from llmctl.supervisor.signals import Signals
from llmctl.supervisor.watch import Watch
following.HEAD_PATIENCE_S = 1
job = JobSettings.read(sys.argv[1] + "/job.json")
attempt = Attempt(4, job.attempt_dir(4), "-00001")
watch = Watch(job, attempt, Signals(), EndBySignal(), stop_after_s=0, is_head=False)
print(following.await_next(job, attempt, watch))
"""


def waited(run_dir: Path) -> tuple[str, str]:
    """Output of a machine that has ended its part of attempt 4, after its wait, with the sentence that it tells."""
    write(run_dir / "job.json", settings(run_dir, **HOSTS, secrets_file=f"{run_dir}/secret")._asdict())
    argv = [sys.executable, "-c", WAIT, str(run_dir)]
    done = subprocess.run(argv, cwd=PACKAGE.parent, capture_output=True, text=True, check=True, timeout=HANG_S)
    return done.stdout, done.stderr


def test_nobody_waits_for_a_head_node_that_gives_no_sign(tmp_path):
    write(tmp_path / "attempts/4/beat-00000", 7)
    secret = tmp_path / "secret"
    secret.touch()
    silent = "llmctl: node 0 (a) has given no sign for 1 s: no further attempt begins here\n"
    assert waited(tmp_path) == ("False\n", silent)
    assert not secret.exists()
    # The head node was lost between its word and the next attempt.
    write(tmp_path / "attempts/4/exit.json", {"code": 1, "restarts": True})
    assert waited(tmp_path) == ("False\n", silent)
    write(tmp_path / "attempts/5/started.json", {})
    assert waited(tmp_path) == ("True\n", "")


def test_a_cancel_ends_the_wait_for_the_head_node(tmp_path):
    write(tmp_path / "attempts/4/exit.json", {"code": 1, "restarts": True})
    write(tmp_path / "attempts/5/started.json", {})
    (tmp_path / "attempts/4/cancel").write_text("7\n")
    assert waited(tmp_path) == ("False\n", "")


def test_ranks_that_have_begun_know_better_than_the_end_of_a_machine(tmp_path):
    attempt, job = Attempt(1, str(tmp_path)), settings(tmp_path, **HOSTS, is_training=True)
    failed = "node 1 (b) ended with exit code 1"
    assert cause_of_failure(job, attempt, "", "", failed) == failed
    (tmp_path / "errors").mkdir()
    assert cause_of_failure(job, attempt, "", "", failed) == ""
    assert cause_of_failure(job, attempt, "node 2 (c) has sent no heartbeat for 5 s", "", failed).startswith("node 2")
