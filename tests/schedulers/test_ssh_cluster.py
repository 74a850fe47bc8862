"""llmctl on four machines behind a jump host, without a scheduler: runs, their ends, and failed connections."""

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.schedulers.running import held
from tests.schedulers.ssh_site import Site
from tests.testbeds.ssh_hosts import GATE, SshHosts, ssh_hosts
from tests.waiting import HANG_S, wait_for

__all__ = ["ssh_hosts"]
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
# Summation over four ranks rounds differently from summation on one rank.
TOLERANCE = 1e-5
# Seconds to save, far more than even a loaded machine needs. Who has saved leaves at once.
GRACE = "3000"
COUNT = ("bash", "-c", "for ((i = 1; i <= 100; i++)); do echo line $i; sleep 0.4; done")


@pytest.fixture(scope="module")
def site(ssh_hosts: SshHosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(ssh_hosts, tmp_path_factory.mktemp("user"))
    site.prepare()
    yield site
    for path in (ssh_hosts.shared / "runs").glob("*/run.json"):
        site.call("cancel", path.parent.name, "--grace", "0")
    assert not ssh_hosts.processes(str(ssh_hosts.shared / "runs")), "something is still running"


@pytest.fixture(scope="module")
def one(site: Site) -> dict[int, float]:
    """Losses of one host, by the other launcher."""
    site.submit("one", "--nodes", "1", "--launcher", "mpirun")
    assert site.ended("one")["state"] == "completed", site.logs("one")
    return site.losses("one")


def test_four_hosts_have_the_losses_of_one_process(site: Site, one: dict[int, float]) -> None:
    site.submit("four", "--nodes", "4")
    # The llmctl that follows the run is killed and started again: neither the run nor its log loses anything.
    first = site.start("logs", "-f", "four")
    assert first.stdout is not None
    assert first.stdout.readline()
    first.send_signal(signal.SIGKILL)
    first.wait(HANG_S)
    again = site.start("logs", "-f", "-n", "1000", "four")
    output, _ = again.communicate(timeout=HANG_S)
    assert again.returncode == 0, output + site.logs("four")
    assert [f"\n{at}/12  loss" in output for at in range(1, 13)] == [True] * 12, output
    run = site.ended("four")
    assert (run["state"], run["exit_code"], run["hosts"]) == ("completed", 0, ["h1", "h2", "h3", "h4"])
    attempt = site.path("four") / "attempts" / "1"
    beats = [json.loads((attempt / f"heartbeat/rank-{rank:05d}.json").read_text())["host"] for rank in range(4)]
    starts = ["started.json", *(f"started-{node:05d}.json" for node in range(1, 4))]
    assert beats == [json.loads((attempt / name).read_text())["host"] for name in starts] == ["h1", "h2", "h3", "h4"]
    assert_same(site.losses("four"), one)


def test_mpirun_starts_a_command_with_the_environment_on_each_host(site: Site) -> None:
    """The losses of a training by mpirun are those of fixture ``one``."""
    command = 'echo "$(hostname) $NODE_RANK $NNODES $MASTER_ADDR $LLMCTL_CACHE_DIR"'
    site.submit("mpi", "--nodes", "2", "--launcher", "mpirun", "--", "bash", "-c", command)
    assert site.ended("mpi")["state"] == "completed", site.logs("mpi")
    seen = [path.read_text() for path in sorted((site.path("mpi") / "attempts/1").glob("node-*.log"))]
    # mpirun must carry what the profile's setup has exported.
    head, exported = site.hosts.address("h1"), os.environ["LLMCTL_CACHE_DIR"]
    assert seen == [f"{host} {rank} 2 {head} {exported}\n" for rank, host in enumerate(("h1", "h2"))], site.logs("mpi")


def test_hosts_that_share_nothing(site: Site) -> None:
    refused = site.call("submit", "c.yaml", "--cluster", "apart", "--nodes", "2")
    assert refused.returncode == 2 and "checkpoint.save" in refused.stderr and "shared: false" in refused.stderr
    site.submit("apart", "--nodes", "2", "--set", f"checkpoint.save={site.hosts.shared}/saved", cluster="apart")
    run = site.ended("apart")
    assert (run["state"], run["iteration"]) == ("completed", 12)
    ranks = [[path.name for path in site.hosts.local_of(host).rglob("rank-*.log")] for host in ("h1", "h2")]
    assert ranks == [["rank-00000.log"], ["rank-00001.log"]], "each host has the log of its own rank"
    assert "completed at iteration 12" in site.llmctl("logs", "apart")


def test_secrets_reach_every_host_and_stay_on_none(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret value")
    site.submit("secret", "--nodes", "3", "--secret", "TOKEN", "--", "bash", "-c", "echo ${#TOKEN} $NODE_RANK")
    assert site.ended("secret")["state"] == "completed", site.logs("secret")
    seen = [path.read_text() for path in sorted((site.path("secret") / "attempts/1").glob("node-*.log"))]
    assert seen == ["12 0\n", "12 1\n", "12 2\n"]
    assert not [path for path in site.hosts.state.rglob("secret.1*") if path.is_file()]
    holders = subprocess.run(["grep", "-rlI", "s3cret value", str(site.hosts.state)], capture_output=True, check=False)
    assert holders.stdout == b""


def test_a_run_is_cancelled_on_every_host_and_resumed(site: Site) -> None:
    endless = ("--set", "training.train_iters=1000000", "--set", "checkpoint.save_interval=1000000")
    site.submit("long", "--nodes", "2", *endless)
    wait_for(lambda: site.iteration("long") > 10, lambda: site.logs("long"))
    with held(site.path("long")) as ranks:
        assert len(ranks) == 2
        beside = ("--", "bash", "-c", "hostname; echo $LLMCTL_RANK")
        assert site.llmctl("interactive", "--run", "long", "--rank", "1", *beside) == "h2\n1\n"
    printed = site.llmctl("cancel", "long", "--grace", GRACE)
    assert "saved at iteration" in printed, printed + site.logs("long")
    assert not site.hosts.processes(str(site.path("long")))
    assert site.status("long")["state"] == "cancelled"
    before = site.iteration("long")
    site.llmctl("resume", "long")
    wait_for(lambda: site.iteration("long") > before + 2, lambda: site.logs("long"))
    assert "saved at iteration" in site.llmctl("cancel", "long", "--grace", GRACE)
    run = site.status("long")
    assert (run["state"], run["attempts"]) == ("cancelled", 2), site.logs("long")
    assert first_of_attempt(site, "long", 2) == before + 1


@pytest.mark.parametrize("cluster", ["lab", "apart"])
def test_a_session_on_several_hosts_knows_where_they_meet(site: Site, cluster: str) -> None:
    told = 'echo "$(hostname) $MASTER_ADDR $NNODES"; cat "$LLMCTL_HOSTFILE"; echo "port $MASTER_PORT"; exit 5'
    done = site.call("interactive", "--cluster", cluster, "--nodes", "2", "--", "sh", "-c", told)
    *lines, port = done.stdout.splitlines()
    assert (done.returncode, lines) == (5, [f"h1 {site.hosts.address('h1')} 2", "h1 slots=1", "h2 slots=1"]), done
    assert re.fullmatch("port [0-9]+", port), port
    alone = ("sh", "-c", 'echo "${MASTER_ADDR-unset} ${LLMCTL_HOSTFILE-unset}"')
    assert site.llmctl("interactive", "--cluster", cluster, "--", *alone) == "unset unset\n"
    status, shown = site.on_terminal("test -t 0 && exit 3\n", "interactive", "--cluster", cluster, "--nodes", "2")
    assert status == 3, shown


def test_mpirun_of_a_session_starts_on_each_host(site: Site) -> None:
    start = 'mpirun --hostfile "$LLMCTL_HOSTFILE" hostname | sort'
    seen = site.llmctl("interactive", "--cluster", "lab", "--nodes", "3", "--", "bash", "-c", start)
    assert seen == "h1\nh2\nh3\n"


def test_a_run_survives_a_cut_network_with_a_warning(site: Site) -> None:
    site.submit("count", "--nodes", "1", "--", *COUNT)
    follower = site.start("logs", "-f", "-n", "1000", "count")
    assert follower.stdout is not None
    lines: list[str] = []
    while not any("line 3" in line for line in lines):
        lines.append(follower.stdout.readline())
        assert lines[-1], lines
    site.hosts.cut_network(GATE)
    while "lost" not in lines[-1]:
        lines.append(follower.stdout.readline())
        assert lines[-1], lines
    site.hosts.heal_network(GATE)
    rest, _ = follower.communicate(timeout=HANG_S)
    output = "".join(lines) + rest
    assert follower.returncode == 0, output
    assert "connected" in rest
    counted = [line.split()[-1] for line in output.splitlines() if "line " in line]
    assert counted == [str(number) for number in range(1, 101)], output


def test_a_lost_host_ends_the_run_and_is_refused_afterwards(site: Site) -> None:
    site.submit("dies", "--nodes", "4", "--", "sleep", "30000")
    site.hosts.cut_power("h4")
    # On a busy machine the other hosts may have missed h4 before the answer comes.
    assert site.status("dies")["state"] in ("running", "failed")
    run = site.ended("dies")
    assert (run["state"], run["exit_code"]) == ("failed", 1), site.logs("dies")
    assert "node 3 (h4) has sent no heartbeat" in site.llmctl("logs", "dies", "--job")
    assert not site.hosts.processes(str(site.path("dies")))
    try:
        refused = site.call("submit", "--cluster", "lab", "--nodes", "4", "--run-id", "never", "--", "true")
        assert refused.returncode == 4 and "h4" in refused.stderr, refused.stderr
        assert_nothing_left(site, "never")
        (down,) = [node for node in nodes_of(site) if node["state"] == "down"]
        assert down["name"] == "h4" and down["reason"]
    finally:
        site.hosts.restore_power("h4")
    assert site.submit("again", "--nodes", "4", "--", "true")
    assert site.ended("again")["state"] == "completed"


def test_a_run_goes_on_without_a_dead_host(site: Site) -> None:
    endless = ("--set", "training.train_iters=1000000", "--set", "checkpoint.save_interval=20")
    site.submit("loses", "--nodes", "2", *endless)
    wait_for(lambda: site.iteration("loses") > 25, lambda: site.logs("loses"))
    site.hosts.cut_power("h2")
    try:
        run = site.ended("loses")
        assert run["state"] == "failed" and "h2" in run["detail"], run
        for cut_off in (("resume", "loses"), ("submit", "--cluster", "lab", "--nodes", "2", "--", "true")):
            refused = site.call(*cut_off)
            assert refused.returncode == 4 and "leave it out: --exclude h2" in refused.stderr, refused.stderr
        unknown = site.call("resume", "loses", "--exclude", "h9")
        assert unknown.returncode == 2 and "there are h1, h2, h3, h4" in unknown.stderr, unknown.stderr
        saved = saved_iteration(site, "loses")
        resumed = site.call("resume", "loses", "--exclude", "h2")
        assert resumed.returncode == 0 and f"resumes from iteration {saved}" in resumed.stderr, resumed.stderr
        wait_for(lambda: first_of_attempt(site, "loses", 2) is not None, lambda: site.logs("loses"))
        assert first_of_attempt(site, "loses", 2) == saved + 1
        run = site.status("loses")
        assert (run["state"], run["hosts"], run["attempts"]) == ("running", ["h1", "h3"], 2), run
        beside = ("--", "hostname")
        assert site.llmctl("interactive", "--run", "loses", "--rank", "1", *beside) == "h3\n"
        assert "iteration" in site.llmctl("logs", "loses", "-n", "50")
        assert "saved at iteration" in site.llmctl("cancel", "loses", "--grace", GRACE)
        assert not site.hosts.processes(str(site.path("loses")))
        # The next resume leaves out the same host, and says so.
        again = site.call("resume", "loses", "--show-script")
        assert again.returncode == 0 and "leaves out h2, as before" in again.stderr, again.stderr
        assert "hosts=(h1 h3)" in again.stdout
        # With mpirun only the head has a job.sh.
        alone = ("--launcher", "mpirun", "--exclude", "h1,h2", "--", "sleep", "30000")
        site.submit("others", "--nodes", "2", *alone)
        wait_for(lambda: {*site.hosts.processes("sleep 30000")} == {"h3", "h4"}, lambda: site.logs("others"))
        site.llmctl("cancel", "others", "--grace", "0")
        assert not site.hosts.processes("sleep 30000")
    finally:
        site.hosts.restore_power("h2")


def first_of_attempt(site: Site, run_id: str, attempt: int) -> int | None:
    rows = [json.loads(line) for line in (site.path(run_id) / "metrics.jsonl").read_text().splitlines()]
    return next((row["iteration"] for row in rows if row["attempt"] == attempt), None)


def saved_iteration(site: Site, run_id: str) -> int:
    return int((site.path(run_id) / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())


def test_a_connection_lost_during_the_probes_does_not_end_a_submit(site: Site, tmp_path: Path) -> None:
    """The profile's setup, which the probe for torch runs too, waits until the jump host has dropped its sessions."""
    begun, go = tmp_path / "begun", tmp_path / "go"
    clusters = site.home / ".config" / "llmctl" / "clusters"
    profile = yaml.safe_load((clusters / "lab.yaml").read_text())
    profile["environment"]["setup"] += [f"touch {begun}", f"until [ -e {go} ]; do sleep 0.1; done"]
    (clusters / "slow.yaml").write_text(yaml.safe_dump(profile))
    submitting = site.start("submit", "c.yaml", "--cluster", "slow", "--run-id", "probed")
    wait_for(begun.exists, "the probe")
    site.hosts.drop_sessions(GATE)
    go.touch()
    output, _ = submitting.communicate(timeout=HANG_S)
    assert submitting.returncode == 0 and "connection to h1 lost; reconnecting" in output, output
    site.llmctl("cancel", "probed", "--grace", "0")


def test_a_changed_host_key_is_refused(site: Site) -> None:
    site.hosts.rekey("h2")
    try:
        refused = site.call("submit", "--cluster", "lab", "--nodes", "2", "--run-id", "never", "--", "true")
        assert refused.returncode == 4, refused.stdout
        assert "h2" in refused.stderr and str(site.hosts.known_hosts) in refused.stderr
        assert_nothing_left(site, "never")
        nodes = {node["name"]: node for node in json.loads(site.llmctl("nodes", "--cluster", "lab", "--json"))["nodes"]}
        assert [nodes[host]["state"] == "down" for host in site.hosts.names] == [False, True, False, False], nodes
        assert nodes["h2"]["reason"].startswith("h2: ITS HOST KEY HAS CHANGED: ")
    finally:
        site.hosts.undo_rekey("h2")


def test_a_job_that_does_not_start_on_one_host_is_ended_on_all(site: Site) -> None:
    """A folder blocks the first file of one host's job.sh, after the other hosts have started."""
    site.hosts.on_host("h2", "mount", "-t", "tmpfs", "none", str(site.hosts.shared))
    try:
        refused = site.call("submit", "--cluster", "lab", "--nodes", "3", "--run-id", "never", "--", "sleep", "30000")
        assert refused.returncode == 4 and "h2: job.sh cannot be started" in refused.stderr, refused.stderr
        assert "one folder that all hosts see" in refused.stderr
        assert_nothing_left(site, "never")
    finally:
        site.hosts.on_host("h2", "umount", str(site.hosts.shared))


def assert_same(one: dict[int, float], other: dict[int, float]) -> None:
    assert one.keys() == other.keys() and one
    assert all(abs(one[at] - other[at]) <= TOLERANCE for at in one), (one, other)


def assert_nothing_left(site: Site, run_id: str) -> None:
    assert not site.path(run_id).exists() and not site.hosts.processes(str(site.path(run_id)))
    assert site.call("status", run_id).returncode == 5


def nodes_of(site: Site) -> list[dict[str, object]]:
    return list(json.loads(site.llmctl("nodes", "--cluster", "lab", "--json"))["nodes"])
