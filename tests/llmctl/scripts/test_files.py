"""Files that job scripts and the supervisor read: requests from another machine, and secrets."""

import re
import subprocess
from pathlib import Path

from llmctl.site.job import JobSpec
from tests.llmctl.scripts.script_cases import CASES, IMAGE, RUN_ID, install, render_case
from tests.llmctl.scripts.test_run import PYTHON, write_secret
from tests.waiting import HANG_S

GOLDEN = Path(__file__).parents[2] / "golden"


def case_called(name):
    return next(case for case in CASES if str(case) == name)


def test_a_folder_is_listed_before_a_file_in_it_is_checked(tmp_path):
    """Reading the folder updates a network file system's cache of absent files."""
    program = (
        "import os, sys\n"
        "read = os.listdir\n"
        "def listdir(folder):\n    print(folder, flush=True)\n    return read(folder)\n"
        "os.listdir = listdir\n"
        "from llmctl.supervisor.node import guard\n"
        f"sys.exit(-guard(['sleep', '60'], dict(os.environ), '{tmp_path}/.end').status)\n"
    )
    guard = subprocess.Popen(["python3", "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3])
    looks = [guard.stdout.readline() for _ in range(3)]
    assert looks == [f"{tmp_path}\n".encode()] * 3
    (tmp_path / ".end").touch()
    assert guard.wait(HANG_S) == 15


def test_a_node_without_the_secrets_names_the_folder_that_must_be_shared(tmp_path):
    profile = case_called("slurm__torchrun").profile().model_copy(update={"runs_root": str(tmp_path)})
    rendered = render_case(profile, JobSpec(name="c", secrets=("TOKEN",), command=("true",)))
    run_dir = tmp_path / RUN_ID
    script = install(rendered, run_dir)
    (run_dir / "attempts/1").mkdir(parents=True)
    done = subprocess.run(["bash", script, "node", "1", "-", "-", "0"], timeout=HANG_S, check=False)
    assert done.returncode == 1
    log = (run_dir / "attempts/1/node-00000.log").read_text()
    assert f"Nodes must see {run_dir}/own/secrets: is runs_root on a file system that they share?" in log


def test_the_interfaces_offered_are_up_and_not_the_loopback():
    script = (GOLDEN / "slurm__torchrun.sh").read_text()
    (words,) = re.findall(r'set rendezvous.interface to one of:" ("\$\(.*\)")$', script, re.MULTILINE)
    offered = subprocess.run(["bash", "-c", f"echo {words}"], capture_output=True, text=True, check=True).stdout.split()
    states = {path.parent.name: path.read_text().strip() for path in Path("/sys/class/net").glob("*/operstate")}
    assert offered == sorted(name for name, state in states.items() if name != "lo" and state in ("up", "unknown"))


def test_a_rank_in_an_image_without_python_has_log_secrets_and_rendezvous(tmp_path):
    """pyxis starts the container before the supervisor runs, and an image may have only the trainer's Python."""
    profile = case_called("slurm-pyxis__srun_in_image").profile().model_copy(update={"runs_root": str(tmp_path)})
    job = JobSpec(name="gpt", nodes=2, launcher="srun", container=IMAGE, secrets=("TOKEN",))
    secrets = write_secret(tmp_path / "secrets", "a b\n'c'")
    rendered = render_case(profile, job, python=PYTHON, secrets_file=secrets)
    run_dir = tmp_path / RUN_ID
    script = install(rendered, run_dir)
    for folder in (run_dir / "attempts/1", tmp_path / "records"):
        folder.mkdir(parents=True)
    environ = {"PATH": "/usr/bin:/bin", "LLMCTL_RECORD": str(tmp_path / "records"), "SLURM_STEP_ID": "0"}
    environ |= {"LLMCTL_RUN_DIR": str(run_dir), "LLMCTL_ATTEMPT_DIR": str(run_dir / "attempts/1")}
    environ |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "20001", "SLURM_PROCID": "9"}
    subprocess.run(["bash", script, "inside"], env=environ, timeout=HANG_S, check=True)
    found = (tmp_path / "records/environment.0").read_bytes().split(b"\0")
    wanted = {b"MASTER_PORT=20001", b"MASTER_ADDR=10.0.0.1", b"NODE_RANK=1", b"TOKEN=a b\n'c'", b"NNODES=2"}
    assert wanted <= set(found)
    assert (run_dir / "attempts/1/node-00001.log").exists()
    secrets.unlink()
    assert subprocess.run(["bash", script, "inside"], env=environ, timeout=HANG_S, check=False).returncode == 1
    assert "has no file of the secrets" in (run_dir / "attempts/1/node-00001.log").read_text()
