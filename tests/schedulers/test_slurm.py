"""llmctl on a real Slurm with four nodes: runs from submission to end, and their status."""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.supervisor.bad_nodes.entries import BadNode, write_entry
from tests.schedulers.prepared_text import check_preparation
from tests.schedulers.running import held
from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster
from tests.waiting import HANG_S, wait_for

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
NODES = ("n1", "n2", "n3", "n4")
# Summation over four ranks rounds differently from summation on one rank.
TOLERANCE = 1e-5
ENDLESS = ("--set", "training.train_iters=1000000")
# Read during collection, because tests do not see the LLMCTL_* variables of the caller.
REAL_PYXIS, REAL_IMAGE = os.environ.get("LLMCTL_TEST_PYXIS"), os.environ.get("LLMCTL_TEST_IMAGE")


@pytest.fixture(scope="module")
def alone(site: Site) -> dict[int, float]:
    """Losses of one process."""
    runs = {"LLMCTL_RUNS_ROOT": str(site.home / "runs")}
    site.llmctl("submit", "c.yaml", "--cluster", "local", "--run-id", "alone", "--follow", env=runs)
    return site.losses("alone")


def same(one: dict[int, float], other: dict[int, float]) -> bool:
    return one.keys() == other.keys() and all(abs(one[at] - other[at]) <= TOLERANCE for at in one)


def test_a_run_after_another(site: Site) -> None:
    """Slurm chooses the reason that a pending job shows: any will do."""
    go = site.home / "go"
    first = site.submit("first", "--", "bash", "-c", f"until [[ -e {go} ]]; do sleep 0.2; done")
    second = site.submit("second", "--after", "first", "--", "test", "-e", str(go))
    site.wait_until("first", lambda run: run["state"] == "running")
    waiting = site.status("second")
    assert waiting["state"] == "pending" and waiting["detail"], waiting
    assert [len(site.queue(job_id)) for job_id in (first, second)] == [1, 1]
    go.touch()
    assert [site.ended(run_id)["state"] for run_id in ("first", "second")] == ["completed"] * 2


def test_four_nodes_have_the_losses_of_one_process(site: Site, alone: dict[int, float]) -> None:
    # An agent of torchrun imports torch, too. So the four nodes are those of srun.
    site.submit("srun", "--nodes", "4", "--launcher", "srun")
    site.submit("torchrun", "--nodes", "2", "--launcher", "torchrun", "--after", "srun")
    follower = site.start("logs", "-f", "srun")
    for run_id, nodes in (("srun", 4), ("torchrun", 2)):
        run = site.ended(run_id)
        hosts = [*NODES[:nodes]]
        assert (run["state"], run["exit_code"], run["hosts"]) == ("completed", 0, hosts), site.job_log(run_id)
        attempt = site.path(run_id) / "attempts" / "1"
        beats = [json.loads((attempt / "heartbeat" / f"rank-{rank:05d}.json").read_text()) for rank in range(nodes)]
        assert [beat["host"] for beat in beats] == hosts
        assert same(site.losses(run_id), alone)
    followed, _ = follower.communicate(timeout=HANG_S)
    assert follower.returncode == 0 and "12/12  loss" in followed


def test_mpirun_starts_ranks_and_passes_gpus_on(site: Site, alone: dict[int, float]) -> None:
    site.submit("mpirun", "--nodes", "2", "--launcher", "mpirun")
    site.submit("gpus", "--nodes", "2", "--resource-type", "gpu", "--", "bash", "-c", "echo $CUDA_VISIBLE_DEVICES")
    assert site.ended("mpirun")["state"] == "completed", site.job_log("mpirun")
    assert same(site.losses("mpirun"), alone)
    assert site.ended("gpus")["state"] == "completed", site.job_log("gpus")
    logs = [(site.path("gpus") / "attempts/1" / f"node-{node:05d}.log").read_text() for node in range(2)]
    assert logs == ["0,1\n", "0,1\n"]


def test_text_is_prepared_by_two_nodes(site: Site) -> None:
    check_preparation(site, "bed")


def test_a_shell_on_a_compute_node(site: Site) -> None:
    done = site.call("interactive", "--cluster", "bed", "--", "bash", "-c", "hostname; exit 7")
    assert done.returncode == 7 and done.stdout.strip() in NODES, done.stderr
    status, seen = site.on_terminal("hostname; tty; exit 5\n", "interactive", "--cluster", "bed", "--nodes", "2")
    assert status == 5 and re.search(r"^n[1-4]\r?$", seen, re.MULTILINE) and "/dev/pts/" in seen, seen
    assert site.call("interactive", "--cluster", "bed", "--", "true").returncode == 0
    assert not list((site.home / "runs").glob(".begun-*"))
    # An impossible request is refused at once.
    refused = site.call("interactive", "--cluster", "bed", "--nodes", "9", "--", "true")
    assert refused.returncode != 0 and "salloc: error: " in refused.stderr


