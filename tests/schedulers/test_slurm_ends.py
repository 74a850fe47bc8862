"""Ends of runs on a real Slurm that say nothing by themselves: ``status`` names the cause."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmctl.runs.hang import STALLED_S
from tests.schedulers.running import check_hang, check_restart, ranks_of, supervisor_of, words_of
from tests.schedulers.slurm_site import Site, site
from tests.testbeds.slurm_cluster import slurm_cluster
from tests.waiting import HANG_S, wait_for

__all__ = ["site", "slurm_cluster"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
ENDLESS = ("--set", "training.train_iters=1000000")
HOLD = """
import ctypes, os, sys
kernel, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
PTRACE_SEIZE, PTRACE_INTERRUPT, WALL = 0x4206, 0x4207, 0x40000000
for act in (PTRACE_SEIZE, PTRACE_INTERRUPT):
    assert kernel.ptrace(act, pid, None, None) == 0, os.strerror(ctypes.get_errno())
print("held", flush=True)
# Without this wait the process would stay a zombie after SIGKILL.
while os.WIFSTOPPED(os.waitpid(pid, WALL)[1]):
    pass
"""


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """Hold a process as a driver or a dead file server does: only SIGKILL helps. Slurm's SIGCONT would end SIGSTOP."""
    argv = [sys.executable, "-c", HOLD, str(pid)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            yield
        finally:
            # The kernel releases what a dead holder held.
            holder.kill()


def beats_of(attempt: Path) -> list[dict[str, Any]]:
    """Heartbeats of two ranks."""
    return [json.loads((attempt / f"heartbeat/rank-{rank:05d}.json").read_text()) for rank in range(2)]


@contextmanager
def awaited_rank_1(site: Site, run_id: str) -> Iterator[str]:
    """Hold rank 1, for which rank 0 then waits; yields status' words."""
    (pid,) = (pid for pid in ranks_of(site.path(run_id)) if "SLURM_PROCID=1" in words_of(pid, "environ"))
    with hung(pid):
        yield str(site.wait_until(run_id, lambda run: "for it" in run["detail"])["detail"])


@pytest.fixture
def kill_wait(site: Site, request: pytest.FixtureRequest) -> Iterator[int]:
    """Seconds between Slurm's SIGTERM and SIGKILL."""
    site.cluster.kill_after(request.param)
    yield int(request.param)
    site.cluster.kill_after(5)


@pytest.fixture
def patient(site: Site) -> Iterator[None]:
    """Slurm leaves a job at its limit more time than the supervisor takes to end what hangs."""
    site.cluster.kill_after(int(HANG_S))
    yield
    site.cluster.kill_after(5)


@pytest.mark.usefixtures("patient")
def test_a_hang_is_named_after_the_time_limit(site: Site) -> None:
    check_hang_at_limit(site, "ended", is_supervisor_hung=False)


def test_a_hang_is_named_after_slurm_has_killed_the_supervisor(site: Site) -> None:
    check_hang_at_limit(site, "killed", is_supervisor_hung=True)


def check_hang_at_limit(site: Site, run_id: str, *, is_supervisor_hung: bool) -> None:
    """A supervisor that cannot act in time, as on a busy node, is killed by Slurm and writes no exit.json."""
    job_id = site.submit(run_id, "--nodes", "2", "--launcher", "srun", "--hang-timeout", "0", *ENDLESS)
    wait_for(lambda: site.iteration(run_id) > 2, "the first iterations")
    _, host = site.status(run_id)["hosts"]
    attempt = site.path(run_id) / "attempts/1"
    rank = rf"rank 1 on {host} \(phase .*, iteration \d+\) (has not entered|is stopped, or) .*; rank 0 waits for it.*"
    with ExitStack() as stack:
        told = stack.enter_context(awaited_rank_1(site, run_id))
        assert re.fullmatch(rank, told)
        if is_supervisor_hung:
            last = max(beat["time"] for beat in beats_of(attempt))
            wait_for(lambda: json.loads((attempt / "alive.json").read_text())["time"] - last > STALLED_S, "a record")
            stack.enter_context(hung(supervisor_of(site.path(run_id))))
        # The limit comes in this minute, whatever the machine has needed so far.
        site.cluster.run("scontrol", "update", f"jobid={job_id}", "timelimit=1")
        run = site.ended(run_id)
    assert run["state"] == "timeout", run
    assert re.search(rf", after {rank}; llmctl resume", run["detail"]), run
    assert (attempt / "exit.json").exists() is not is_supervisor_hung, site.job_log(run_id)


@pytest.fixture
def slow_start(site: Site) -> Iterator[Path]:
    """A prolog of the site that lasts as long as this file does not exist: Slurm counts it in the job's time."""
    go_on = site.cluster.state / "go-on"
    with site.cluster.prolog(f"until [[ -e {go_on} ]]; do sleep 0.2; done\n"):
        yield go_on
        go_on.touch()


@pytest.mark.usefixtures("patient")
def test_a_job_that_begins_after_its_time_limit_has_timed_out(site: Site, slow_start: Path) -> None:
    """Its script is started, may run for Slurm's KillWait, and starts nothing."""
    job_id = site.submit("late", "--nodes", "1", "--time", "1m", "--", "sleep", "3600")
    left = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%L")
    # Slurm looks at its limits twice a minute: until then the script may begin.
    wait_for(lambda: "INVALID" in site.cluster.run(*left), "the limit", step_s=0.5)
    slow_start.touch()
    run = site.ended("late")
    assert run["state"] == "timeout", f"{run}\n{site.job_log('late')}"


@pytest.fixture
def mount_point(site: Site, tmp_path: Path) -> Iterator[Path]:
    """A folder where each node mounts the same disk."""
    point, disk = tmp_path / "point", tmp_path / "disk"
    point.mkdir()
    disk.mkdir()
    for node in site.cluster.nodes:
        site.cluster.on_node(node, "mount", "--bind", str(disk), str(point))
    yield point
    unmount(site, point)


def unmount(site: Site, point: Path) -> None:
    """Take the disk away from all nodes that have it."""
    for node in site.cluster.nodes:
        site.cluster.on_node(node, "sh", "-c", f"! mountpoint --quiet {point} || umount --lazy {point}")


def test_a_requeued_run_does_not_begin_again_without_the_mount_of_its_checkpoints(
    site: Site, mount_point: Path
) -> None:
    # So seldom that no save is under way when the disk goes: it would write its last file into the folder below.
    asked = {"save": mount_point, "save_interval": 300, "wait_for_folder_s": 2, "missed_saves_grace_s": 100_000}
    changes = [word for key, value in asked.items() for word in ("--set", f"checkpoint.{key}={value}")]
    job_id = site.submit("unmounted", "--nodes", "2", "--launcher", "srun", *ENDLESS, *changes)
    wait_for(lambda: site.status("unmounted")["save"], "a whole checkpoint")
    unmount(site, mount_point)
    assert not any(mount_point.iterdir())
    site.cluster.run("scontrol", "requeue", job_id)
    site.wait_until("unmounted", lambda run: run["state"] == "pending")
    # Slurm waits two minutes before it restarts a job. A node that still has the first start may refuse the second.
    wait_for(lambda: not ranks_of(site.path("unmounted")), "the end of all ranks")
    site.cluster.run("scontrol", "update", f"jobid={job_id}", "starttime=now")
    # Not the end of attempt 1: srun, which Slurm aborts first, may have failed before job.sh got its signal.
    second = site.path("unmounted") / "attempts/2/started.json"
    wait_for(second.exists, lambda: f"the second attempt\n{site.scheduler_report()}\n{site.job_log('unmounted')}")
    run = site.ended("unmounted")
    assert (run["state"], run["attempts"]) == ("failed", 2), site.job_log("unmounted")
    assert f"checkpoint folder {mount_point} is empty on n" in run["detail"], run
    log = (site.path("unmounted") / "attempts/2/rank-00000.log").read_text()
    assert re.search(f"checkpoint folder {mount_point} is empty on n\\d; waiting 2 s for it", log), log
    assert not any(
        row["attempt"] == 2
        for row in map(json.loads, (site.path("unmounted") / "metrics.jsonl").read_text().splitlines())
    )
    assert not [*mount_point.iterdir()], "the nodes' folder below the mount is this machine's"


def test_the_cause_of_a_failed_image_import_stands_in_the_status(site: Site, tmp_path: Path) -> None:
    program = tmp_path / "bin/enroot"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\necho '[INFO] Querying registry' >&2\necho '[ERROR] no such image: a/b' >&2\nexit 3\n"
    )
    program.chmod(0o755)
    folder = site.home / ".config/llmctl/clusters"
    profile = yaml.safe_load((folder / "bed.yaml").read_text())
    profile["container"] = {"runtime": "enroot", "image_folder": str(tmp_path / "images")}
    profile["environment"]["setup"].append(f"export PATH={program.parent}:$PATH")
    (folder / "bed-enroot.yaml").write_text(yaml.safe_dump(profile))
    site.submit("imageless", "--nodes", "2", "--container", "a/b", "--", "true", cluster="bed-enroot")
    run = site.ended("imageless")
    assert run["state"] == "failed", site.job_log("imageless")
    assert run["detail"] == (
        f"docker://a/b cannot be imported to {tmp_path}/images/a+b.sqsh: enroot import ended with exit code 3 and the "
        "last line '[ERROR] no such image: a/b'"
    )
    assert "[INFO] Querying registry\n" in site.job_log("imageless")


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("srun", marks=pytest.mark.proof)])
def test_a_killed_rank_of_the_second_node_begins_again(site: Site, launcher: str) -> None:
    how = ("--nodes", "2", "--launcher", launcher, "--max-restarts", "1", "--set", "checkpoint.save_interval=20")
    site.submit(f"again-{launcher}", *how, *ENDLESS)
    check_restart(site, f"again-{launcher}")


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("srun", marks=pytest.mark.proof)])
def test_a_stopped_rank_is_killed_and_the_run_begins_again(site: Site, launcher: str) -> None:
    how = ("--nodes", "2", "--launcher", launcher, "--max-restarts", "1", "--set", "checkpoint.save_interval=20")
    site.submit(f"hangs-{launcher}", *how, "--hang-timeout", "30", *ENDLESS)
    check_hang(site, f"hangs-{launcher}")
