"""llmctl from a laptop: a real Slurm of two nodes behind a jump host."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.llmctl.operate.environment.made_wheels import write_sdist, write_setuptools, write_torch, write_wheel
from tests.schedulers.laptop_site import CLUSTER, Laptop
from tests.schedulers.running import held
from tests.testbeds import login_node, slurm_cluster
from tests.testbeds.login_node import LoginNode
from tests.testbeds.slurm_cluster import SlurmCluster
from tests.waiting import HANG_S, wait_for

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

# An agent of torchrun costs as much as a rank.
BY_SRUN = ("--launcher", "srun")
_LOSING_SBATCH = """\
#!/bin/bash
# Once, if the flag file exists: the job is accepted, and the connection is cut before the answer.
answer=$(/usr/bin/sbatch "$@") || exit
if rm {flag} 2>/dev/null; then
    kill -9 $(pgrep -x sshd | grep -vxF -e "$(cat {ssh}/jump.pid)" -e "$(cat {ssh}/login.pid)")
    exec sleep 6000
fi
echo "$answer"
"""

_FROM_PYTHON = """\
import sys, time, llmctl
train = {"train_iters": 20, "seq_length": 32, "micro_batch_size": 1, "device": "cpu"}
config = {"model": {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2}, "training": train}
config |= {"optimizer": {"lr": 1e-3}, "data": {"mock_data": True}, "checkpoint": {"save_interval": 10}}
run = llmctl.submit(config, cluster=sys.argv[1], name="from-python", launcher="srun")
run.wait()
print([run.metrics("lm_loss")["iteration"][-1], str(run.status().state)])
run.resume(set={"training.train_iters": 1_000_000})
while 2 not in run.metrics("lm_loss")["attempt"]:
    time.sleep(1)
print(run.cancel().sentence)
print(run.metrics("lm_loss")["iteration"][:21] == [*range(1, 22)], run.status().state)
"""
_ASKED = """\
import sys, llmctl
asked = []
def answer(question):
    asked.append(question)
    return "open sesame"
try:
    llmctl.submit(command=["hostname"], cluster=sys.argv[1])
except llmctl.LlmctlError as error:
    print(error.exit_code, *str(error).splitlines())