def test_power_cut_requeue_and_resume(site: Site) -> None:
    """Slurm requeues the job of a failed node, and the run continues with the same losses and tells its user."""
    changes = [*ENDLESS, "--set", "checkpoint.save_interval=20"]
    told = site.path("cut").parent / "told"
    notify = ["--notify", f"command:sh -c 'echo \"$LLMCTL_NOTICE\" >>{told}'", "--notify-on", "begin,end,restart"]
    job_id = site.submit("cut", "--nodes", "2", "--launcher", "srun", *changes, *notify)
    wait_for(lambda: site.iteration("cut") > 40, "40 iterations")
    site.cluster.cut_power("n2")
    before = site.iteration("cut")
    # Slurm finds out after SlurmdTimeout, which is long here: a loaded machine is slow to answer, too.
    site.cluster.run("scontrol", "update", "nodename=n2", "state=down", "reason=power")
    try:
        run = site.wait_until("cut", lambda run: run["state"] == "pending")
        assert run["attempts"] == 1 and run["detail"]
        (down,) = [node for node in nodes_of(site) if node["name"] == "n2"]
        assert down["state"] == "down"
        # Slurm waits two minutes before it restarts a job.
        site.cluster.run("scontrol", "update", f"jobid={job_id}", "starttime=now")
        assert len(site.queue(job_id)) == 1
        wait_for(lambda: site.iteration("cut") > before + 20, "iterations of the second attempt")
        site.llmctl("cancel", "cut")
        run = site.ended("cut")
    finally:
        site.cluster.restore_power("n2")
    assert (run["state"], run["attempts"]) == ("cancelled", 2), site.job_log("cut")
    assert len(run["hosts"]) == 2 and "n2" not in run["hosts"]
    notices = [f"cut started (job {job_id})", f"cut started again, as attempt 2 (job {job_id})", "cut was cancelled"]
    wait_for(lambda: len(told.read_text().splitlines()) == 3, "the notice of the end")
    assert [line.partition(" at iteration ")[0] for line in told.read_text().splitlines()] == notices
    rows = [json.loads(line) for line in (site.path("cut") / "metrics.jsonl").read_text().splitlines()]
    again = [row["iteration"] for row in rows if row["attempt"] == 2]
    assert 40 < again[0] <= before + 21, "the second attempt did not continue from a checkpoint"
    end = ("--set", f"training.exit_interval={before + 20}")
    site.submit("whole", "--nodes", "1", "--launcher", "srun", *changes, *end)
    assert site.ended("whole")["iteration"] == before + 20
    seen = site.losses("cut")
    assert same({at: seen[at] for at in range(1, before + 21)}, site.losses("whole"))
    wait_for(lambda: all(node["state"] == "idle" for node in nodes_of(site)), "four idle nodes")


def nodes_of(site: Site) -> list[dict[str, object]]:
    return list(json.loads(site.llmctl("nodes", "--cluster", "bed", "--json"))["nodes"])


def test_excluded_nodes_are_left_out(site: Site) -> None:
    site.submit("spared", "--nodes", "2", "--exclude", "n[1-2]", "--", "true")
    run = site.ended("spared")
    assert (run["state"], run["hosts"]) == ("completed", ["n3", "n4"]), site.job_log("spared")
    refused = site.call("submit", "--cluster", "bed", "--run-id", "never", "--exclude", "n9", "--", "true")
    assert refused.returncode == 4 and "--exclude or the profile's options name a node" in refused.stderr, (
        refused.stderr
    )


def test_a_listed_node_is_left_out_until_it_is_readmitted(site: Site) -> None:
    folder = site.home / f"runs/.llmctl-{os.geteuid()}/nodes"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_entry(str(folder), BadNode("n1", "slow", "preflight", "before", 1, time.time()))
    write_entry(str(folder), BadNode("n99", "slow", "preflight", "before", 1, time.time() - 60))
    said = site.call("submit", "--cluster", "bed", "--run-id", "careful", "--", "true").stderr
    assert "left out: n1 (preflight: slow, " in said and "bed has no such node" in said
    assert "n1" not in site.ended("careful")["hosts"]
    assert "#SBATCH --exclude=n1\n" in (site.path("careful") / "job.sh").read_text()
    shown = json.loads(site.llmctl("nodes", "--cluster", "bed", "--excluded", "--json"))
    assert [one["node"] for one in shown["excluded"]] == ["n1", "n99"]
    for node in ("n1", "n99"):
        site.llmctl("nodes", "--cluster", "bed", "--readmit", node)
    site.submit("again", "--nodes", "1", "--", "true")
    assert site.ended("again")["state"] == "completed"
    assert "exclude" not in (site.path("again") / "job.sh").read_text()


