"""Job scripts: goldens that are reviewed as a diff, and quoting that bash itself confirms.

``LLMCTL_REFRESH_GOLDEN=1 python -m pytest tests/llmctl/scripts/test_render.py`` refreshes tests/golden.
"""

import difflib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jinja2 import Environment, FileSystemLoader, meta

from llmctl import __version__
from llmctl.backends.base import JobRequest
from llmctl.paths import BUNDLED, UserFolders
from llmctl.site.job import JobSpec
from llmctl.site.profile import SCHEDULERS, ClusterProfile, EnvironmentProfile
from llmctl.submit.job import Job
from llmctl.submit.render import render
from tests.llmctl.scripts import script_cases

GOLDEN = Path(__file__).parents[2] / "golden"
REFRESH = os.environ.get("LLMCTL_REFRESH_GOLDEN") == "1"
NASTY = "a b'$(x)"
FOLDERS = UserFolders(home=Path("/home/ada"), config=Path("/none"), state=Path("/none"))
PROFILE = ClusterProfile(name="local", scheduler="local", runs_root="/runs")
RUN_ID = "gpt-261121-101500-ab12"
ON_CPU: dict[str, Any] = {"working_dir": Path("/work")}
GPU_IDS = (("0", "1"), ("2", "3"))
CASES = {
    "local__two_nodes_on_cpu": (JobSpec(name="gpt", nodes=2), PROFILE, ON_CPU),
    "local__two_nodes_on_gpus": (
        JobSpec(name="gpt", nodes=2, gpus_per_node=2, time_s=3600),
        PROFILE,
        ON_CPU,
        (("0", "1"), ("2", "3")),
    ),
    "local__command_with_everything": (
        JobSpec(name="c", env=(("X", NASTY),), secrets=("TOKEN",), command=("echo", NASTY, "--", "-n")),
        ClusterProfile(
            name="local",
            scheduler="local",
            runs_root="/runs",
            env={"FROM_PROFILE": NASTY},
            environment=EnvironmentProfile(
                modules=("cuda/12.8", NASTY), setup=("ulimit -n 65536",), kind="venv", path=f"~/{NASTY}"
            ),
        ),
        {"secrets_file": Path(f"/state/{NASTY}"), "working_dir": Path(f"/work/{NASTY}")},
    ),
}


def script_of(case: str) -> str:
    return render(job_of(*CASES[case])).script


def job_of(
    spec: JobSpec,
    profile: ClusterProfile,
    place: Mapping[str, Any],
    gpu_ids: tuple[tuple[str, ...], ...] = (),
) -> Job:
    request = JobRequest(
        profile=profile,
        job_name=RUN_ID,
        run_dir=f"/runs/{RUN_ID}",
        nodes=spec.nodes,
        ranks_per_node=len(gpu_ids[0]) if gpu_ids else 1,
        gpus_per_node=len(gpu_ids[0]) if gpu_ids else 0,
        gpu_ids=gpu_ids,
        time_s=spec.time_s,
    )
    return script_cases.job_of(spec, request, folders=FOLDERS, python="/usr/bin/python3", **place)


WHOLE = {
    "local__two_nodes_on_gpus": ("local__two_nodes_on_cpu", "local__command_with_everything"),
    "slurm__torchrun": ("slurm__srun", "slurm__mpirun"),
    "slurm-pyxis__srun_in_image": ("slurm-pyxis__torchrun_in_image",),
    "leonardo__mpirun_in_image": ("leonardo__srun_in_image", "leonardo__torchrun_in_image"),
    "abci__torchrun": ("abci__mpirun", "abci__torchrun_in_image"),
    "abci3__torchrun": ("abci3__mpirun", "abci3__torchrun_in_image"),
    "lsf__torchrun": ("lsf__mpirun",),
    "ssh__torchrun": ("ssh__mpirun",),
}
"""Scripts that are stored whole -> scripts stored as a difference to them. The head of every site is stored too."""
MAX_GOLDEN_LINES = 4000
MIN_DISTINCT_SHARE = 0.3
MAX_SCRIPT_LINES = 80


def without_version(script: str) -> str:
    return script.replace(f"llmctl {__version__}.", "llmctl VERSION.")


def head_of(cluster: str) -> str:
    """Lines in which sites differ: directives for each launcher, and variables of the last."""
    found = [case for case in script_cases.CASES if case.cluster == cluster and not case.in_container]
    head: list[str] = []
    lines: list[str] = []
    for case in found:
        lines = case.rendered().script.splitlines()
        directives = [line for line in lines[1:] if line.startswith(("#SBATCH", "#PBS", "#BSUB", "#$"))]
        head += [f"# {case.launcher}", *(line for line in directives if line not in head)]
    if "load_environment() {" in lines:
        head += lines[lines.index("load_environment() {") : lines.index("if [[ $part == launch ]]; then") - 1]
    own = ("MASTER_", "export NCCL", "export FI_", "export HF", "export OMPI", "exec mpirun")
    return "\n".join([*head, *(line.strip() for line in lines if line.lstrip().startswith(own))]) + "\n"