run = llmctl.submit(command=["hostname"], cluster=sys.argv[1], answer=answer)
print(run.wait().state, *run.logs(), len(asked), *sorted(set(asked)))
"""


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    """A new laptop; the test is skipped with a warning if no cluster can be started."""
    if os.geteuid() != 0:
        pytest.skip("real Slurm needs root")
    missing = [*slurm_cluster.missing_programs(), *login_node.missing_programs()]
    if missing:
        pytest.skip(f"real Slurm behind ssh needs {', '.join(missing)}")
    # Socket paths have at most 108 characters, so pytest's own folder may be too deep.
    with tempfile.TemporaryDirectory(prefix="llmctl-laptop-") as folder:
        Path(folder).chmod(0o755)
        cluster = SlurmCluster(Path(folder), nodes=2)
        cluster.start()
        login = LoginNode(cluster)
        try:
            login.start()
            laptop = Laptop(cluster, tmp_path_factory.mktemp("laptop"), login, Path(folder) / "runs")
            laptop.prepare()
            laptop.set_up()
            yield laptop
            cluster.run("scancel", "--user=root")
        finally:
            cluster.stop()
            login.stop()


def test_doctor_reaches_the_cluster_and_a_dry_run_writes_nothing(laptop: Laptop) -> None:
    checks = {
        check["name"]: check for check in json.loads(laptop.llmctl("doctor", "--cluster", CLUSTER, "--json"))["checks"]
    }
    assert checks["connection"]["detail"].startswith("hpc, ")
    assert {checks[name]["state"] for name in ("scheduler", "runs_root", "python", "torch", "clock")} == {"ok"}, checks
    before = sorted(laptop.runs.rglob("*"))
    shown = laptop.llmctl("submit", "c.yaml", "--cluster", CLUSTER, "--nodes", "2", "--run-id", "dry", "--show-script")
    assert "#SBATCH --nodes=2" in shown and str(laptop.path("dry")) in shown
    assert sorted(laptop.runs.rglob("*")) == before
    wait_for(lambda: nodes_of(laptop) == [("n1", "idle"), ("n2", "idle")], "two idle nodes")


def nodes_of(laptop: Laptop) -> list[tuple[str, str]]:
    nodes = json.loads(laptop.llmctl("nodes", "--cluster", CLUSTER, "--json"))["nodes"]
    return [(node["name"], node["state"]) for node in nodes]


def test_a_run_is_followed_over_a_connection_that_is_cut(laptop: Laptop) -> None:
    """Two nodes train; every line of the log is shown once, in spite of cut connections."""
    job_id = laptop.submit("train", "--nodes", "2", *BY_SRUN, "--set", "training.train_iters=150")
    assert len(laptop.queue(job_id)) == 1
    waiting = laptop.submit("next", "--after", "train", "--", "hostname")
    follower = laptop.start("logs", "-f", "train")
    wait_for(lambda: laptop.iteration("train") > 20, "the first iterations")
    assert follower.stdout is not None
    followed = ""
    # The run must not end before its follower has lost the connection.
    with held(laptop.path("train")) as ranks:
        assert len(ranks) == 2
        assert laptop.status("next")["state"] == "pending" and len(laptop.queue(waiting)) == 1
        for words in ("10/150  loss", "connection to hpc lost"):
            while words not in followed:
                line = follower.stdout.readline()
                assert line, followed
                followed += line
            if words.startswith("10/150"):
                assert laptop.login.drop_sessions() >= 2
    rest, _ = follower.communicate(timeout=HANG_S)
    followed += rest
    assert follower.returncode == 0, followed
    assert "connection to hpc lost" in followed and "reconnected to hpc" in followed
    assert re.findall(r"^(\d+)/150  loss", followed, re.MULTILINE) == [str(at) for at in range(1, 151)]
    run = laptop.ended("train")
    assert (run["state"], run["exit_code"], run["hosts"], run["iteration"]) == ("completed", 0, ["n1", "n2"], 150)
    assert "completed" in laptop.llmctl("status", "train")
    copies = laptop.home / "copies"
    laptop.llmctl("logs", "train", "--rank", "all", "--download", str(copies))
    kept = {path.name: path.read_bytes() for path in copies.rglob("rank-*.log")}
    attempt = laptop.path("train") / "attempts" / "1"
    assert kept == {path.name: path.read_bytes() for path in attempt.glob("rank-*.log")} and len(kept) == 2
    assert laptop.ended("next")["state"] == "completed"


def test_a_command_on_a_node_returns_its_exit_code(laptop: Laptop) -> None:
    done = laptop.call("interactive", "--cluster", CLUSTER, "--", "bash", "-c", "hostname; exit 7")
    assert done.returncode == 7 and done.stdout in ("n1\n", "n2\n"), done.stderr


def test_a_secret_leaves_no_trace(laptop: Laptop) -> None:
    secret = "swordfish-" + os.urandom(8).hex()
    received = laptop.runs / "received"
    command = f'test "$WORD" && echo "$SLURM_NODEID $WORD" >> {received}; sleep 60000'
    job_id = laptop.submit(
        "doomed", "--nodes", "2", "--secret", "WORD", "--", "bash", "-c", command, env={"WORD": secret}
    )
    wait_for(lambda: received.exists() and len(received.read_text().splitlines()) == 2, "the secret on two nodes")
    assert received.read_text().count(secret) == 2
    received.unlink()
    texts = {
        "ps": laptop.cluster.run("ps", "-eo", "args"),
        "scontrol": laptop.cluster.run("scontrol", "--details", "show", "job", job_id),
        "script": laptop.cluster.run("scontrol", "write", "batch_script", job_id, "-"),
        **{
            str(path): path.read_text(errors="replace")
            for path in laptop.runs.rglob("*")
            if path.is_file() and path.parent != laptop.runs / f".llmctl-{os.geteuid()}" / "secrets"
        },
        **{str(path): path.read_text(errors="replace") for path in laptop.home.rglob("*") if path.is_file()},
    }
    assert [place for place, text in texts.items() if secret in text] == []
    laptop.llmctl("cancel", "doomed")
    assert laptop.ended("doomed")["state"] == "cancelled"
    wait_for(lambda: not laptop.cluster.processes("LLMCTL_RUN_ID=doomed"), "the end of all processes")
    assert not list((laptop.runs / f".llmctl-{os.geteuid()}" / "secrets").glob("doomed*"))


def test_cancel_and_resume_with_the_clock_of_the_laptop_off(laptop: Laptop) -> None:
    endless = ("--set", "training.train_iters=1000000", "--set", "checkpoint.save_interval=1000000")
    laptop.submit("again", *BY_SRUN, *endless)
    wait_for(lambda: laptop.iteration("again") > 2, "the first iterations")
    laptop.llmctl("cancel", "again")
    saved = laptop.ended("again")
    assert saved["state"] == "cancelled" and saved["iteration"] > 2
    laptop.llmctl("resume", "again")
    wait_for(lambda: laptop.iteration("again") > saved["iteration"] + 2, "iterations after the checkpoint")
    rows = [json.loads(line) for line in (laptop.path("again") / "metrics.jsonl").read_text().splitlines()]
    assert min(row["iteration"] for row in rows if row["attempt"] == 2) == saved["iteration"] + 1
    # The run's heartbeats and metrics are fresh, in spite of the laptop's wrong clock.
    with held(laptop.path("again")) as ranks:
        assert len(ranks) == 1
        for seconds in (-3600, 3600):
            (run,) = json.loads(laptop.with_clock_off(seconds, "status", "again", "--json"))["runs"]
            assert run["state"] == "running" and "heartbeat" not in run["detail"], run
            assert run["metrics_age_s"] < 1800, run
    output = laptop.with_clock_off(3600, "cancel", "again")
    assert "cancelled" in output
    laptop.with_clock_off(3600, "submit", "--cluster", CLUSTER, "--run-id", "early", "--", "true")
    assert abs(laptop.ended("early")["submitted"] - time.time()) < 1800


def test_a_submit_whose_answer_is_lost_is_found_and_not_repeated(laptop: Laptop) -> None:
    flag = laptop.login.state / "lose"
    wrapper = laptop.login.bin / "sbatch"
    wrapper.write_text(_LOSING_SBATCH.format(flag=flag, ssh=laptop.login.state))
    wrapper.chmod(0o755)
    flag.touch()
    try:
        done = laptop.call("submit", "--cluster", CLUSTER, "--run-id", "lost", "--", "sleep", "60000")
    finally:
        wrapper.unlink()
    assert not flag.exists()
    assert done.returncode == 0 and "connection to hpc lost" in done.stderr, done.stderr
    names = laptop.cluster.run("squeue", "-h", "-o", "%i %j").splitlines()
    (mine,) = [line for line in names if "lost" in line]
    assert laptop.status("lost")["job_ids"] == [mine.split()[0]]
    laptop.llmctl("cancel", "lost")


def test_a_second_laptop_finds_the_runs(laptop: Laptop, tmp_path: Path) -> None:
    laptop.submit("spoken", "--", "echo", "seen by both")
    laptop.submit("going", "--", "sleep", "60000")
    assert laptop.ended("spoken")["state"] == "completed"
    laptop.wait_until("going", lambda run: run["state"] == "running")
    second = Laptop(laptop.cluster, tmp_path, laptop.login, laptop.runs)
    second.prepare()
    second.set_up()
    runs = {
        run["run_id"]: run["state"]
        for run in json.loads(second.llmctl("status", "--cluster", CLUSTER, "--json"))["runs"]
    }
    assert (runs["spoken"], runs["going"]) == ("completed", "running")
    assert "seen by both" in second.llmctl("logs", "spoken")
    said = second.llmctl("cancel", "going")
    ended = laptop.ended("going")
    assert ended["state"] == "cancelled", (said, ended)


def in_python(laptop: Laptop, program: str, **variables: str) -> list[str]:
    """Lines that a program of the user's prints on the laptop."""
    done = subprocess.run(
        [sys.executable, "-c", program, CLUSTER], env={**laptop.environ(), **variables}, cwd=laptop.home,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


def test_a_run_from_python_trains_is_resumed_and_cancelled(laptop: Laptop) -> None:
    trained, cancelled, again = in_python(laptop, _FROM_PYTHON)
    assert (trained, again) == ("[20, 'completed']", "True cancelled")
    assert re.fullmatch(r"from-python\S*: cancelled.*", cancelled)


def test_a_question_of_ssh_is_answered_in_python(laptop: Laptop, tmp_path: Path) -> None:
    """Each call connects once, and asks once for both hosts of the route."""
    key, config, ssh = tmp_path / "key", tmp_path / "config", tmp_path / "ssh"
    shutil.copy(laptop.login.state / "id_ed25519", key)
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "open sesame", "-f", str(key)], check=True, capture_output=True)
    config.write_text(laptop.login.config.read_text().replace(str(laptop.login.state / "id_ed25519"), str(key)))
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh", path="/usr/bin:/bin")} -F {config} "$@"\n')
    ssh.chmod(0o755)
    refused, answered = in_python(laptop, _ASKED, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert re.fullmatch(rf"4 .*{key}.*encrypted, and no terminal to ask on: add the key to the agent.*", refused)
    assert re.fullmatch(rf"completed .*n[12] 3 Enter passphrase for key '{key}': ", answered)


def test_an_environment_is_built_from_a_laptop(laptop: Laptop) -> None:
    """The login node makes it, and a job there compiles; the laptop sees steps, output and result."""
    links = laptop.runs.parent / "wheels"
    for name in ("numpy", "pydantic", "pyyaml", "safetensors", "tokenizers", "zlib-ng"):
        write_wheel(links, name, "99.0", {f"{name.replace('-', '_')}_made.py": ""})
    write_torch(links, "2.11.0")
    write_setuptools(links)
    sdist, path = write_sdist(laptop.runs.parent / "source", 43), laptop.runs.parent / "laptop's env"
    words = ["env", "build", "--cluster", CLUSTER, "--path", str(path), "--find-links", str(links)]
    words += ["--with", str(sdist)]
    failed = laptop.call(*words)
    assert failed.returncode == 3 and "no CUDA compiler" in failed.stderr, failed.stderr
    overlay = laptop.home / ".config/llmctl/clusters" / f"{CLUSTER}.yaml"
    before = overlay.read_text()
    profile = yaml.safe_load(before)
    profile["environment"]["setup"] = [*profile["environment"].get("setup", ()), "export CC_MODULE=gcc"]
    overlay.write_text(yaml.safe_dump(profile))
    try:
        # Other shell lines may bring another Python: all is made anew.
        built = laptop.call(*words)
    finally:
        overlay.write_text(before)
    assert built.returncode == 0, built.stderr
    assert built.stdout == f"{path}/bin/python\n" and "[1/6] venv: again" in built.stderr
    program = "import tiny_ext; print(tiny_ext.answer())"
    assert subprocess.check_output([path / "bin/python", "-c", program]) == b"43\n"