def test_a_drained_node_is_shown_with_its_reason(site: Site) -> None:
    site.cluster.drain("n2", "bad gpu 0, see ticket 12 of the [ops] team")
    try:
        (node,) = [node for node in nodes_of(site) if node["name"] == "n2"]
        assert node["state"] == "drained"
        assert str(node["reason"]).startswith("bad gpu 0, see ticket 12 of the [ops] team (root, ")
        assert (node["gpus"], node["cores"]) == (2, 8)
        job_id = site.submit("undrained", "--nodes", "4", "--", "true")
        run = site.wait_until("undrained", lambda run: run["detail"])
        assert run["state"] == "pending" and len(site.queue(job_id)) == 1
    finally:
        site.cluster.resume("n2")
    assert site.ended("undrained")["state"] == "completed"


def test_attach_reaches_a_rank(site: Site) -> None:
    site.submit("attached", "--nodes", "2", "--launcher", "srun", *ENDLESS)
    wait_for(lambda: site.iteration("attached") > 2, "the first iterations")
    first, second = site.status("attached")["hosts"]
    with held(site.path("attached")) as ranks:
        assert len(ranks) == 2
        keys = "hostname; kill -0 $LLMCTL_RANK_PID && exit 3\n"
        status, seen = site.on_terminal(keys, "interactive", "--run", "attached", "--rank", "0")
        assert status == 3 and re.search(rf"^{first}\r?$", seen, re.MULTILINE), seen
        command = ("bash", "-c", "hostname; kill -0 $LLMCTL_RANK_PID")
        beside = site.call("interactive", "--run", "attached", "--rank", "1", "--", *command)
        assert (beside.returncode, beside.stdout) == (0, f"{second}\n"), beside.stderr
    site.llmctl("cancel", "attached")
    assert site.ended("attached")["state"] == "cancelled"


def test_a_killed_agent_is_named_with_its_node(site: Site) -> None:
    site.submit("agents", "--nodes", "2", "--launcher", "torchrun", *ENDLESS)
    wait_for(lambda: site.iteration("agents") > 2, "the first iterations")
    _, second = site.status("agents")["hosts"]
    site.cluster.on_node(second, "pkill", "-KILL", "-f", "torch.distributed.run")
    run = site.ended("agents")
    assert (run["state"], run["exit_code"]) == ("failed", 137), run
    assert run["detail"].startswith(f"torchrun on {second} was ended by signal 9"), run


def hold_until_the_limit(site: Site, run_id: str, job_id: str) -> None:
    """Let a run train a little, and then wait until the job is asked to stop, or has ended without having begun."""

    def is_over() -> bool:
        return (site.path(run_id) / "attempts/1/stop").exists() or not site.queue(job_id)

    wait_for(lambda: site.iteration(run_id) > 2 or is_over(), "some iterations, or the limit", step_s=0.5)
    with held(site.path(run_id)):
        wait_for(is_over, "the limit", step_s=0.5)


def test_a_run_saves_before_its_time_limit(site: Site) -> None:
    """The job is asked to stop after half its limit, because its seconds to save are more than that."""
    for minutes in (1, 4, 16):
        run_id = f"short-{minutes}"
        asked = ("--nodes", "1", "--launcher", "srun", "--time", f"0:{minutes:02d}:00", *ENDLESS)
        hold_until_the_limit(site, run_id, site.submit(run_id, *asked))
        run = site.ended(run_id)
        assert run["state"] == "timeout" and "time limit" in run["detail"], run
        # A busy machine may need a longer limit before there is anything to save. Who has trained has time to save:
        # an iteration and a small checkpoint take less than the start of the ranks.
        if site.iteration(run_id) > 2:
            break
    latest = site.path(run_id) / "checkpoints" / "latest_checkpointed_iteration.txt"
    assert int(latest.read_text()) == run["iteration"] > 2
    assert run["exit_code"] == 0, "ended by Slurm"


