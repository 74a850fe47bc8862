"""Code snapshots of a run: our trainer by content, the user's project by git."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from llmctl.errors import ConfigFileError
from llmctl.paths import TRAINER, UserFolders
from llmctl.submit import bundled_code, user_code
from llmctl.submit.snapshot import send_code, store_trainer
from llmctl.submit.user_code import find_user_code
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
    monkeypatch.setattr(user_code, "LIMIT_MB", 1e-5)
    with pytest.raises(ConfigFileError, match="in 2 files, above the limit"):
        find_user_code([f"{tmp_path}/x", f"{tmp_path}/y"], TRANSPORT)


def test_the_trainer_snapshot_is_addressed_by_content_and_runs(tmp_path, monkeypatch):
    folders = UserFolders(tmp_path, config=tmp_path, state=tmp_path / "state")
    folder = store_trainer(tmp_path, TRANSPORT, folders)
    assert store_trainer(tmp_path, TRANSPORT, folders) == folder
    assert folder.parent == tmp_path / f".llmctl-{os.geteuid()}" / "code"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not list(folder.rglob("__pycache__"))
    (tmp_path / "run").mkdir()
    sent = send_code(tmp_path / "run", None, TRANSPORT, folder.parents[1].name, folders, with_trainer=True)
    assert sent.trainer == folder.name
    assert {name: hashlib.sha256((tmp_path / "run" / name).read_bytes()).hexdigest() for name in sent.checksums} == (
        sent.checksums
    )
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
    monkeypatch.setattr(bundled_code, "TRAINER", changed)
    assert store_trainer(tmp_path, TRANSPORT, folders) != folder


def test_checksums_are_remembered_until_a_file_changes(tmp_path, monkeypatch):
    folders = UserFolders(tmp_path, config=tmp_path, state=tmp_path / "state")
    code = tmp_path / "trainer"
    code.mkdir()
    (code / "a.py").write_text("a = 1\n")
    (tmp_path / "csrc").mkdir()
    monkeypatch.setattr(bundled_code, "TRAINER", code)
    monkeypatch.setattr(bundled_code, "BUNDLED", tmp_path)
    hashed = []
    real = bundled_code.checksums_of
    monkeypatch.setattr(bundled_code, "checksums_of", lambda files: hashed.append(sorted(files)) or real(files))
    monkeypatch.setattr(bundled_code, "_SETTLED_S", 1e9)
    first = bundled_code.trainer_code(folders)
    assert not (tmp_path / "state").exists()  # just written: it could change again without a trace
    monkeypatch.setattr(bundled_code, "_SETTLED_S", -1.0)
    assert [bundled_code.trainer_code(folders) for _ in range(3)] == [first] * 3
    assert hashed == [["trainer/a.py"]] * 2
    kept = (code / "a.py").stat()
    (code / "a.py").write_text("a = 2\n")  # the same size, and below the same time of change
    os.utime(code / "a.py", ns=(kept.st_atime_ns, kept.st_mtime_ns))
    second = bundled_code.trainer_code(folders)
    assert second.address != first.address and second.checksums == real(second.files)
    for broken in (b"", b"{", b"[]", b'{"facts": 1}'):
        (tmp_path / "state/code/trainer.json").write_bytes(broken)
        assert bundled_code.trainer_code(folders) == second