def text_of(name: str) -> str:
    if name in CASES:
        return without_version(script_of(name))
    return without_version(next(case for case in script_cases.CASES if str(case) == name).rendered().script)


def check_golden(path: Path, text: str) -> None:
    if REFRESH:
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("whole", WHOLE)
def test_the_script_of_every_scheduler_and_launcher_equals_its_golden(whole: str) -> None:
    script = text_of(whole)
    check_golden(GOLDEN / f"{whole}.sh", script)
    for name in WHOLE[whole]:
        lines = difflib.unified_diff(script.splitlines(), text_of(name).splitlines(), whole, name, "", "", 0, "")
        check_golden(GOLDEN / f"{name}.diff", "".join(f"{line}\n" for line in lines if not line.startswith("@@")))


@pytest.mark.parametrize("cluster", script_cases.CLUSTERS)
def test_the_head_of_every_site_equals_its_golden(cluster: str) -> None:
    check_golden(GOLDEN / f"{cluster}.head", head_of(cluster))


@pytest.mark.parametrize("name", [*CASES, *map(str, script_cases.CASES)])
def test_every_script_fits_a_page_and_is_valid_bash_without_trace_output(name: str) -> None:
    script = text_of(name)
    assert len(script.splitlines()) <= MAX_SCRIPT_LINES
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert read.stderr == ""
    assert not re.search(r"set -\w*x|eval ", script)
    assert "{{" not in script


def test_goldens_are_few_and_no_two_are_equal() -> None:
    paths = [path for path in GOLDEN.rglob("*") if path.is_file()]
    assert {path.name for path in paths} == {
        *(f"{name}.sh" for name in WHOLE),
        *(f"{name}.diff" for names in WHOLE.values() for name in names),
        *(f"{cluster}.head" for cluster in script_cases.CLUSTERS),
    }
    lines = [line for path in paths for line in path.read_text().splitlines()]
    assert len(lines) <= MAX_GOLDEN_LINES
    assert len(set(lines)) >= MIN_DISTINCT_SHARE * len(lines)


@pytest.mark.programs("shellcheck")
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_shellcheck_finds_no_problem(scheduler: str, tmp_path: Path) -> None:
    texts = {case: script_of(case) for case in CASES} if scheduler == "local" else {}
    seen = set()
    for case in script_cases.CASES:
        profile = case.profile()
        # Profiles of one scheduler differ only in quoted values, except for these.
        kind = (case.launcher, case.in_container and profile.container.runtime, bool(profile.rendezvous.port_rule))
        if profile.scheduler == scheduler and kind not in seen:
            seen.add(kind)
            texts[str(case)] = case.rendered().script
    shutil.copy(GOLDEN.parents[1] / ".shellcheckrc", tmp_path)
    for name, text in texts.items():
        (tmp_path / f"{name}.sh").write_text(text)
    scripts = [tmp_path / f"{name}.sh" for name in texts]
    done = subprocess.run(["shellcheck", "-s", "bash", *scripts], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


def test_only_lines_of_the_site_are_unquoted() -> None:
    parser = Environment(
        loader=FileSystemLoader(BUNDLED / "templates"), comment_start_string="{*", comment_end_string="*}"
    )
    parser.filters["raw"] = str
    texts = {path.name: path.read_text() for path in (BUNDLED / "templates").glob("*.j2")}
    for text in texts.values():
        meta.find_undeclared_variables(parser.parse(text))
    unquoted = {line.strip() for text in texts.values() for line in text.splitlines() if "raw }}" in line}
    # Directives are plain words of the backends, and lines of the profile's author.
    directives = {f"{prefix} {{{{ line | raw }}}}" for prefix in ("#SBATCH", "#PBS", "#BSUB", "#$")}
    own_words = {line for line in unquoted if "line | raw" not in line}
    assert unquoted - directives - own_words == {"{{ line | raw }}"}
    # These are values that the templates set themselves.
    names = set(re.findall(r"{{ (\w+) \| raw }}", "\n".join(own_words)))
    assert names == {"job_id", "job_number", "supervisor"}
    stated = {name for text in texts.values() for name in re.findall(r"{% set (\w+) = (?!.*profile|.*job\.)", text)}
    assert names <= stated


def test_no_line_of_a_value_looks_like_a_directive() -> None:
    """Grid Engine reads "#$" at the beginning of any line of a script as a directive."""
    value = "a\n#$ -N hijacked\n#SBATCH --nodes=9\n#PBS -N x\n#BSUB -J x\n"
    for case in script_cases.CASES:
        rendered = case.rendered(env=(("NOTE", value),), command=("echo", value, f"{value}'"))
        plain = case.rendered(env=(("NOTE", "a"),), command=("echo", "a", "a"))
        kept = [line for line in rendered.script.splitlines() if line.startswith("#")]
        assert kept == [line for line in plain.script.splitlines() if line.startswith("#")]