def secret_places(site: Site, job_id: str, run_id: str, secret: str) -> list[str]:
    """Places that contain the secret, among all places that must not contain it."""
    run = site.cluster.run
    texts = {
        "scontrol show job": run("scontrol", "--details", "show", "job", job_id),
        "the batch script": run("scontrol", "write", "batch_script", job_id, "-"),
        "sacct's script": run("sacct", "--jobs", job_id, "--batch-script"),
        "sacct's environment": run("sacct", "--jobs", job_id, "--env-vars"),
        "sacct": run("sacct", "--jobs", job_id, "--parsable2", "--format=ALL"),
    }
    texts.update(
        {str(path): path.read_text(errors="replace") for path in site.path(run_id).rglob("*") if path.is_file()}
    )
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            texts[f"the command line of {folder.name}"] = (folder / "cmdline").read_text(errors="replace")
        except OSError:
            continue
    assert "HOME=" in texts["sacct's environment"] and "job.sh" in texts["sacct's script"]
    return [place for place, text in texts.items() if secret in text]


def test_cancel_leaves_no_process_and_a_secret_leaves_no_trace(site: Site) -> None:
    secret = "swordfish-" + os.urandom(8).hex()
    received = site.home / "received"
    command = f'test "$WORD" = "$EXPECTED" && echo "$SLURM_NODEID" >> {received}; sleep 60000 & sleep 60000'
    job_id = site.submit(
        "doomed", "--nodes", "4", "--secret", "WORD", "--secret", "EXPECTED", "--", "bash", "-c", command,
        env={"WORD": secret, "EXPECTED": secret},
    )  # fmt: skip
    waiting = site.submit("never", "--after", "doomed", "--", "true")
    wait_for(lambda: received.exists() and len(received.read_text().split()) == 4, "the secret on four nodes")
    environment = ("sacct", "--jobs", job_id, "--env-vars")
    wait_for(lambda: "HOME=" in site.cluster.run(*environment), "the accounting, which has a short delay")
    assert secret_places(site, job_id, "doomed", secret) == []
    assert len(site.cluster.processes("LLMCTL_RUN_ID=doomed")) >= 8
    site.llmctl("cancel", "never", "doomed")
    assert site.ended("doomed")["state"] == "cancelled"
    assert site.ended("never")["state"] == "cancelled"
    wait_for(lambda: not site.cluster.processes("LLMCTL_RUN_ID=doomed"), "the end of all processes")
    wait_for(lambda: not site.queue(job_id) and not site.queue(waiting), "an empty queue")
    assert not list((site.home / f"runs/.llmctl-{os.geteuid()}/secrets").glob("doomed*"))


def test_cancel_ends_a_waiting_job_whose_run_directory_is_gone(site: Site) -> None:
    job_id = site.submit("gone", "--", "true", cluster="bed-held")
    other = site.submit("gone-2", "--", "true", cluster="bed-held")
    shutil.rmtree(site.path("gone"))
    done = site.call("cancel", "gone")
    said = f"gone: ended its job {job_id}; {site.path('gone')}/run.json: is not there\n"
    assert (done.returncode, done.stdout) == (0, said), done
    assert not site.queue(job_id) and site.queue(other) == [f"{other} PENDING"]
    again = site.call("cancel", "gone")
    assert again.returncode == 5 and "run.json: is not there" in again.stderr, again
    site.llmctl("cancel", "gone-2")


def kill_job_script(site: Site, run_id: str) -> None:
    """Kill the job as an out-of-memory kernel does: no exit.json is written."""
    started = json.loads((site.path(run_id) / "attempts/1/started.json").read_text())
    site.cluster.on_node(started["host"], "kill", "-KILL", str(started["pid"]))


def test_an_outage_of_the_accounting(site: Site) -> None:
    """Without exit.json, the queue knows a job's end for some minutes, then only the accounting does."""
    jobs = {run_id: site.submit(run_id, "--", "sleep", "60000") for run_id in ("seen", "forgotten")}
    for run_id in jobs:
        site.wait_until(run_id, lambda run: run["state"] == "running" and run["attempt"] == 1)
    site.cluster.stop_accounting()
    try:
        kill_job_script(site, "seen")
        assert site.ended("seen")["state"] == "failed"
        site.cluster.forget_jobs_after(2)
        kill_job_script(site, "forgotten")
        known = ("squeue", "--noheader", "--states=all", "--format=%i")
        wait_for(lambda: jobs["forgotten"] not in site.cluster.run(*known).split(), "an empty queue")
        run = site.status("forgotten")
        assert run["state"] == "unknown" and "accounting" in run["detail"], run
    finally:
        site.cluster.start_accounting()
        site.cluster.forget_jobs_after(300)
    run = site.ended("forgotten")
    assert (run["state"], run["exit_code"]) == ("failed", 137)


