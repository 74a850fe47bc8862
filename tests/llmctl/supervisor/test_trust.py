"""Files that a job refuses to run: of other users, or changed since the submission."""

import os
import stat
import struct
from pathlib import Path

import pytest

from llmctl.supervisor.trust import TrustError, check_root, check_submission, why_distrusted
from tests.llmctl.submitted_files import record_contents

ALICE = 61001
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with linked and own code, as a submission leaves it."""
    own = tmp_path / "runs/.llmctl-0"
    for folder in ("code/abc/trainer", "code/abc/csrc"):
        (own / folder).mkdir(parents=True)
    (own / "code/abc/trainer/__init__.py").write_text("x = 1\n")
    run = tmp_path / "runs/demo"
    (run / "code/user").mkdir(parents=True)
    (run / "own").symlink_to("../.llmctl-0")
    (run / "code/trainer").symlink_to("../own/code/abc/trainer")
    for name in ("job.sh", "job.json", "config.yaml", "code/user/mine.py"):
        (run / name).write_text(f"{name}\n")
    for path in [tmp_path / "runs", *(tmp_path / "runs").rglob("*")]:
        if not path.is_symlink():
            path.chmod(0o755)
    record_contents(run)
    return run


def refusal(run_dir: Path) -> str:
    """Reason for which a job would start nothing; empty if it would start."""
    try:
        check_submission(str(run_dir), 1)
    except TrustError as error:
        return str(error)
    return ""


def test_a_run_is_started_as_submitted(run_dir):
    assert refusal(run_dir) == ""
    assert why_distrusted(str(run_dir)) == ""


@needs_root
@pytest.mark.parametrize(
    "name",
    [".", "run.json", "job.sh", "job.json", "config.yaml", "code", "code/user", "code/user/mine.py"]
    + [
        f"../.llmctl-0{path}"
        for path in ("", "/code", "/code/abc", "/code/abc/trainer", "/code/abc/trainer/__init__.py")
    ],
)
def test_a_file_of_another_user_is_named_with_its_owner(run_dir, name):
    path = Path(os.path.normpath(run_dir / name))
    os.chown(path, ALICE, -1)
    # Root trusts root and itself: the same check as alice's victim makes.
    assert refusal(run_dir) == f"{path} belongs to user {ALICE}, not to you"
    assert why_distrusted(str(run_dir)) == refusal(run_dir)


@pytest.mark.parametrize("name", [".", "job.json", "code/user", "code/user/mine.py", "../.llmctl-0/code/abc"])
@pytest.mark.parametrize("more", [stat.S_IWGRP, stat.S_IWOTH], ids=["group", "others"])
def test_a_file_that_others_may_change_is_named_with_its_mode(run_dir, name, more):
    path = Path(os.path.normpath(run_dir / name))
    path.chmod(stat.S_IMODE(path.stat().st_mode) | more)
    assert refusal(run_dir) == f"{path} can be changed by others: its mode is {stat.S_IMODE(path.stat().st_mode):04o}"


def let_write(path: Path, uid: int) -> None:
    """Let another user write by an access control list, which leaves the permissions of the group as they are.

    The extended attribute of acl(5): version 2, then tag, permissions and id of each entry.
    """
    user_obj, user, group_obj, mask, other, nobody = 0x01, 0x02, 0x04, 0x10, 0x20, 0xFFFFFFFF
    entries = [(user_obj, 7, nobody), (user, 7, uid), (group_obj, 5, nobody), (mask, 7, nobody), (other, 0, nobody)]
    data = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", data)
    except OSError as error:
        pytest.skip(f"{path}: no access lists on this file system: {error.strerror}")


@pytest.mark.parametrize("name", [".", "code/user"])
def test_an_access_list_that_lets_another_user_write_is_seen(run_dir, name):
    let_write(run_dir / name, ALICE)
    assert refusal(run_dir).startswith(f"{run_dir}{'/code/user' if name != '.' else ''} can be changed by others")


def test_a_pipe_or_link_in_the_place_of_a_file_is_refused_at_once(run_dir):
    (run_dir / "job.json").unlink()
    os.mkfifo(run_dir / "job.json", 0o600)
    assert refusal(run_dir).startswith(f"{run_dir}/job.json is a pipe of ")
    (run_dir / "job.json").unlink()
    (run_dir / "job.json").symlink_to("job.sh")
    assert refusal(run_dir).startswith(f"{run_dir}/job.json is a symbolic link of ")


def test_code_outside_the_folder_of_the_runs_is_refused(run_dir, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (run_dir / "code/trainer").unlink()
    (run_dir / "code/trainer").symlink_to(tmp_path / "elsewhere")
    assert (
        refusal(run_dir) == f"{run_dir}/code/trainer leads to {tmp_path}/elsewhere, which is not below {run_dir.parent}"
    )


@pytest.mark.parametrize("name", ["job.sh", "config.yaml", "sha256sums.1"])
def test_a_change_after_the_submission_is_named(run_dir, name):
    with (run_dir / name).open("a") as file:
        file.write("more\n")
    assert (
        refusal(run_dir)
        == f"{run_dir}/{name} was changed after the submission; restore the file, or submit the run again"
    )


def test_the_folder_of_another_run_in_the_place_of_this_one_is_refused(run_dir):
    """Its owner is the same, and nobody but its owner could have written its files."""
    other = run_dir.with_name("other")
    run_dir.rename(other)
    assert refusal(other) == f"{other}/run.json is the record of another run, demo"


def test_a_submission_that_the_record_does_not_know_is_refused(run_dir):
    with pytest.raises(TrustError, match="run.json has no submission 2"):
        check_submission(str(run_dir), 2)
    (run_dir / "run.json").write_text("{}")
    assert refusal(run_dir).endswith("run.json has no submission 1")


@pytest.mark.parametrize("mode", [0o775, 0o777, 0o2775])
def test_a_folder_of_runs_in_which_others_can_rename_needs_the_sticky_bit(run_dir, mode):
    root = run_dir.parent
    root.chmod(mode)
    assert f"{root} has no sticky bit" in refusal(run_dir) and f"chmod +t {root}" in refusal(run_dir)
    assert why_distrusted(str(run_dir)) == "", "a run there can be cancelled"
    root.chmod(mode | stat.S_ISVTX)
    assert refusal(run_dir) == ""
    check_root(str(root))
