"""``import llmctl``: its cost, its names, and their types."""

import subprocess
import sys
from pathlib import Path

import pytest

import llmctl
import llmctl.runs.index
import llmctl.submit.plan
from tests.waiting import HANG_S

ROOT = Path(__file__).parents[3]
SCRIPT = """
from typing import assert_type
import llmctl

run = llmctl.submit("train.yaml", cluster="abci3", nodes=8, set={"training.train_iters": 100}, time="1:00:00")
assert_type(run, llmctl.Run)
assert_type(llmctl.Run("id"), llmctl.Run)
assert_type(llmctl.run("id").status().loss, float | None)
assert_type(run.wait(timeout=3.5, check=False), llmctl.RunView)
assert_type(run.cancel(grace=1).had_ended, bool)
assert_type(run.resume(nodes=2), llmctl.Run)
assert_type(run.status().state.is_finished, bool)
assert_type(llmctl.dry_run({"model": {}}, nodes=2).script, str)
assert_type(llmctl.LlmctlError("x").exit_code, int)
assert_type(run.logs(rank=0), list[str])
assert_type(run.metrics("lm_loss"), dict[str, list[float]])
assert_type(llmctl.plan("train.yaml").fits, bool)
assert_type(llmctl.runs(state="failed"), list[llmctl.PastRun])
"""
WRONG = """
import llmctl

llmctl.submit("train.yaml", node=8)
llmctl.dry_run("train.yaml", nodes="8")
"""


def python(program: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_loads_no_other_package():
    before = set(python("import sys; print(*sys.modules)").split())
    after = set(python("import llmctl, sys; print(*sys.modules)").split())
    assert after - before <= {"llmctl", "typing", "types", "collections.abc", "typing.io", "typing.re", *TYPING}


TYPING = set(python("import typing, sys; print(*sys.modules)").split())


def test_names_of_errors_need_no_more_than_their_module():
    loaded = python("import llmctl, sys; llmctl.LlmctlError; llmctl.JobState; print(*sys.modules)").split()
    assert {name for name in loaded if name.startswith("llmctl")} == {"llmctl", "llmctl.errors", "llmctl.job_state"}


def test_every_name_is_there():
    assert set(llmctl.__all__) <= set(dir(llmctl))
    assert all(getattr(llmctl, name) is not None for name in llmctl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        llmctl.other  # noqa: B018
    assert python("from llmctl import *; print(submit.__name__, Run.__name__)") == "submit Run\n"


def test_functions_stay_functions_after_the_import_of_rooms_of_their_name():
    assert {"llmctl.submit.plan", "llmctl.runs.index"} <= sys.modules.keys()
    assert llmctl.submit.__module__ == "llmctl.api.submitting"
    assert llmctl.runs.__module__ == "llmctl.api.running"


def types_of(script: str, folder: Path) -> str:
    file = folder / "script.py"
    file.write_text(script)
    words = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--python-version",
        "3.11",
        "--cache-dir",
        str(folder),
        str(file),
    ]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S, check=False).stdout


def test_types_reach_a_users_script(tmp_path):
    assert types_of(SCRIPT, tmp_path).startswith("Success")
    found = types_of(WRONG, tmp_path)
    assert 'Unexpected keyword argument "node"' in found
    assert 'Argument "nodes" to "dry_run" has incompatible type "str"' in found
