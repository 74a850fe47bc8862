"""Entries of the list of bad nodes: written whole, and never believed from another user."""

import json
import os

import pytest

from llmctl.supervisor.bad_nodes.entries import BadNode, entry_file, read_entries, write_entry

BAD = BadNode("n3", "product speed: 0.4 of the median", "preflight", "run-1", 2, 1000.0)


@pytest.fixture
def folder(tmp_path):
    own = tmp_path / f".llmctl-{os.geteuid()}"
    (own / "nodes").mkdir(parents=True, mode=0o700)
    own.chmod(0o700)
    tmp_path.chmod(0o755)
    return own / "nodes"


def plain(**changes):
    return {**{key: value for key, value in BAD._asdict().items() if key != "kind"}, "class": BAD.kind, **changes}


def test_there_is_one_entry_per_node_and_its_failures_are_counted(folder, tmp_path):
    write_entry(str(folder), BAD)
    write_entry(str(folder), BAD._replace(cause="fell silent", kind="silent", attempt=3, time=2000.0))
    write_entry(str(folder), BAD._replace(node="n4"))
    found = read_entries(str(tmp_path))
    assert [(one["node"], one["kind"], one["failures"]) for one in found["entries"]] == [
        ("n3", "silent", 2),
        ("n4", "preflight", 1),
    ]
    assert found["remarks"] == []
    assert sorted(path.name for path in folder.iterdir()) == ["n3.json", "n4.json"]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_user_without_a_list_has_none(tmp_path):
    assert read_entries(str(tmp_path / "absent"))["entries"] == []
    assert read_entries(str(tmp_path))["remarks"] == []


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("n3", b"{", "not an entry of this list"),
        ("n3", b"[" * 9000, "not an entry of this list"),
        ("n3", b"\xff\xfe", "not an entry of this list"),
        ("n3", b" " * 10_000_000, "larger than 16384 bytes"),
        ("n3", json.dumps(plain(node="n4")).encode(), "does not name the node of its file"),
        ("n3;reboot", json.dumps(plain(node="n3;reboot")).encode(), "does not name the node of its file"),
        ("n[1-9]", json.dumps(plain(node="n[1-9]")).encode(), "does not name the node of its file"),
        ("a,b", json.dumps(plain(node="a,b")).encode(), "does not name the node of its file"),
        ("-x", json.dumps(plain(node="-x")).encode(), "does not name the node of its file"),
        ("n3\n#SBATCH -w n1", json.dumps(plain()).encode(), "does not name the node of its file"),
        ("n3", json.dumps(plain(failures=0)).encode(), "not an entry of this list"),
        ("n3", json.dumps(plain(failures=True)).encode(), "not an entry of this list"),
        ("n3", json.dumps(plain(time=1e300)).encode(), "not an entry of this list"),
        ("n3", json.dumps(plain(run="../x")).encode(), "not an entry of this list"),
        ("n3", json.dumps({**plain(), "class": "root"}).encode(), "not an entry of this list"),
        ("n3", json.dumps(plain(cause=None)).encode(), "not an entry of this list"),
    ],
)
def test_a_damaged_entry_is_left_out_with_a_remark(folder, tmp_path, name, content, why):
    (folder / f"{name}.json").write_bytes(content)
    write_entry(str(folder), BAD._replace(node="n9"))
    found = read_entries(str(tmp_path))
    assert [one["node"] for one in found["entries"]] == ["n9"]
    (remark,) = found["remarks"]
    assert "is left out of account: " in remark and why in remark and remark.isprintable()


def test_a_link_and_what_others_may_write_are_never_believed(folder, tmp_path):
    write_entry(str(folder), BAD)
    (folder / "n3.json").rename(tmp_path / "elsewhere")
    (folder / "n3.json").symlink_to(tmp_path / "elsewhere")
    write_entry(str(folder), BAD._replace(node="n4"))
    (folder / "n4.json").chmod(0o666)
    os.mkfifo(folder / "n5.json", 0o600)
    found = read_entries(str(tmp_path))
    assert found["entries"] == []
    assert [remark.split("/")[-1].split(" ")[0] for remark in found["remarks"]] == ["n3.json", "n4.json", "n5.json"]
    folder.chmod(0o777)
    (remark,) = read_entries(str(tmp_path))["remarks"]
    assert "nodes can be changed by others" in remark


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_an_entry_of_another_user_is_never_believed(folder, tmp_path):
    write_entry(str(folder), BAD)
    os.chown(folder / "n3.json", 12345, -1)
    found = read_entries(str(tmp_path))
    assert found["entries"] == []
    assert "belongs to user 12345, not to you" in found["remarks"][0]


def test_a_cause_is_one_line_of_limited_length(folder, tmp_path):
    write_entry(str(folder), BAD._replace(cause="a\n\x1b[31mb" + "c" * 1000))
    (entry,) = read_entries(str(tmp_path))["entries"]
    assert entry["cause"].startswith("a [31mb") and len(entry["cause"]) == 300


def test_an_entry_that_cannot_be_written_leaves_nothing(folder):
    (folder / "n3.json").mkdir()
    with pytest.raises(OSError):
        write_entry(str(folder), BAD)
    assert [path.name for path in folder.iterdir()] == ["n3.json"]
    assert entry_file(str(folder), "n3").endswith("/nodes/n3.json")
