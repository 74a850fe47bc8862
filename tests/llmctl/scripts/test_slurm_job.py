"""End of Slurm's job.sh on a signal, with fake srun, squeue and scancel that know one step."""

import json
import subprocess
from pathlib import Path

from llmctl.site.job import JobSpec
from llmctl.site.profile import ClusterProfile
from tests.llmctl.scripts.script_cases import RUN_ID, install, render_case
from tests.waiting import HANG_S

LAUNCHERS = Path(__file__).parents[2] / "standins" / "launchers"
RUN_STEP = """#!/bin/bash
echo "$$" >"$BED/srun.pid"
printf '%s\\n' "$@" >"$BED/srun.arguments"
while [[ $1 != bash ]]; do shift; done
SLURM_STEP_ID=0 SLURM_PROCID=0 setsid "$@" &
echo "$!" >"$BED/step.pid"
wait "$!"
"""
SQUEUE = """#!/bin/bash
[[ -e $BED/silent ]] && exit 1
printf '4242.batch|x-1\\n4242.1|bash\\n'
[[ -e $BED/stepless ]] || printf '4242.0|%s\\n' "$(sed -n s/^--job-name=//p "$BED/srun.arguments")"
"""
SCANCEL = """#!/bin/bash
echo "$*" >>"$BED/scancel.arguments"
kill -TERM -- -"$(<"$BED/step.pid")"
"""
WARNED = """
pid=$(sed -E 's/.*"pid": ([0-9]+),.*/\\1/' "$LLMCTL_RUN_DIR/attempts/1/started.json")
kill -USR1 "$pid"
sleep 6000
"""


def warned_job(folder: Path, time_s: int | None) -> tuple[dict[str, object], list[str], bool]:
    """Send USR1 to job.sh of a COMMAND; returns exit.json, scancel's arguments, and if secrets remain."""
    for name, text in (("srun", RUN_STEP), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    secrets = folder / "secrets"
    secrets.write_bytes(b"TOKEN\0hidden\0")
    profile = ClusterProfile(name="s", scheduler="slurm", runs_root=str(folder / "runs"))
    job = JobSpec(name="c", time_s=time_s, secrets=("TOKEN",), command=("bash", "-c", WARNED))
    rendered = render_case(profile, job, ranks_per_node=1, working_dir=folder, secrets_file=secrets)
    run_dir = folder / "runs" / RUN_ID
    install(rendered, run_dir)
    environ = {"PATH": f"{folder}:{LAUNCHERS}:/usr/bin:/bin", "HOME": str(folder), "BED": str(folder)}
    environ |= {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "node1", "LLMCTL_RECORD": str(folder)}
    subprocess.run(["bash", run_dir / "job.sh"], env=environ, timeout=HANG_S, check=False)
    ending = json.loads((run_dir / "attempts/1/exit.json").read_text())
    arguments = folder / "scancel.arguments"
    return ending, arguments.read_text().splitlines() if arguments.exists() else [], secrets.exists()


def test_a_warning_long_before_the_limit_keeps_the_secrets_for_another_start(tmp_path: Path) -> None:
    ending, scancel_arguments, has_secrets = warned_job(tmp_path, 7200)
    assert (ending["reason"], ending["signal"], has_secrets) == ("stopped", "TERM", True)
    # An attached shell, step 1, gets no signal.
    assert scancel_arguments == ["--signal=TERM 4242.0"]


def test_a_warning_near_the_limit_means_the_time_limit(tmp_path: Path) -> None:
    (tmp_path / "silent").touch()
    ending, scancel_arguments, has_secrets = warned_job(tmp_path, 300)
    assert (ending["reason"], ending["signal"], has_secrets) == ("timeout", "USR1", False)
    assert scancel_arguments == ["--signal=TERM 4242"]


def test_a_step_that_has_not_begun_ends_with_srun(tmp_path: Path) -> None:
    (tmp_path / "stepless").touch()
    ending, scancel_arguments, _ = warned_job(tmp_path, None)
    assert (ending["reason"], ending["code"], scancel_arguments) == ("timeout", 143, [])
