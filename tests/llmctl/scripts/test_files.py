"""What job scripts look for in files: words that come from another machine, and secrets that a node does not see."""

import subprocess
from pathlib import Path

from llmctl.site.job import JobSpec
from tests.llmctl.scripts.script_cases import CASES, IMAGE, RUN_ID, render_case
from tests.llmctl.scripts.test_run import PYTHON


def traced(script: str, lines: str, folder: Path) -> list[str]:
    """What bash does in ``lines``, with the functions of ``script`` defined but nothing of it begun."""
    functions = script[: script.rindex("\ncase ${1-} in")]
    (folder / "traced.sh").write_text(f"{functions}\nset -x\n{lines}\n")
    done = subprocess.run(["bash", folder / "traced.sh"], capture_output=True, text=True, timeout=30, check=False)
    return [line.lstrip("+ ") for line in done.stderr.splitlines()]


def opens_before_tests(trace: list[str], opening: str, test: str) -> bool:
    """Whether at least every second look at a file follows an opening of its folder."""
    looks = "".join("o" if line == opening else "t" for line in trace if line == opening or test in line)
    return "o" in looks and "ttt" not in looks


def test_folders_are_opened_before_a_file_in_them_is_looked_for(tmp_path):
    """A network file system remembers for up to a minute that a file was not there, unless its folder is opened."""
    case = next(case for case in CASES if str(case) == "abci__torchrun")
    script = case.rendered(secrets=()).script
    trace = traced(script, f"attempt_dir={tmp_path}; start_agent sleep 3; wait_for_agents", tmp_path)
    assert opens_before_tests(trace, f": '{tmp_path}/canc*'", f"-e {tmp_path}/cancel")
    trace = traced(script, f"guard {tmp_path}/.end sleep 3", tmp_path)
    assert opens_before_tests(trace, f": '{tmp_path}/.end*'", f"-e {tmp_path}/.end ")


def test_a_node_that_does_not_see_the_secrets_says_which_folder_it_must_see(tmp_path):
    case = next(case for case in CASES if str(case) == "slurm__torchrun")
    rendered = render_case(case.profile(), JobSpec(name="c", secrets=("TOKEN",), command=("true",)))
    functions = rendered.script[: rendered.script.rindex("\ncase ${1-} in")]
    (tmp_path / "s.sh").write_text(f"{functions}\nread_secrets\n")
    done = subprocess.run(["bash", tmp_path / "s.sh"], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "Nodes must see /runs/.secrets: is runs_root on a file system that they share?" in done.stderr


def test_all_ranks_in_an_image_meet_where_the_first_one_says(tmp_path):
    """The Python that finds a free port is inside the image, where every rank begins at the same time."""
    case = next(case for case in CASES if str(case) == "slurm-pyxis__srun_in_image")
    profile = case.profile().model_copy(update={"runs_root": str(tmp_path)})
    job = JobSpec(name="gpt", nodes=2, launcher="srun", container=IMAGE)
    rendered = render_case(profile, job, python=PYTHON)
    attempt = tmp_path / RUN_ID / "attempts/1"
    for folder in (attempt, tmp_path / RUN_ID / "code", tmp_path / "records"):
        folder.mkdir(parents=True)
    (attempt / "job.sh").write_text(rendered.script)
    (attempt / "hostfile").write_text("node1 slots=8\nnode2 slots=8\n")
    environ = {"PATH": "/usr/bin:/bin", "LLMCTL_RECORD": str(tmp_path / "records"), "SLURM_STEP_ID": "0"}
    argv = ["bash", attempt / "job.sh", "rank", "1", "-", "-"]
    # The first rank begins last.
    ranks = [subprocess.Popen(argv, env={**environ, "SLURM_PROCID": str(rank)}) for rank in (9, 1, 2, 0)]
    assert [rank.wait(timeout=60) for rank in ranks] == [0] * 4
    found = [path.read_bytes().split(b"\0") for path in (tmp_path / "records").glob("environment.*")]
    assert len(found) == 4
    (port,) = {word for words in found for word in words if word.startswith(b"MASTER_PORT=")}
    assert (tmp_path / "records/.port").read_text().split() == [port.decode().partition("=")[2]]
