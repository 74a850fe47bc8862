"""Failed attempts on two machines behind ssh begin again by themselves, on both or on none."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.schedulers.paced_training import CONFIG
from tests.schedulers.running import ranks_of, supervisor_of, words_of
from tests.schedulers.ssh_site import Site
from tests.testbeds.ssh_hosts import SshHosts, ssh_hosts
from tests.waiting import wait_for

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
LAST = 60
SAVE_INTERVAL = 10
HOOKS = """
import os, time

def rate(step, config):
    time.sleep(0.1)
    if step == 3 and os.environ.get("BREAKS") == os.environ["RANK"]:
        raise RuntimeError("the fault of the test")
    return config.optimizer.lr
"""
RESTARTING = ("--nodes", "2", "--max-restarts")
FIRST_FAILS = "[ $LLMCTL_ATTEMPT != 1 ]"


@pytest.fixture(scope="module")
def site(ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(ssh_hosts, tmp_path_factory.mktemp("user"))
    site.prepare()
    training = {**CONFIG["training"], "train_iters": LAST, "kernel_backend": "reference"}
    own = {"hooks": {"lr_function": "steady:rate"}, "job": {"code": ["steady.py"]}}
    config = {**CONFIG, **own, "training": training, "checkpoint": {"save_interval": SAVE_INTERVAL}}
    (site.home / "c.yaml").write_text(yaml.safe_dump(config))
    (site.home / "steady.py").write_text(HOOKS)
    yield site
    for path in (ssh_hosts.shared / "runs").glob("*/run.json"):
        site.call("cancel", path.parent.name, "--grace", "0")
    assert not ssh_hosts.processes(str(ssh_hosts.shared / "runs")), "something is still running"


def test_a_killed_rank_of_either_machine_and_the_losses_of_a_run_without_a_fault(site: Site) -> None:
    site.submit("whole", "--nodes", "2")
    assert site.ended("whole")["state"] == "completed", site.logs("whole")
    site.submit("killed", *RESTARTING, "3")
    for number, node in ((1, 1), (2, 0)):
        wait_for(lambda number=number: rows_of(site, "killed", number) > 12, lambda: site.logs("killed"))
        (pid,) = (pid for pid in ranks_of(site.path("killed")) if f"NODE_RANK={node}" in words_of(pid, "environ"))
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda number=number: exit_of(site, "killed", number), lambda: site.logs("killed"))
        ending = exit_of(site, "killed", number)
        told = ending["class"], ending["restarts"], ending["most_attempts"], ending["saved"] > 0
        assert told == ("killed", True, 4, True), ending
        assert not ending["cause"], ending
        assert f"rank {node}" in site.call("logs", "killed", "--attempt", str(number), "--rank", "failed").stdout
    run = site.ended("killed")
    assert (run["state"], run["attempts"], run["submission"]) == ("completed", 3, 1), site.logs("killed")
    assert site.losses("killed") == site.losses("whole")
    starts = [json.loads((site.path("killed") / f"attempts/{k}/started-00001.json").read_text()) for k in (1, 2, 3)]
    assert {one["host"] for one in starts} == {"h2"} and len({one["pid"] for one in starts}) == 1
    wait_for(lambda: not site.hosts.processes(str(site.path("killed"))), "the end of both supervisors")


@pytest.mark.proof
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_crash_loop_ends_on_both_machines(site: Site, rank: str) -> None:
    run_id = f"loop{rank}"
    site.submit(run_id, *RESTARTING, "9", "--env", f"BREAKS={rank}")
    run = site.ended(run_id)
    assert (run["state"], run["attempts"]) == ("failed", 3), site.logs(run_id)
    last = exit_of(site, run_id, 3)
    assert last["class"] == "error" and "attempts 2 and 3 have trained" in last["not_restarted"], last
    assert [exit_of(site, run_id, number)["class"] for number in (1, 2)] == ["error", "error"]
    wait_for(lambda: not site.hosts.processes(str(site.path(run_id))), "the end of both supervisors")


@pytest.mark.proof
def test_secrets_are_there_for_the_next_attempt_and_gone_at_the_end(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret value")
    script = "echo ${#TOKEN} $LLMCTL_ATTEMPT; [ $LLMCTL_ATTEMPT != 1 ] || [ $NODE_RANK = 0 ] || exit 3"
    site.submit("secret", *RESTARTING, "1", "--secret", "TOKEN", "--", "bash", "-c", script)
    assert site.ended("secret")["state"] == "completed", site.logs("secret")
    first = exit_of(site, "secret", 1)
    assert (first["class"], first["cause"]) == ("error", "node 1 (h2) ended with exit code 3"), first
    for number in (1, 2):
        seen = [path.read_text() for path in sorted((site.path("secret") / f"attempts/{number}").glob("node-*.log"))]
        assert all(f"12 {number}\n" in text for text in seen) and len(seen) == 2, seen
    wait_for(lambda: not site.hosts.processes(str(site.path("secret"))), "the end of both supervisors")
    holders = subprocess.run(["grep", "-rlI", "s3cret value", str(site.hosts.state)], capture_output=True, check=False)
    assert holders.stdout == b""


@pytest.mark.proof
def test_a_cancel_between_two_attempts_leaves_no_process_and_a_resume_takes_the_next_number(site: Site) -> None:
    """The environment of the second attempt waits on the head node, and the other machine for the head node."""
    clusters = site.home / ".config" / "llmctl" / "clusters"
    profile = yaml.safe_load((clusters / "lab.yaml").read_text())
    waits = '[ "${LLMCTL_ATTEMPT-}" != 2 ] || until [ -e "$LLMCTL_ATTEMPT_DIR/go" ]; do sleep 0.1; done'
    profile["environment"]["setup"] += [waits]
    (clusters / "waits.yaml").write_text(yaml.safe_dump(profile))
    site.submit("between", *RESTARTING, "3", cluster="waits")
    kill_rank_1_after_a_save(site, "between")
    folder = site.path("between") / "attempts"
    wait_for((folder / "2/started-00001.json").exists, lambda: site.logs("between"))
    run = site.status("between")
    assert (run["state"], run["attempt"]) == ("running", 2), run
    site.llmctl("cancel", "between")
    assert site.status("between")["state"] == "cancelled", site.logs("between")
    assert not site.hosts.processes(str(site.path("between")))
    site.llmctl("resume", "between")
    wait_for(lambda: rows_of(site, "between", 3) > 2, lambda: site.logs("between"))
    assert json.loads((folder / "3/started.json").read_text())["submission"] == 2
    assert (folder / "3/started-00001.json").exists()
    site.llmctl("cancel", "between")
    assert not site.hosts.processes(str(site.path("between")))


def test_a_machine_without_supervisor_ends_the_run_and_is_named(site: Site) -> None:
    site.submit("lost", *RESTARTING, "3")
    wait_for(lambda: rows_of(site, "lost", 1) > 12, lambda: site.logs("lost"))
    os.kill(supervisor_of(site.path("lost"), 1), signal.SIGKILL)
    run = site.ended("lost")
    assert (run["state"], run["attempts"]) == ("failed", 1), site.logs("lost")
    ending = exit_of(site, "lost", 1)
    assert ending["class"] == "node" and ending["not_restarted"].startswith("node 1 (h2) does not answer"), ending
    assert "node 1 (h2)" in run["detail"], run
    site.llmctl("cancel", "lost")
    assert not site.hosts.processes(str(site.path("lost")))


@pytest.mark.proof
def test_a_head_node_without_supervisor_keeps_no_machine_waiting(site: Site) -> None:
    site.submit("headless", *RESTARTING, "3")
    wait_for(lambda: rows_of(site, "headless", 1) > 12, lambda: site.logs("headless"))
    os.kill(supervisor_of(site.path("headless")), signal.SIGKILL)
    wait_for(lambda: "h2" not in site.hosts.processes(str(site.path("headless"))), lambda: site.logs("headless"))
    assert "node 0 (h1) has given no sign" in site.logs("headless")
    site.call("cancel", "headless")
    assert not site.hosts.processes(str(site.path("headless")))


def test_machines_that_share_nothing_are_refused_before_the_start(site: Site) -> None:
    refused = site.call("submit", "--cluster", "apart", *RESTARTING, "1", "--run-id", "never", "--", "true")
    assert refused.returncode == 2 and "2 machines that share no files" in refused.stderr, refused.stderr
    site.submit("alone", "--nodes", "1", "--max-restarts", "1", "--", "sh", "-c", FIRST_FAILS, cluster="apart")
    run = site.ended("alone")
    assert (run["state"], run["attempts"]) == ("completed", 2), run
    shutil.rmtree(site.hosts.local_of("h1") / "runs" / "alone")


def kill_rank_1_after_a_save(site: Site, run_id: str) -> None:
    wait_for(lambda: rows_of(site, run_id, 1) > 12, lambda: site.logs(run_id))
    (pid,) = (pid for pid in ranks_of(site.path(run_id)) if "NODE_RANK=1" in words_of(pid, "environ"))
    os.kill(pid, signal.SIGKILL)


def exit_of(site: Site, run_id: str, number: int) -> dict[str, Any]:
    path = site.path(run_id) / f"attempts/{number}/exit.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def rows_of(site: Site, run_id: str, attempt: int) -> int:
    """Rows that an attempt has in metrics.jsonl."""
    path: Path = site.path(run_id) / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return sum(json.loads(line).get("attempt") == attempt for line in lines)
