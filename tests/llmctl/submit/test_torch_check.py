"""Torch is imported by the first submit with an environment, and again only after a change.

The environment is a real one with a stand-in for torch, which counts its imports.
"""

import os
import shutil
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from llmctl.errors import ProfileError
from llmctl.submit.checks.torch_check import check_job_python, check_torch
from llmctl.submit.execute import execute_plan
from llmctl.submit.job import SubmitArguments
from llmctl.submit.plan import plan_submission
from tests.llmctl.submit.test_remote_submit import OtherMachine, context, write_profile

__all__ = ["context"]

TORCH = """\
from pathlib import Path
with Path("{there}/imports").open("a") as imports:
    imports.write("imported\\n")
if Path("{there}/broken").exists():
    raise ImportError("a library is missing")
from torch import version
__version__ = "2.5.1"
"""


@pytest.fixture
def there(context):
    """The home on the login node, with an environment."""
    home = Path(context.connections["far"].there)
    shutil.rmtree(home / "venv")
    venv.create(home / "venv")
    package = packages(home) / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH.format(there=home))
    (package / "version.py").write_text("cuda = None\n")
    return home


def packages(there: Path) -> Path:
    (folder,) = there.glob("venv/lib/python*/site-packages")
    return folder


def imports(there: Path) -> int:
    path = there / "imports"
    return len(path.read_text().splitlines()) if path.exists() else 0


def memory(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "here/.local/state/llmctl/torch").iterdir()
    return path


def plan(context, run_id="r", device="cpu"):
    request = SubmitArguments("c.yaml", "far", settings=(f"training.device={device}",), run_id=run_id)
    return plan_submission(context, request)


def check(context, device="cpu") -> str:
    job = plan(context, device=device).job
    transport = context.connections["far"]
    return str(check_torch(job.profile, context, transport, job.python, job.request))


def test_the_second_submit_imports_no_torch(context, there):
    printed: list[str] = []
    for run_id in ("first", "second"):
        execute_plan(plan(context, run_id), replace(context, tell=printed.append))
    assert imports(there) == 1
    assert printed[0] == printed[1] and "torch 2.5.1 for CPUs" in printed[0]


def touch(path: Path) -> None:
    seen = path.stat()
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))


