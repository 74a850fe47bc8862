"""A ``./llmctl.yaml`` that the user did not name: what it can run is told, and another user's is refused."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from llmctl.cli.main import main
from llmctl.context import Context
from llmctl.errors import ConfigFileError
from llmctl.submit.config_file import found_config_warnings
from llmctl.submit.job import ConfigFile

CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2},
    "training": {"train_iters": 10, "seq_length": 64, "micro_batch_size": 2, "global_batch_size": 8},
    "optimizer": {"lr": 1e-3},
    "data": {"mock_data": True},
}
JOB = {"code": ["mycode"], "env": {"LD_PRELOAD": "/x.so", "OMP_NUM_THREADS": "1"}}
SETS = "its job.code (./mycode), job.env.LD_PRELOAD and job.env.OMP_NUM_THREADS can run its author's code as you"
OTHER, THIRD = 61001, 61002
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory that every user can enter, with code and a separate home."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        place = Path(made)
        place.chmod(0o755)
        (place / "mycode").mkdir()
        (place / "mycode/model.py").write_text("")
        for name in ("CONFIG", "STATE"):
            monkeypatch.setenv(f"XDG_{name}_HOME", str(place / name.lower()))
        monkeypatch.setenv("LLMCTL_RUNS_ROOT", str(place / "runs"))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        monkeypatch.delenv("LLMCTL_CLUSTER", raising=False)
        monkeypatch.delenv("LLMCTL_GROUP", raising=False)
        monkeypatch.chdir(place)
        yield place


def write(folder: Path, *, mode: int = 0o644, **sections: dict[str, object]) -> Path:
    config = folder / "llmctl.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, **sections}))
    config.chmod(mode)
    return config


def submitted(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = main(["submit", "--show-script", *arguments])
    return code, capsys.readouterr().err


def test_a_found_config_is_named_with_the_keys_that_run_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, job=JOB)
    code, said = submitted(capsys)
    assert code == 0
    assert said.splitlines()[0] == f"using ./llmctl.yaml; {SETS}"
    code, said = submitted(capsys, "llmctl.yaml")
    assert (code, "author" in said) == (0, False), "a named file is the user's word"


def test_images_mounts_and_task_files_are_named_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.yaml").write_text("task: mine\n")
    job = {"container": "docker://a/b", "mounts": ["/x:/y"]}
    write(folder, mode=0o666, job=job, evaluation={"tasks": ["arc_easy", "mine.yaml"], "interval": 5})
    code, said = submitted(capsys)
    assert code == 3
    assert "job.container (docker://a/b), job.mounts (/x:/y) and evaluation.tasks (./mine.yaml) can run" in said


def test_functions_are_named_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = {"lr_function": "os:abort", "metrics": ["a:b", "a:c"], "settings": {"limit": 3}}
    data = {"tokenizer_function": "a:Words"}
    write(folder, mode=0o666, data=data, logging={"trackers": ["a:make"]}, hooks=hooks)
    code, said = submitted(capsys)
    assert code == 3
    assert "data.tokenizer_function (a:Words), logging.trackers (a:make), hooks.lr_function (os:abort)" in said
    assert " and hooks.metrics (a:b, a:c) can run" in said


def test_a_found_config_that_runs_no_code_is_only_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(folder, mode=0o666, job={"nodes": 1, "code": [], "env": {}})
    code, said = submitted(capsys, "--env", "A=b")
    assert code == 0
    assert said.splitlines()[0] == "using ./llmctl.yaml"


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_a_found_config_that_others_can_write_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], mode: int
) -> None:
    config = write(folder, mode=mode, job=JOB)
    os.chown(config, -1, OTHER if os.geteuid() == 0 else os.getgid())
    if os.geteuid() != 0 and mode == 0o664:
        pytest.skip("only root can give a file to a group without members")
    code, said = submitted(capsys)
    assert code == 3
    assert f"./llmctl.yaml: other users can write to it (owner {config.owner()}, mode {mode:o}), and {SETS}" in said
    assert "llmctl submit llmctl.yaml" in said
    assert submitted(capsys, "llmctl.yaml")[0] == 0


@needs_root
@pytest.mark.parametrize("is_link", [False, True])
def test_a_found_config_of_another_user_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], is_link: bool
) -> None:
    config = write(folder, job=JOB)
    if is_link:
        config.rename(folder / "mine.yaml")
        config.symlink_to("mine.yaml")
    os.chown(config, OTHER, OTHER, follow_symlinks=False)
    code, said = submitted(capsys)
    assert code == 3
    assert f"./llmctl.yaml: belongs to user {OTHER}, and {SETS}" in said
    assert not (folder / "runs").exists()
    assert submitted(capsys, "llmctl.yaml")[0] == 0


@needs_root
def test_a_user_refuses_another_users_file_and_takes_the_own_and_roots(folder: Path) -> None:
    config = write(folder, job=JOB)
    for owner, is_taken in ((OTHER, False), (THIRD, True), (0, True)):
        os.chown(config, owner, owner)
        assert is_taken_by(THIRD, THIRD, folder) is is_taken, owner


@needs_root
def test_a_users_private_group_is_no_other_user(folder: Path) -> None:
    config = write(folder, mode=0o664, job=JOB)
    os.chown(config, 1, 1)  # daemon, with a group of the same name on every Linux
    assert is_taken_by(1, 1, folder)
    os.chown(config, 1, OTHER)
    assert not is_taken_by(1, 1, folder)


def is_taken_by(user: int, group: int, folder: Path) -> bool:
    """True if a process of a user takes the folder's config; in a child, which has imported all that it needs."""
    context = Context.of(("llmctl",), (), {}, folder)
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setgid(group)
        os.setuid(user)
        try:
            warning = found_config_warnings(context, ConfigFile(folder / "llmctl.yaml", {}), {"job": JOB})
        except ConfigFileError:
            os._exit(3)
        os._exit(0 if warning else 1)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended in (0, 3)
    return ended == 0
