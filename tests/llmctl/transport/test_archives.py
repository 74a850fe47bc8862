"""Archives of code that are not what llmctl sends: nothing leaves the folder, and no part of it is kept."""

import io
import tarfile
from pathlib import Path

import pytest

from llmctl.transport.file_writes import unpack
from llmctl.transport.local import LocalTransport


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, target, 0o666, 4 if kind == tarfile.REGTYPE else 0
    return info


def archive(folder: Path, *members: tarfile.TarInfo) -> str:
    path = folder / "code.tar"
    with tarfile.open(path, "w") as tar:
        for info in (member("trainer/first.py"), *members):
            tar.addfile(info, io.BytesIO(b"x=1\n") if info.isreg() else None)
    return str(path)


@pytest.mark.parametrize(
    "members",
    [
        [member("../outside.py")],
        [member("trainer/../../outside.py")],
        [member("/tmp/llmctl-outside.py")],
        [member("trainer/..")],
        [member("link", tarfile.SYMTYPE, ".."), member("link/outside.py")],
        [member("link", tarfile.LNKTYPE, "trainer/first.py")],
        [member("pipe", tarfile.FIFOTYPE)],
        [member("device", tarfile.CHRTYPE)],
        [member("trainer/first.py")],
    ],
    ids=["parent", "through parent", "absolute", "ends in parent", "link", "hard link", "pipe", "device", "twice"],
)
def test_a_hostile_archive_writes_nothing(tmp_path, members):
    path = archive(tmp_path, *members)
    with pytest.raises(OSError):
        unpack(path, str(tmp_path / "runs/code"))
    assert [*tmp_path.iterdir()] == [tmp_path / "runs"] and [*(tmp_path / "runs").iterdir()] == []
    assert not Path("/tmp/llmctl-outside.py").exists()


def test_what_is_unpacked_can_be_changed_by_its_owner_only(tmp_path):
    unpack(archive(tmp_path), str(tmp_path / "code"))
    assert (tmp_path / "code/trainer/first.py").read_bytes() == b"x=1\n"
    assert all(not path.stat().st_mode & 0o022 for path in [tmp_path / "code", *(tmp_path / "code").rglob("*")])


def test_names_of_a_tree_stay_below_its_folder(tmp_path):
    (tmp_path / "a.py").write_text("")
    with pytest.raises(OSError, match="leads out of the folder"):
        LocalTransport({}).put_tree(str(tmp_path / "code"), {"../b.py": tmp_path / "a.py"})
    assert [*tmp_path.iterdir()] == [tmp_path / "a.py"]