CHANGES = {
    "the packages": lambda there: touch(packages(there)),
    "the version of torch": lambda there: touch(packages(there) / "torch/version.py"),
    "the libraries of torch": lambda there: (packages(there) / "torch/lib").mkdir(),
    "the interpreter": lambda there: touch(there / "venv/bin/python"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_environment_asks_again(context, there, name):
    for _ in range(2):
        check(context)
    assert imports(there) == 1
    CHANGES[name](there)
    for _ in range(2):
        check(context)
    assert imports(there) == 2


def test_other_variables_of_the_jobs_ask_again(context, there, tmp_path):
    check(context)
    write_profile(tmp_path / "here", env={"LD_LIBRARY_PATH": "/opt/other/lib"})
    check(context)
    context.connections["far"] = OtherMachine(
        {"PATH": f"{there}/bin:/usr/bin:/bin", "LD_PRELOAD": "/nonexistent"}, str(there)
    )
    check(context)
    assert imports(there) == 3


def test_a_failure_is_not_kept(context, there):
    (there / "broken").touch()
    with pytest.raises(ProfileError, match="a library is missing"):
        check(context)
    (there / "broken").unlink()
    check(context)
    assert imports(there) == 2


def test_a_run_from_a_gguf_file_needs_the_package(context, there):
    made = plan(context, "r")
    checkpoint = made.job.config.checkpoint.model_copy(update={"load": "/m.gguf"})
    config = made.job.config.model_copy(update={"checkpoint": checkpoint})
    started = replace(made, job=replace(made.job, config=config))
    check(context)
    with pytest.raises(
        ProfileError, match=r"has no gguf, which checkpoint.load needs .*\ninstall it: .* -m pip install gguf"
    ):
        execute_plan(started, context)
    (packages(there) / "gguf.py").touch()
    execute_plan(started, context)
    assert imports(there) == 2


def test_a_tracker_needs_its_package_before_the_queue(context, there):
    made = plan(context, "r")
    logging = made.job.config.logging.model_copy(update={"tensorboard_dir": "/events"})
    config = made.job.config.model_copy(update={"logging": logging})
    tracked = replace(made, job=replace(made.job, config=config))
    said = (
        r"has no tensorboard, which logging.tensorboard_dir needs .*\ninstall it: .* -m pip install tensorboard\n"
        r"or train without it: --set logging.tensorboard_dir=null"
    )
    with pytest.raises(ProfileError, match=said):
        execute_plan(tracked, context)
    logging = logging.model_copy(update={"wandb_project": "p", "mlflow_experiment": "e"})
    config = made.job.config.model_copy(update={"logging": logging})
    said = (
        r"no tensorboard, which logging.tensorboard_dir needs, and no wandb, which logging.wandb_project needs, and no "
        r"mlflow, which logging.mlflow_experiment needs .*\n"
        r"install them: .* -m pip install tensorboard wandb mlflow-skinny\nor train without them: "
        r"--set logging.tensorboard_dir=null --set logging.wandb_project=null --set logging.mlflow_experiment=null"
    )
    with pytest.raises(ProfileError, match=said):
        execute_plan(replace(made, job=replace(made.job, config=config)), context)
    (packages(there) / "tensorboard.py").touch()
    execute_plan(tracked, context)


def test_data_commands_need_numpy_and_no_torch(context, there):
    shutil.rmtree(packages(there) / "torch")
    profile = plan(context).job.profile
    with pytest.raises(ProfileError, match=r"has no torch, which the trainer needs") as caught:
        check_job_python(profile, context)
    assert "5.6 GB; without a GPU, first: " in caught.value.message
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in caught.value.message
    with pytest.raises(ProfileError, match=r"has no numpy, which this run needs .*\ninstall it: .* pip install numpy"):
        check_job_python(profile, context, packages=["numpy"])
    (packages(there) / "numpy.py").touch()
    check_job_python(profile, context, packages=["numpy"])


def test_a_refused_torch_is_not_kept(context, there):
    for _ in range(2):
        with pytest.raises(ProfileError, match="built for CPUs, and gpu has GPUs"):
            check(context, device="cuda")
    assert imports(there) == 2


def test_a_check_that_the_user_asks_for_imports_torch(context, there):
    check(context)
    (there / "broken").touch()
    with pytest.raises(ProfileError, match="a library is missing"):
        check_job_python(plan(context).job.profile, context)
    # The failure is known from now on.
    with pytest.raises(ProfileError, match="a library is missing"):
        check(context)
    assert imports(there) == 3


@pytest.mark.parametrize(
    "damage",
    [b"", b"\0 \xff a b", b"3.11 2.5.1 - 0", b"3.11 2.5.1 - " + b"0" * 64, b"1 2 - " * 1_000_000],
    ids=["empty", "bytes", "short", "wrong digest", "long"],
)
def test_a_damaged_memory_is_replaced(context, there, tmp_path, damage):
    check(context)
    memory(tmp_path).write_bytes(damage)
    assert "torch 2.5.1 for CPUs" in check(context)
    assert "torch 2.5.1 for CPUs" in check(context)
    assert imports(there) == 2


def test_a_submit_works_without_a_memory(context, there, tmp_path):
    check(context)
    path = memory(tmp_path)
    path.unlink()
    path.mkdir()
    assert "torch 2.5.1 for CPUs" in check(context)
    shutil.rmtree(path.parent)
    path.parent.touch()
    assert "torch 2.5.1 for CPUs" in check(context)
    assert imports(there) == 3
