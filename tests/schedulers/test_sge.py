"""llmctl with the bundled profile ``abci`` on a real Grid Engine of four hosts."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.schedulers.prepared_text import check_preparation
from tests.schedulers.running import check_hang, check_restart, held, ranks_of
from tests.schedulers.sge_site import SgeSite
from tests.testbeds.sge_cluster import SgeCluster, sge_cluster
from tests.waiting import wait_for

__all__ = ["sge_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
HOSTS = {"g0001", "g0002", "g0003", "g0004"}
# Summation over four ranks rounds differently from summation on one rank.
TOLERANCE = 1e-5
# Seconds to save, far more than even a loaded machine needs. Who has saved leaves at once.
GRACE = "3000"
ON_CPU = ("--gpus-per-node", "1", "--set", "training.device=cpu")
TRAIN = ("--nodes", "4", *ON_CPU)


@pytest.fixture(scope="module")
def site(sge_cluster: SgeCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SgeSite]:
    site = SgeSite(sge_cluster, tmp_path_factory.mktemp("sge"))
    site.prepare()
    yield site
    sge_cluster.run("qdel", "-u", "*")


def submit(site: SgeSite, run_id: str, *args: str, **more: dict[str, str]) -> str:
    return site.submit(run_id, *args, cluster="abci", **more)


def same(one: dict[int, float], other: dict[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[at] - other[at]) <= TOLERANCE for at in one)


def test_four_nodes_have_the_losses_of_one_process(site: SgeSite) -> None:
    first = site.call("submit", "c.yaml", "--cluster", "abci", "--run-id", "mpirun", *TRAIN)
    assert first.returncode == 0, first.stderr
    assert "abci3" in first.stderr, "no message that the service has ended"
    assert "4 nodes of rt_F" in first.stderr and "4.8 ABCI points" in first.stderr
    by_mpirun = site.status("mpirun")["job_ids"][-1]
    by_torchrun = submit(site, "torchrun", "--nodes", "2", *ON_CPU, "--launcher", "torchrun", "--after", "mpirun")
    waiting = site.wait_until("torchrun", lambda run: "waits for job" in run["detail"] or run["state"] != "pending")
    assert (waiting["state"], waiting["detail"]) == ("pending", f"waits for job {by_mpirun}")
    assert [len(site.queue(job_id)) for job_id in (by_mpirun, by_torchrun)] == [1, 1]
    site.llmctl("submit", "c.yaml", "--cluster", "local", "--run-id", "alone", "--follow")
    for run_id, nodes in (("mpirun", 4), ("torchrun", 2)):
        run = site.ended(run_id)
        assert (run["state"], run["exit_code"]) == ("completed", 0), site.job_log(run_id)
        assert len(run["hosts"]) == nodes and set(run["hosts"]) <= HOSTS
        attempt = site.path(run_id) / "attempts" / "1"
        beats = [json.loads((attempt / "heartbeat" / f"rank-{rank:05d}.json").read_text()) for rank in range(nodes)]
        assert {beat["host"] for beat in beats} == set(run["hosts"])
        hostfile = (attempt / "hostfile").read_text().splitlines()
        assert [line.split()[0] for line in hostfile] == [beat["host"] for beat in beats]
        assert {line.split()[1] for line in hostfile} == {"slots=1"}
        assert same(site.losses(run_id), local_losses(site))
        assert "12/12  loss" in site.llmctl("logs", run_id)


def local_losses(site: SgeSite) -> dict[int, float]:
    rows = (site.home / "llmctl-runs" / "alone" / "metrics.jsonl").read_text().splitlines()
    return {row["iteration"]: row["lm_loss"] for row in map(json.loads, rows) if "lm_loss" in row}


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_a_part_of_a_node(site: SgeSite, launcher: str) -> None:
    """A job on a part of a node has no parallel environment."""
    run_id, command = f"part-{launcher}", 'echo "$HOSTNAME $NODE_RANK $NNODES"; exit 99'
    submit(site, run_id, "--resource-type", "rt_C.small", "--launcher", launcher, "--", "bash", "-c", command)
    run = site.ended(run_id)
    # Grid Engine would restart a job that exits with 99.
    assert (run["state"], run["exit_code"], run["attempts"]) == ("failed", 99, 1), site.job_log(run_id)
    assert re.search(r"g000\d 0 1$", site.llmctl("logs", run_id), re.MULTILINE)
    done = site.call("interactive", "--cluster", "abci", "--resource-type", "rt_C.small", "--", "hostname")
    assert done.stdout.strip() in HOSTS, done.stderr


def test_excluded_hosts_are_left_out(site: SgeSite) -> None:
    submit(site, "spared", "--nodes", "2", "--exclude", "g0001,g0003", "--", "true")
    run = site.ended("spared")
    assert (run["state"], {*run["hosts"]}) == ("completed", {"g0002", "g0004"}), site.job_log("spared")


def test_text_is_prepared_by_two_nodes(site: SgeSite) -> None:
    check_preparation(site, "abci")


def test_a_missing_group_is_refused(site: SgeSite, tmp_path: Path) -> None:
    site.write_overlay(tmp_path)
    done = site.call("submit", str(site.home / "c.yaml"), "--cluster", "abci", *TRAIN, env={"HOME": str(tmp_path)})
    assert done.returncode == 3
    assert all(way in done.stderr for way in ("--group", "LLMCTL_GROUP", "clusters setup")), done.stderr
    wrong = site.call("submit", "c.yaml", "--cluster", "abci", *TRAIN, "--group", "gzz99999")
    assert wrong.returncode == 4 and "group" in wrong.stderr and "gzz99999" in wrong.stderr, wrong.stderr


def test_a_shell_on_a_compute_node(site: SgeSite) -> None:
    command = 'hostname; echo "$LOADEDMODULES"; cat; exit 7'
    done = site.call("interactive", "--cluster", "abci", "--", "bash", "-c", command)
    host, modules = done.stdout.splitlines()
    assert done.returncode == 7 and host in HOSTS, done.stderr
    assert modules.endswith("nccl/2.16/2.16.2-1:hpcx/2.12")
    status, seen = site.on_terminal("hostname; tty; exit 5\n", "interactive", "--cluster", "abci")
    assert status == 5 and re.search(r"^g000\d\r?$", seen, re.MULTILINE) and "/dev/pts/" in seen, seen
    refused = site.call("interactive", "--cluster", "abci", "--nodes", "9", "--", "true")
    assert refused.returncode != 0 and "could not be scheduled" in refused.stderr


def test_attach_beside_a_running_rank(site: SgeSite) -> None:
    submit(site, "visited", "--nodes", "2", *ON_CPU, "--set", "training.train_iters=100000")
    wait_for(lambda: site.iteration("visited") > 2, "some iterations")
    beat = json.loads((site.path("visited") / "attempts/1/heartbeat/rank-00001.json").read_text())
    inside = "hostname; kill -0 $LLMCTL_RANK_PID && echo running; kill -KILL $$"
    with held(site.path("visited")) as ranks:
        assert len(ranks) == 2
        done = site.call("interactive", "--run", "visited", "--rank", "1", "--", "bash", "-c", inside)
        assert (done.returncode, done.stdout) == (137, f"{beat['host']}\nrunning\n"), done.stderr
        keys = "hostname; tty; exit 5\n"
        status, seen = site.on_terminal(keys.replace("\n", "\r"), "interactive", "--run", "visited", "--rank", "1")
        assert status == 5 and beat["host"] in seen and "/dev/pts/" in seen, seen
    # The end of an attached shell by a signal must not end the job.
    before = site.iteration("visited")
    wait_for(lambda: site.iteration("visited") > before + 2, "more iterations")
    site.llmctl("cancel", "visited", "--grace", GRACE)
    run = site.ended("visited")
    assert run["state"] == "cancelled" and run["iteration"] > before
    latest = site.path("visited") / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(latest.read_text()) == run["iteration"], "cancelled without saving"


def secret_places(site: SgeSite, job_id: str, run_id: str, secret: str) -> list[str]:
    """Places that contain the secret, among all places that must not contain it."""
    texts = {
        "qstat -j": site.cluster.run("qstat", "-j", job_id),
        "the spooled script": "".join(
            path.read_text(errors="replace") for path in (site.cluster.state / "execd").glob(f"*/job_scripts/{job_id}")
        ),
    }
    texts.update(
        {str(path): path.read_text(errors="replace") for path in site.path(run_id).rglob("*") if path.is_file()}
    )
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts[f"the command line of {folder.name}"] = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
    assert "job_name" in texts["qstat -j"] and "#$ -l rt_F=4" in texts["the spooled script"]
    return [place for place, text in texts.items() if secret in text]


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_cancel_leaves_no_process_and_a_secret_leaves_no_trace(site: SgeSite, launcher: str) -> None:
    secret = "swordfish-" + os.urandom(8).hex()
    run_id, received, saved = f"doomed-{launcher}", site.home / f"received-{launcher}", site.home / f"saved-{launcher}"
    command = (
        f"trap 'sleep 2; echo $NODE_RANK >>{saved}; exit' TERM; "
        f'test "$WORD" = "$EXPECTED" && echo "$NODE_RANK $MASTER_ADDR:$MASTER_PORT" >>{received}; sleep 60000 & wait'
    )
    job_id = submit(
        site, run_id, "--nodes", "4", "--launcher", launcher, "--secret", "WORD", "--secret", "EXPECTED",
        "--", "bash", "-c", command, env={"WORD": secret, "EXPECTED": secret},
    )  # fmt: skip
    waiting = submit(site, f"never-{launcher}", "--after", run_id, "--", "true")
    wait_for(lambda: received.exists() and len(received.read_text().splitlines()) == 4, "the secret on four nodes")
    head = (site.path(run_id) / "attempts/1/hostfile").read_text().split()[0]
    meeting_point = f"10.98.2.{int(head[1:])}:{10000 + int(job_id) % 50000}"
    assert sorted(received.read_text().splitlines()) == [f"{node} {meeting_point}" for node in range(4)]
    assert secret_places(site, job_id, run_id, secret) == []
    assert len(site.cluster.processes(f"LLMCTL_RUN_ID={run_id}")) >= 8
    site.llmctl("cancel", f"never-{launcher}", run_id, "--grace", GRACE)
    assert site.ended(run_id)["state"] == "cancelled"
    assert site.ended(f"never-{launcher}")["state"] == "cancelled"
    assert sorted(saved.read_text().split()) == ["0", "1", "2", "3"]
    wait_for(lambda: not site.cluster.processes(f"LLMCTL_RUN_ID={run_id}"), "the end of all processes")
    wait_for(lambda: not site.queue(job_id) and not site.queue(waiting), "an empty queue")
    wait_for(lambda: "exit_status" in site.cluster.run("qacct", "-j", job_id), "the account of the job")
    assert secret not in (site.cluster.state / "root/default/common/accounting").read_text()
    assert not list((site.home / f"runs/.llmctl-{os.geteuid()}/secrets").glob(f"{run_id}*"))


@pytest.mark.parametrize("launcher", ["mpirun", "torchrun"])
def test_qdel_by_hand_ends_all_ranks(site: SgeSite, launcher: str) -> None:
    """Grid Engine kills the groups of job.sh and of the tasks, and no other process."""
    run_id = f"by-hand-{launcher}"
    endless = ("--set", "training.train_iters=1000000")
    job_id = submit(site, run_id, "--nodes", "2", *ON_CPU, "--launcher", launcher, *endless)
    wait_for(lambda: site.iteration(run_id) > 2, lambda: f"some iterations\n{site.job_log(run_id)}")
    assert len(ranks_of(site.path(run_id))) == 2
    site.cluster.run("qdel", job_id)
    wait_for(lambda: not ranks_of(site.path(run_id)), "the end of all ranks")
    run = site.ended(run_id)
    assert run["state"] == "cancelled" and "killed: by qdel" in run["detail"], run


def test_a_job_that_grid_engine_ends_at_its_time_limit(site: SgeSite) -> None:
    """The job ignores its stop signal: it leaves no exit.json, and only the accounting knows its end."""
    stubborn = "trap '' TERM; while :; do sleep 1; done"
    job_id = submit(site, "stubborn", "--time", "0:00:14", "--", "bash", "-c", stubborn)
    run = site.ended("stubborn")
    assert (run["state"], run["job_ids"]) == ("timeout", [job_id])
    assert "time limit" in run["detail"], run
    assert not (site.path("stubborn") / "attempts/1/exit.json").exists()
    assert "37  : qmaster enforced" in site.cluster.run("qacct", "-j", job_id)


def test_a_job_in_error_shows_its_reason(site: SgeSite) -> None:
    for host in HOSTS:
        site.cluster.run("mount", "-t", "tmpfs", "none", str(site.home / "runs"), host=host)
    try:
        job_id = submit(site, "unseen", "--", "true")
        run = site.wait_until("unseen", lambda run: "in error" in run["detail"])
    finally:
        for host in HOSTS:
            site.cluster.run("umount", str(site.home / "runs"), host=host)
    assert run["state"] == "pending"
    assert "can't chdir to" in run["detail"] and "No such file" in run["detail"]
    site.llmctl("cancel", "unseen")
    assert site.ended("unseen")["state"] == "cancelled"
    wait_for(lambda: not site.queue(job_id), "an empty queue")


def nodes_of(site: SgeSite) -> list[dict[str, object]]:
    return list(json.loads(site.llmctl("nodes", "--cluster", "abci", "--json"))["nodes"])


def test_nodes(site: SgeSite) -> None:
    wait_for(lambda: all(node["state"] == "idle" for node in nodes_of(site)), "idle nodes")
    site.cluster.run("qmod", "-d", "gpu@g0002")
    try:
        nodes = nodes_of(site)
    finally:
        site.cluster.run("qmod", "-e", "gpu@g0002")
    assert {node["name"] for node in nodes} == HOSTS
    (disabled,) = [node for node in nodes if node["name"] == "g0002"]
    assert (disabled["state"], disabled["reason"]) == ("drained", "disabled by an operator")
    assert disabled["queues"] == ["gpu"]


def test_power_cut_of_the_head_and_a_second_attempt(site: SgeSite) -> None:
    """A site that restarts jobs if their host does not answer."""
    site.cluster.configure("reschedule_unknown", "00:00:05")
    changes = ("--set", "training.train_iters=100000", "--set", "checkpoint.save_interval=20")
    submit(site, "cut", "--nodes", "2", *ON_CPU, *changes)
    wait_for(lambda: site.iteration("cut") > 40, "some iterations")
    head, other = site.status("cut")["hosts"]
    # Grid Engine 8.1.9 sends a job to a new head while that host still removes the job's tasks of the first attempt.
    # The host then drops the request ("removing unreferenced job"). So the job uses two other hosts.
    site.cluster.run("qmod", "-d", f"gpu@{other}")
    site.cluster.cut_power(head)
    try:
        before = site.iteration("cut")
        site.wait_until("cut", lambda run: run["attempts"] == 2 and run["iteration"] > before)
        # Other nodes may answer late on a slow machine.
        [cut] = [node for node in nodes_of(site) if node["name"] == head]
        assert (cut["state"], cut["reason"]) == ("down", "the node does not answer")
    finally:
        site.cluster.restore_power(head)
        site.cluster.run("qmod", "-e", f"gpu@{other}")
    site.llmctl("cancel", "cut")
    run = site.ended("cut")
    assert (run["state"], run["attempts"]) == ("cancelled", 2) and not {head, other} & set(run["hosts"])
    rows = [json.loads(line) for line in (site.path("cut") / "metrics.jsonl").read_text().splitlines()]
    again = [row["iteration"] for row in rows if row["attempt"] == 2]
    assert 20 < again[0] <= before + 20, "the second attempt did not continue from a checkpoint"
    assert "started the job again" in site.job_log("cut")


def test_a_killed_rank_of_the_second_node_begins_again(site: SgeSite) -> None:
    """Grid Engine would end the whole job if a qrsh ended by a signal."""
    how = ("--launcher", "torchrun", "--max-restarts", "1", "--set", "checkpoint.save_interval=20")
    submit(site, "again", "--nodes", "2", *ON_CPU, *how, "--set", "training.train_iters=1000000")
    check_restart(site, "again")


def test_a_stopped_rank_is_killed_and_the_run_begins_again(site: SgeSite) -> None:
    how = ("--launcher", "torchrun", "--max-restarts", "1", "--hang-timeout", "30")
    endless = ("--set", "checkpoint.save_interval=20", "--set", "training.train_iters=1000000")
    submit(site, "hangs", "--nodes", "2", *ON_CPU, *how, *endless)
    check_hang(site, "hangs")