def test_containers_by_pyxis(site: Site, tmp_path: Path) -> None:
    """With the stand-in, or with the real plugin LLMCTL_TEST_PYXIS and the image LLMCTL_TEST_IMAGE."""
    image, records = REAL_IMAGE or str(tmp_path / "image.sqsh"), tmp_path / "records"
    asked = ("--nodes", "2", "--container", image, "--mount", f"{tmp_path}:/work", "--", "bash", "-c", "hostname; pwd")
    refused = site.call("submit", "--cluster", "bed-pyxis", "--run-id", "refused", *asked)
    assert refused.returncode != 0 and "pyxis" in refused.stderr
    site.cluster.load_plugins(f"required {REAL_PYXIS}\n" if REAL_PYXIS else stand_in_for_pyxis(tmp_path, records))
    try:
        job_id = site.submit("contained", *asked, cluster="bed-pyxis")
        assert site.ended("contained")["state"] == "completed", site.job_log("contained")
    finally:
        site.cluster.load_plugins("")
    logs = [(site.path("contained") / "attempts/1" / f"node-{node:05d}.log").read_text() for node in range(2)]
    assert [log.split() for log in logs] == [["n1", "/usr"], ["n2", "/usr"]], "the COMMAND starts in container.workdir"
    if REAL_PYXIS:
        return
    found = {path.name: path.read_text().split("\0") for path in records.iterdir()}
    assert found.keys() == {f"{job_id}.0.0", f"{job_id}.0.1"}
    for given in found.values():
        assert {f"container-image={image}", "container-workdir=/usr", "no-container-mount-home="} <= set(given)
        mounts = next(word for word in given if word.startswith("container-mounts=")).partition("=")[2].split(",")
        runs = site.path("contained").parent
        assert {f"{tmp_path}:/work", f"{runs}:{runs}"} <= set(mounts) and "/usr:/usr" not in mounts


@pytest.fixture
def broken_nodes(site: Site, tmp_path: Path) -> Iterator[None]:
    """Nodes that start no step: srun of Slurm 22.05 exits with 0 all the same."""
    flag = tmp_path / "broken"
    flag.touch()
    site.cluster.load_plugins(f"required {built(tmp_path, 'failing_plugin')} {flag}\n")
    yield
    site.cluster.load_plugins("")


@pytest.mark.usefixtures("broken_nodes")
def test_a_command_that_no_node_began_is_no_success(site: Site) -> None:
    done = site.call("interactive", "--cluster", "bed", "--", "sh", "-c", "exit 3")
    assert done.returncode == 4 and "the node did not begin the command" in done.stderr, done
    assert "Plugin initialization failed" in done.stderr


@pytest.mark.usefixtures("broken_nodes")
def test_a_run_that_started_nowhere_is_no_success(site: Site) -> None:
    training = site.submit("unstarted", "--nodes", "2", "--launcher", "srun", *ENDLESS)
    command = site.submit("unstarted-command", "--nodes", "2", "--", "true")
    next_one = site.submit("next", "--after", "unstarted", "--", "true")
    said = "srun: error: task 0 launch failed: Plugin initialization failed"
    for run_id, part in (("unstarted", "rank"), ("unstarted-command", "node")):
        run = site.ended(run_id)
        assert (run["state"], run["exit_code"]) == ("failed", 1), run
        assert re.fullmatch(
            rf"no {part} started its part: the launcher ended with exit code 0 and the error 'srun: error: .*'; "
            rf"its output is in `llmctl logs {run_id} --job`",
            run["detail"],
        ), run
        assert said in site.job_log(run_id)
    assert site.ended("next")["state"] == "cancelled"
    accounted = "sacct", "--allocations", "--noheader", "--format=State", "--jobs"
    wait_for(lambda: site.cluster.run(*accounted, f"{training},{command}").split() == ["FAILED"] * 2, "the accounting")
    assert site.cluster.run(*accounted, next_one).split()[0] == "CANCELLED"


def stand_in_for_pyxis(folder: Path, records: Path) -> str:
    """Build the stand-in and an image; return the plugstack.conf line that loads the stand-in."""
    records.mkdir()
    (folder / "image.sqsh").touch()
    return f"required {built(folder, 'pyxis_standin')} {records}\n"


def built(folder: Path, name: str) -> Path:
    """Build one of the plugins for Slurm."""
    plugin, source = folder / f"{name}.so", Path(__file__).parents[1] / "standins" / f"{name}.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(plugin), str(source)], check=True)
    return plugin
