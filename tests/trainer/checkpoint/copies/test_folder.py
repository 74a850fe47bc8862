"""The folder of copies on a node: safe beside other users, atomic, and gone at the end."""

import os
import stat
import time
from pathlib import Path

import pytest

from trainer.checkpoint.copies.folder import (
    ABANDONED_S,
    CopyFolder,
    CopyName,
    is_in_memory,
    remove_abandoned,
)

NAME = CopyName(rank=3, iteration=20, holder=7)


def filled(parent, name=NAME, content=b"abc"):
    folder = CopyFolder.open(parent, "run")
    with folder.create(name) as file:
        file.write(content)
    folder.publish(name, {"attempt": 1})
    return folder


def test_a_copy_is_there_only_once_it_is_complete(tmp_path):
    folder = CopyFolder.open(tmp_path / "new", "run")
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    with folder.create(NAME) as file:
        file.write(b"abc")
        assert folder.headers() == {}
    folder.publish(NAME, {"attempt": 1})
    assert {name: header["attempt"] for name, header in folder.headers().items()} == {NAME: 1}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in folder.path.iterdir())
    target = bytearray(3)
    folder.read_into(NAME, memoryview(target))
    assert target == b"abc"
    with pytest.raises(OSError, match="ends at byte 3 of 4"):
        folder.read_into(NAME, memoryview(bytearray(4)))


def test_an_altered_header_is_none(tmp_path):
    folder = filled(tmp_path)
    header = folder.path / f"{NAME}.json"
    header.write_text(header.read_text().replace('"attempt": 1', '"attempt": 2'))
    assert folder.headers() == {}


def test_only_the_copies_that_are_wanted_stay(tmp_path):
    folder = filled(tmp_path)
    later = NAME._replace(iteration=30)
    filled(tmp_path, later)
    with folder.create(NAME._replace(iteration=25)):
        (folder.path / "of the user").touch()
    assert folder.size > 6
    folder.remove(lambda name: name.iteration >= 30)
    assert sorted(path.name for path in folder.path.iterdir()) == ["of the user", f"{later}", f"{later}.json"]
    folder.discard()
    assert [path.name for path in folder.path.iterdir()] == ["of the user"]
    (folder.path / "of the user").unlink()
    folder.discard()
    assert not folder.path.exists()


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "llmctl-copies-run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="llmctl-copies-run is a link"):
        CopyFolder.open(tmp_path, "run")


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path):
    folder = filled(tmp_path)
    (tmp_path / "secret").write_bytes(b"abc")
    (folder.path / f"{NAME}").unlink()
    (folder.path / f"{NAME}").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        folder.read_into(NAME, memoryview(bytearray(3)))
    (folder.path / f".{NAME}.tmp").symlink_to(tmp_path / "secret")
    folder.create(NAME).close()
    assert (tmp_path / "secret").read_bytes() == b"abc"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_folder_of_another_user_is_refused(tmp_path):
    (tmp_path / "llmctl-copies-run").mkdir()
    os.chown(tmp_path / "llmctl-copies-run", 12345, 12345)
    with pytest.raises(OSError, match="llmctl-copies-run belongs to user 12345"):
        CopyFolder.open(tmp_path, "run")
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "link", 12345, 12345, follow_symlinks=False)
    with pytest.raises(OSError, match="link is a link of another user"):
        CopyFolder.open(tmp_path / "link", "other")


def test_what_killed_runs_have_left_goes_after_a_day(tmp_path):
    old, young = (CopyFolder.open(tmp_path, name).path for name in ("old", "young"))
    own = filled(tmp_path)
    (old / f"{NAME}").touch()
    long_ago = time.time() - ABANDONED_S - 60
    os.utime(old, (long_ago, long_ago))
    os.utime(own.path, (long_ago, long_ago))
    remove_abandoned(tmp_path, own.path)
    assert not old.exists() and young.exists() and own.headers()


def test_files_in_memory_are_told_from_those_on_a_disk():
    assert is_in_memory(Path("/dev/shm")) and not is_in_memory(Path("/proc"))
