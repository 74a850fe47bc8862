"""llmctl's commands with the profile abci3 on a stand-in for PBS (tests/standins/pbs).

The job script and the processes are real; the nodes are two names of this machine.
"""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.runs.record import RunRecord
from tests.llmctl.run_directories import TRANSPORT
from tests.schedulers import kernel_cache
from tests.waiting import HANG_S, wait_for

STANDINS = Path(__file__).parents[1] / "standins" / "pbs" / "bin"
CONFIG = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 64},
    "training": {"train_iters": 4, "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 2, "device": "cpu"},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}


def own_address():
    """Non-loopback address of this machine, which another node could reach. Sends no packet."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        return probe.getsockname()[0]


def wait_for_file(path):
    wait_for(path.exists, str(path))


class Site:
    """State folder of the stand-in, and llmctl that uses it."""

    def __init__(self, folder, captured):
        self.state, self.runs, self._captured = folder / "pbs", folder / "runs", captured
        (self.state / "faults").mkdir(parents=True)
        (self.state / "queues").write_text("rt_HF rt_HG\n")
        (self.state / "nodes").write_text(f"hnode001\n{own_address() or 'hnode002'}\n")

    def fault(self, name, present=True):
        path = self.state / "faults" / name
        path.touch() if present else path.unlink()

    def llmctl(self, *arguments, code=0):
        self._captured.readouterr()
        got = main([*arguments])
        out, err = self._captured.readouterr()
        assert got == code, err
        return out + err

    def submit(self, *arguments, command=(), code=0):
        words = ["submit", "--cluster", "abci3", *arguments, *(["--", *command] if command else [])]
        return self.llmctl(*words, code=code).split()[0]

    def view(self, run_id):
        return json.loads(self.llmctl("status", run_id, "--json"))["runs"][0]

    def wait(self, run_id, *states):
        view = {}

        def holds():
            view.update(self.view(run_id))
            return view["state"] in states

        wait_for(holds, lambda: (view, self.log(run_id)), step_s=0.3)
        return view

    def log(self, run_id):
        return "".join(path.read_text() for path in sorted((self.runs / run_id).glob("**/*.log")))

    def jobs(self):
        paths = (self.state / "jobs").glob("*.json")
        return [json.loads(path.read_text()) for path in sorted(paths)]


@pytest.fixture
def site(tmp_path, monkeypatch, capfd):
    for name in ("CONFIG", "STATE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    for name in ("LLMCTL_RUNS_ROOT", "LLMCTL_CLUSTER", "LLMCTL_GROUP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{STANDINS}:{os.environ['PATH']}")
    monkeypatch.setenv("PBS_STANDIN_STATE", str(tmp_path / "pbs"))
    overlay = {
        "runs_root": str(tmp_path / "runs"),
        "group": "gaa50000",
        "stop_grace_s": 5,
        "environment": {"setup": [kernel_cache.of_these_tests()]},
    }
    clusters = tmp_path / "config" / "llmctl" / "clusters"
    clusters.mkdir(parents=True)
    (clusters / "abci3.yaml").write_text(yaml.safe_dump(overlay))
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    made = Site(tmp_path, capfd)
    yield made
    for job in made.jobs():
        if job["state"] != "F":
            subprocess.run(["qdel", job["id"]], check=False)
    wait_for(lambda: all(job["state"] == "F" for job in made.jobs()), "the end of all jobs")


@pytest.mark.skipif(own_address() is None, reason="needs an IPv4 address other than the loopback's")
def test_training_on_two_nodes(site):
    run_id = site.submit("c.yaml", "--nodes", "2")
    view = site.wait(run_id, "completed", "failed")
    assert view["state"] == "completed", site.log(run_id)
    (job,) = site.jobs()
    assert view["job_ids"] == [job["id"]]
    assert view["hosts"] == job["hosts"]
    assert (job["queue"], job["project"], job["variables"], job["nodes"]) == ("rt_HF", "gaa50000", "USE_SSH=1", 2)
    rows = [json.loads(line) for line in (site.runs / run_id / "metrics.jsonl").read_text().splitlines()]
    assert sorted({row["iteration"] for row in rows}) == [1, 2, 3, 4]
    assert (site.runs / run_id / "attempts" / "1" / "rank-00001.log").exists()
    assert job["hosts"][1] in (site.state / "pbs_tmrsh.calls").read_text()
    assert "iteration" in site.llmctl("logs", run_id)


def test_a_command_runs_on_every_node_and_its_failure_is_reported(site):
    run_id = site.submit("--nodes", "2", command=["bash", "-c", 'echo "node $NODE_RANK of $NNODES"; exit $NODE_RANK'])
    view = site.wait(run_id, "failed", "completed")
    assert (view["state"], view["exit_code"]) == ("failed", 1)
    shown = site.llmctl("logs", run_id)
    assert "node 0 of 2" in shown
    assert "node 1 of 2" in shown


def test_a_pending_run_shows_its_reason_and_is_cancelled_at_once(site):
    site.fault("busy")
    run_id = site.submit("--nodes", "2", command=["true"])
    view = site.wait(run_id, "pending")
    assert (view["state"], view["detail"]) == ("pending", "Not enough free nodes available")
    site.llmctl("cancel", run_id)
    assert site.view(run_id)["state"] == "cancelled"
    assert [job["state"] for job in site.jobs()] == ["F"]


def test_cancel_lets_every_node_save(site):
    script = 'trap "touch saved.$NODE_RANK; exit 0" TERM; touch begun.$NODE_RANK; while :; do sleep 0.1; done'
    run_id = site.submit("--nodes", "2", command=["bash", "-c", script])
    for name in ("begun.0", "begun.1"):
        wait_for_file(Path(name))
    site.llmctl("cancel", run_id, "--grace", "3000")
    assert site.view(run_id)["state"] == "cancelled"
    assert Path("saved.0").exists()
    assert Path("saved.1").exists()


def test_the_run_is_stopped_before_its_time_limit(site):
    for limit in ("0:00:20", "0:01:20", "0:05:20"):
        run_id = site.submit("--nodes", "1", "--time", limit, command=["bash", "-c", "touch begun; sleep 6000"])
        view = site.wait(run_id, "timeout", "failed", "completed")
        # A busy machine may need a longer limit before there is anything to tell.
        if Path("begun").exists():
            break
    assert view["state"] == "timeout"
    assert (site.runs / run_id / "attempts" / "1" / "exit.json").exists()


def test_a_job_whose_answer_was_lost_is_found_and_not_submitted_twice(site):
    site.fault("lose")
    run_id = site.submit("--nodes", "1", command=["true"])
    (job,) = site.jobs()
    assert job["name"] == run_id
    record = RunRecord.load(site.runs / run_id, TRANSPORT)
    assert [one.job_id for one in record.submissions[-1].jobs] == [job["id"]]
    assert site.wait(run_id, "completed")["job_ids"] == [job["id"]]


def test_an_outage_of_the_server_ends_no_run(site):
    run_id = site.submit("--nodes", "1", command=["bash", "-c", "touch begun; until [[ -e go ]]; do sleep 0.1; done"])
    wait_for_file(Path("begun"))
    assert site.view(run_id)["state"] == "running"
    site.fault("down")
    view = site.view(run_id)
    assert view["state"] in ("running", "unknown")
    assert "cannot connect to server" in view["detail"]
    site.fault("down", present=False)
    assert site.view(run_id)["state"] == "running"
    Path("go").touch()
    assert site.wait(run_id, "completed", "failed")["state"] == "completed"


def test_a_refused_submit_leaves_nothing_and_gives_advice(site):
    message = site.llmctl("submit", "--cluster", "abci3", "--nodes", "3", "--", "true", code=4)
    assert "violates queue and/or server resource limits" in message
    assert "--nodes" in message
    assert not [path for path in site.runs.iterdir() if not path.name.startswith(".")]


def test_a_run_after_another(site):
    first = site.submit("--nodes", "1", command=["bash", "-c", "until [[ -e go ]]; do sleep 0.1; done"])
    second = site.submit("--nodes", "1", "--after", first, command=["test", "-e", "go"])
    site.wait(first, "running")
    view = site.view(second)
    assert view["state"] == "pending"
    assert view["detail"] == f"waits for the end of {site.jobs()[0]['id']}"
    Path("go").touch()
    assert site.wait(second, "completed", "failed")["state"] == "completed"


def test_resume_makes_a_submission_and_a_requeue_an_attempt(site):
    script = "touch begun.$LLMCTL_ATTEMPT; until [[ -e go.$LLMCTL_ATTEMPT ]]; do sleep 0.1; done; exit 3"
    run_id = site.submit("--nodes", "1", command=["bash", "-c", script])
    wait_for_file(Path("begun.1"))
    (job,) = site.jobs()
    subprocess.run(["qrerun", job["id"]], check=True)
    wait_for_file(Path("begun.2"))
    view = site.view(run_id)
    assert (view["state"], view["attempt"], view["submission"]) == ("running", 2, 1)
    Path("go.2").touch()
    site.wait(run_id, "failed")
    site.llmctl("resume", run_id)
    wait_for_file(Path("begun.3"))
    view = site.view(run_id)
    assert (view["state"], view["attempt"], view["submission"]) == ("running", 3, 2)
    Path("go.3").touch()
    site.wait(run_id, "failed")
    assert len(site.jobs()) == 2


def test_an_end_without_exit_json_is_known_from_the_servers_history(site):
    run_id = site.submit("--nodes", "1", command=["bash", "-c", "touch begun; sleep 6000"])
    wait_for_file(Path("begun"))
    # Killed by the test, not by llmctl: first the shell that PBS runs around the script, then the rest.
    subprocess.run(["qdel", site.jobs()[0]["id"]], check=True)
    assert site.wait(run_id, "cancelled", "failed", "stopped")["state"] in ("cancelled", "stopped")


def test_one_call_for_all_runs_and_none_for_those_that_have_ended(site):
    runs = [site.submit("--nodes", "1", command=["true"]) for _ in range(3)]
    for run_id in runs:
        site.wait(run_id, "completed")
    site.fault("busy")
    more = [site.submit("--nodes", "1", command=["true"]) for _ in range(2)]
    calls = site.state / "qstat.calls"
    calls.write_text("")
    shown = json.loads(site.llmctl("status", "--json", *runs, *more))["runs"]
    assert [view["state"] for view in shown] == ["completed"] * 3 + ["pending"] * 2
    asked = calls.read_text().splitlines()
    assert len(asked) == 1
    assert len(re.findall(r"\d+\.pbs1", asked[0])) == 2


def test_no_secret_reaches_a_file_of_the_run_the_scheduler_or_a_dry_run(site, monkeypatch):
    monkeypatch.setenv("TOKEN", "s3cr3t-value")
    words = ["--nodes", "2", "--secret", "TOKEN"]
    dry = site.llmctl("submit", "--cluster", "abci3", *words, "--show-script", "--", "true")
    run_id = site.submit(*words, command=["bash", "-c", 'test "${#TOKEN}" = 12'])
    assert site.wait(run_id, "completed", "failed")["state"] == "completed"
    texts = [path.read_bytes() for path in site.runs.rglob("*") if path.is_file()]
    texts += [path.read_bytes() for path in site.state.rglob("*") if path.is_file()]
    assert not [text for text in texts if b"s3cr3t-value" in text]
    assert "s3cr3t-value" not in dry


def test_nodes(site):
    nodes = json.loads(site.llmctl("nodes", "--cluster", "abci3", "--json"))["nodes"]
    assert [node["state"] for node in nodes] == ["idle", "idle"]


def test_interactive_passes_arguments_and_exit_code(site, capfd):
    odd = ["a b", "$(id)", "'", "-x", "", "*", "line\nline"]
    program = "import json, os, sys; print(json.dumps([*sys.argv[1:], os.environ['PBS_JOBID']])); sys.exit(7)"
    assert main(["interactive", "--cluster", "abci3", "--nodes", "2", "--", sys.executable, "-c", program, *odd]) == 7
    out, err = capfd.readouterr()
    (job,) = site.jobs()
    assert json.dumps([*odd, job["id"]]) in out
    assert "requesting 2 x rt_HF for 1:00:00 from PBS" in err
    assert (job["nodes"], job["state"]) == (2, "F")
    assert not [path for path in site.runs.iterdir() if path.name.startswith(".interactive")]


def test_interactive_exits_with_4_if_pbs_refuses(site, capfd):
    assert main(["interactive", "--cluster", "abci3", "--nodes", "3", "--", "true"]) == 4
    assert "violates queue" in capfd.readouterr().err
    assert site.jobs() == []


def test_interactive_shows_the_pending_reason_and_removes_its_job(site):
    site.fault("busy")
    waiting = subprocess.Popen(
        [sys.executable, "-m", "llmctl.cli.main", "interactive", "--cluster", "abci3", "--", "true"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(STANDINS.parents[3])},
    )
    assert "requesting 1 x rt_HF" in waiting.stderr.readline()
    assert waiting.stderr.readline() == "llmctl: PBS says: Not enough free nodes available\n"
    waiting.terminate()
    assert waiting.wait(HANG_S) == 4
    waiting.stderr.close()
    assert [job["state"] for job in site.jobs()] == ["F"]


@pytest.fixture
def ssh(site, tmp_path, monkeypatch):
    """Stand-in for ssh -T HOST LINE: records HOST in the returned file, runs LINE here."""
    noted = tmp_path / "ssh.host"
    program = tmp_path / "tools" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\n# Stand-in for ssh -T HOST LINE.\necho "$2" >{noted}\nexec sh -c "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert site.jobs() == []
    return noted


def test_attach_reaches_the_head_node_of_a_running_job(site, ssh, capfd):
    waits = "touch begun.$NODE_RANK; until [[ -e go ]]; do sleep 0.1; done"
    run_id = site.submit("--nodes", "2", command=["bash", "-c", waits])
    wait_for_file(Path("begun.1"))
    capfd.readouterr()
    command = "echo $LLMCTL_RUN_ID $LLMCTL_ATTEMPT; exit 5"
    assert main(["interactive", "--run", run_id, "--", "bash", "-c", command]) == 5
    out, err = capfd.readouterr()
    assert out == f"{run_id} 1\n"
    assert "hnode001" in err
    assert ssh.read_text() == "hnode001\n"
    Path("go").touch()
    site.wait(run_id, "completed")
    assert main(["interactive", "--run", run_id, "--", "true"]) == 5
    assert "has ended, completed; its job is gone" in capfd.readouterr().err
    site.fault("busy")
    waiting = site.submit("--nodes", "1", command=["true"])
    assert main(["interactive", "--run", waiting, "--", "true"]) == 5
    assert "it has no node yet" in capfd.readouterr().err


@pytest.mark.skipif(own_address() is None, reason="needs an IPv4 address other than the loopback's")
def test_attach_beside_a_rank(site, ssh, capfd):
    run_id = site.submit("c.yaml", "--nodes", "2", "--set", "training.train_iters=100000")
    beat = site.runs / run_id / "attempts" / "1" / "heartbeat" / "rank-00001.json"
    wait_for(beat.exists, lambda: (site.view(run_id), site.log(run_id)))
    capfd.readouterr()
    command = "tr '\\0' '\\n' </proc/$LLMCTL_RANK_PID/environ | grep '^RANK='"
    assert main(["interactive", "--run", run_id, "--rank", "1", "--", "bash", "-c", command]) == 0
    out, err = capfd.readouterr()
    assert out == "RANK=1\n"
    assert "rank 1 is process" in err
    assert ssh.read_text().strip() == site.jobs()[0]["hosts"][1]
    assert main(["interactive", "--run", run_id, "--rank", "7", "--", "true"]) == 5
    assert "there are ranks 0-1" in capfd.readouterr().err
    site.llmctl("cancel", run_id, "--grace", "3")
    assert site.view(run_id)["state"] == "cancelled"
