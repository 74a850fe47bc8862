"""Code snapshots of a run: our trainer by content, the user's project by git."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from llmctl.errors import ConfigFileError
from llmctl.paths import TRAINER
from llmctl.submit import snapshot
from llmctl.submit.snapshot import find_user_code, send_code, store_trainer
from llmctl.transport.local import LocalTransport

TRANSPORT = LocalTransport(
    {
        "PATH": "/usr/bin:/bin",
        "HOME": "/nonexistent",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        **{f"GIT_{who}_{what}": "a@b.example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
)


def git(folder: Path, *arguments: str) -> str:
    done = TRANSPORT.run(["git", "-C", str(folder), *arguments], timeout_s=30)
    assert done.exit_status == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "a.py").write_text("a = 1\n")
    (root / ".gitignore").write_text("*.log\n")
    git(root.parent, "init", "-q", str(root))
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    return root


def names(code) -> list[str]:
    return [name for _, name in code.files]


def test_a_snapshot_has_tracked_changed_and_untracked_files_only(project, tmp_path):
    clean = find_user_code([f"{project}/."], TRANSPORT)
    assert (names(clean), clean.diff) == ([".gitignore", "pkg/a.py"], None)
    assert clean.commit == git(project, "rev-parse", "HEAD")
    (project / "pkg" / "a.py").write_text("a = 2\n")
    (project / "pkg" / "new file.py").write_text("b = 1\n")
    (project / "pkg" / "big.log").write_text("x")
    (project / ".gitignore").unlink()
    (project / ".git/info/exclude").write_text("*.log\n")
    changed = find_user_code([str(project / "pkg")], TRANSPORT)
    assert names(changed) == ["pkg/a.py", "pkg/new file.py"]
    assert changed.commit == clean.commit
    assert changed.diff is not None
    TRANSPORT.put_tree(f"{tmp_path}/code/user", {name: path for path, name in changed.files})
    assert (tmp_path / "code/user/pkg/a.py").read_text() == "a = 2\n"
    (project / "pkg" / "new file.py").write_text("b = 2\n")
    assert find_user_code([str(project / "pkg")], TRANSPORT).diff != changed.diff
    assert names(find_user_code([str(project)], TRANSPORT)) == ["project/pkg/a.py", "project/pkg/new file.py"]


def test_a_folder_without_git_is_copied_whole(tmp_path):
    (tmp_path / "lib" / "__pycache__").mkdir(parents=True)
    (tmp_path / "lib" / "__pycache__" / "m.pyc").write_text("")
    (tmp_path / "lib" / "m.py").write_text("")
    (tmp_path / "one.py").write_text("")
    code = find_user_code([f"{tmp_path}/lib", f"{tmp_path}/one.py"], TRANSPORT)
    assert names(code) == ["lib/m.py", "one.py"]
    assert (code.commit, code.diff) == (None, None)


def test_files_that_cannot_be_copied_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigFileError, match="job.code: there is no"):
        find_user_code([f"{tmp_path}/none"], TRANSPORT)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "m.py").write_text("1234567890")
    with pytest.raises(ConfigFileError, match="would both become code/user/m.py"):
        find_user_code([f"{tmp_path}/x/.", f"{tmp_path}/y/."], TRANSPORT)
    monkeypatch.setattr(snapshot, "LIMIT_MB", 1e-5)
    with pytest.raises(ConfigFileError, match="in 2 files, above the limit"):
        find_user_code([f"{tmp_path}/x", f"{tmp_path}/y"], TRANSPORT)


def test_the_trainer_snapshot_is_addressed_by_content_and_runs(tmp_path, monkeypatch):
    folder = store_trainer(tmp_path, TRANSPORT)
    assert store_trainer(tmp_path, TRANSPORT) == folder
    assert folder.parent == tmp_path / ".code" / "nonexistent"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not list(folder.rglob("__pycache__"))
    (tmp_path / "run").mkdir()
    assert send_code(tmp_path / "run", None, TRANSPORT, with_trainer=True) == folder.name
    assert {path.name for path in (tmp_path / "run/code").iterdir()} == {"trainer", "csrc", "supervisor", "user"}
    moved = tmp_path.with_name(f"{tmp_path.name}-moved")
    shutil.copytree(tmp_path, moved, symlinks=True)
    done = subprocess.run(
        ["python3", "-c", "import trainer; print(trainer.__file__)"],
        cwd=moved / "run/code",
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.stdout.strip() == str(moved / "run/code/trainer/__init__.py")
    changed = tmp_path / "changed" / "trainer"
    shutil.copytree(TRAINER, changed, ignore=shutil.ignore_patterns("__pycache__"))
    (changed / "__init__.py").write_text("x = 1\n")
    monkeypatch.setattr(snapshot, "TRAINER", changed)
    assert store_trainer(tmp_path, TRANSPORT) != folder


def as_user(uid: int, root: Path) -> None:
    """In a process of its own: store the trainer as another user of the group 61000, under umask 077."""
    os.setgroups([61000])
    os.setgid(61000)
    os.setuid(uid)
    os.umask(0o077)
    store_trainer(root, LocalTransport({"PATH": "/usr/bin:/bin", "HOME": f"/home/user{uid}"}))


def stores_as(uid: int, root: Path) -> bool:
    """True if a user can store the trainer below ``root``."""
    pid = os.fork()
    if pid == 0:
        try:
            as_user(uid, root)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two users")
def test_two_users_share_a_runs_root_and_neither_runs_planted_code() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        root = Path(folder, "runs")
        root.mkdir()
        os.chown(root, 61001, 61000)
        root.chmod(0o2775)
        assert stores_as(61001, root) and stores_as(61002, root), "umask 077 of the first user locks the second out"
        assert sorted(path.name for path in (root / ".code").iterdir()) == ["user61001", "user61002"]
        (root / ".code/user61003").mkdir(mode=0o777)
        os.chown(root / ".code/user61003", 61001, 61000)
        assert not stores_as(61003, root), "a folder that another user made is trusted"
        (root / ".code/user61004").symlink_to("user61001")
        assert not stores_as(61004, root), "a link of another user is trusted"
