"""Several nodes that prepare the same data: status files, and failure of a node."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.data.commands.preprocess import main
from trainer.data.indexed.cache_entry import LEFT_OVER_SECONDS
from trainer.data.prepare import chunks, node_status, nodes, pipeline
from trainer.data.prepare.progress import Progress

NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--append-eod"]


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks of some kilobytes, and waits of a moment."""
    monkeypatch.setattr(chunks, "SMALLEST_CHUNK", 4096)
    monkeypatch.setattr(nodes, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(nodes, "SILENT_SECONDS", 0.01)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write JSON lines that fill some chunks."""
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} 1 2 3"}) + "\n" for number in range(900)))
    return path


def run(source: Path, node: int, *more: str) -> int:
    nodes = ["--nodes", "2", "--node", str(node), "--attempt", "run.0"]
    return main(["--input", str(source), "--output-prefix", str(source.parent / "out/n"), *nodes, *NUMBERS, *more])


def contents(source: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (source.parent / "out").iterdir()}


def test_the_first_node_ends_with_the_error_of_another(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = source.read_bytes().splitlines(keepends=True)
    of_node_1 = 4096 // len(lines[0]) + 40
    source.write_bytes(b"".join([*lines[:of_node_1], b"{\n", *lines[of_node_1:]]))
    assert run(source, 1, "--attempt", "run.1") == 3
    problem = f"{source}:{of_node_1 + 1}: is not a line of JSON"
    assert problem in capsys.readouterr().err
    assert run(source, 0, "--attempt", "run.1") == 3
    said = capsys.readouterr().err
    assert f"node 1 failed: {problem}" in said
    assert "parts are done and kept" in said
    # Another attempt does not see the failure.
    for node in (1, 0):
        assert run(source, node, "--attempt", "run.2", "--on-error", "skip") == 0
    assert sorted(contents(source)) == [f"n_text_document.{part}" for part in ("bin", "idx", "json")]


def test_the_first_node_notices_the_error_while_it_encodes(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_status, "_BEAT_SECONDS", 0.0)
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join([*lines[:200], b"{\n", *lines[200:]]))
    attempt = ("--attempt", "run.1")
    assert run(source, 1, *attempt) == 3
    assert run(source, 0, *attempt) == 3
    assert f"node 1 failed: {source}:201: is not a line of JSON" in capsys.readouterr().err
    shards = (source.parent / "out/n.preparing").glob("*/*.shard")
    assert all(int(shard.stem) % 2 for shard in shards)


def test_a_node_that_a_launcher_ends_names_the_failed_node(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the first failure srun ends all tasks, and returns the highest exit code."""

    def terminate(_: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(node_status, "_SECONDS_TO_REPORT", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as at_the_start:
        at_the_start.setattr(pipeline, "_check_text_files", terminate)
        assert run(source, 0, "--attempt", "run.1") == 143
        assert capsys.readouterr().err == "llmctl data prepare: ended by SIGTERM\n"
    lines = source.read_bytes().splitlines(keepends=True)
    source.write_bytes(b"".join([*lines[:200], b"{\n", *lines[200:]]))
    assert run(source, 1, "--attempt", "run.1") == 3
    capsys.readouterr()
    monkeypatch.setattr(pipeline, "wait_for_nodes", lambda *_: terminate(None))
    assert run(source, 0, "--attempt", "run.1") == 3
    assert f"llmctl data prepare: node 1 failed: {source}:201: is not a line" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--input", "none.jsonl"), "none.jsonl: cannot be read: No such file or directory"),
        (("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "none.json"), "none.json: cannot read"),
        (("--input", "lines"), "lines: begins like JSON lines"),
    ],
)
def test_a_failure_before_the_start_is_noticed(
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    says: str,
) -> None:
    """A file may be missing on one node only, for example without a mount.

    This node may start first.
    """
    monkeypatch.chdir(source.parent)
    Path("lines").write_text('{"text": "1"}\n')
    assert run(source, 1, "--attempt", "run.1", "--check", *more) == 3
    assert not (source.parent / "out").exists()
    assert run(source, 1, "--attempt", "run.1", *more) == 3
    capsys.readouterr()
    assert run(source, 0, "--attempt", "run.1") == 3
    said = capsys.readouterr().err
    assert "node 1 failed: " in said
    assert says in said
    assert said.count("\n") == 1
    assert [run(source, node, "--attempt", "run.2") for node in (1, 0)] == [0, 0]
    assert sorted(contents(source)) == [f"n_text_document.{part}" for part in ("bin", "idx", "json")]


def test_nodes_without_an_attempt_are_refused(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, 0, "--attempt", "") == 3
    assert "--attempt: give all nodes of one start the same name" in capsys.readouterr().err


def test_the_wait_for_a_silent_node_is_limited(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, 0) == 3
    said = capsys.readouterr().err
    assert "waited for 2 of 5 parts (2 of node 1), and there was no sign of life for 0 s; read that node's log" in said
    # All parts are done, but the node has not reported its end in this attempt.
    assert run(source, 1) == 0
    assert run(source, 0, "--attempt", "another") == 3
    assert "waited for the end of node 1" in capsys.readouterr().err
    assert run(source, 0) == 0


def test_a_node_is_one_process(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(source, 1) == 0
    with (source.parent / "out/n.preparing/node-1.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        capsys.readouterr()
        assert run(source, 1) == 3
        said = capsys.readouterr().err
        assert "another process is already node 1; give each node a different --node" in said
        lock.write(b"process 7 on n9")
        lock.flush()
        assert run(source, 1) == 3
        assert "process 7 on n9 is already node 1" in capsys.readouterr().err
        assert run(source, 0) == 0


def test_a_node_that_starts_after_the_end_does_nothing(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [run(source, node) for node in (1, 0)] == [0, 0]
    before = contents(source)
    capsys.readouterr()
    assert run(source, 1) == 0
    assert "out/n: is already finished; node 1 has nothing to do" in capsys.readouterr().err
    assert contents(source) == before
    # With other data, the preparation begins, whichever node is first.
    source.write_text(source.read_text() * 2)
    assert [run(source, node) for node in (1, 0)] == [0, 0]
    assert contents(source)["n_text_document.bin"] == before["n_text_document.bin"] * 2


def test_the_others_wait_for_a_first_node_that_starts_late(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output looks finished, but the first node starts over and awaits the others."""
    assert run(source, 1) == 0
    plan = source.parent / "out/n.preparing/plan.json"
    content = plan.read_text()
    assert run(source, 0) == 0
    clock = 0.0

    def sleep(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        if clock > 500:
            plan.parent.mkdir(exist_ok=True)
            plan.write_text(content)

    monkeypatch.setattr(nodes, "SILENT_SECONDS", 600.0)
    monkeypatch.setattr(nodes, "_POLL_SECONDS", 1.0)
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: clock, sleep=sleep))
    assert run(source, 1) == 0
    said = capsys.readouterr().err
    assert "looks finished; waiting 600 s for node 0" in said
    assert "is already finished" not in said
    assert list(plan.parent.glob("*/*.shard"))


def test_an_input_without_text_leaves_no_plan_behind(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = source.read_text()
    source.write_text('{"text": ""}\n' * 3)
    assert [run(source, node) for node in (1, 0)] == [0, 3]
    assert "there is no text in the input" in capsys.readouterr().err
    source.write_text(text)
    assert [run(source, node) for node in (1, 0)] == [0, 0]


def test_the_first_node_removes_leftovers_of_kills(source: Path) -> None:
    assert run(source, 1) == 0
    (parts,) = (source.parent / "out/n.preparing").glob("parts-*")
    old, young = (parts / f"{name}.partial" for name in ("old", "young"))
    for partial in (old, young):
        partial.touch()
    long_ago = time.time() - LEFT_OVER_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    assert run(source, 0, "--attempt", "another") == 3
    assert not old.exists()
    assert young.exists()


def test_another_plan_of_several_nodes_names_the_folder_to_remove(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(source, 1) == 0
    capsys.readouterr()
    assert run(source, 0, "--json-keys", "other") == 3
    folder = source.parent / "out/n.preparing"
    assert f"or remove {folder} to start over" in capsys.readouterr().err
    # The failure is reported to the first node, too.
    assert run(source, 1, "--json-keys", "other", "--attempt", "run.2") == 3
    capsys.readouterr()
    assert run(source, 0, "--attempt", "run.2") == 3
    assert f"node 1 failed: {folder}: holds work that was begun with a different --json-keys" in capsys.readouterr().err


def test_part_files_without_their_plan_are_not_used(source: Path) -> None:
    assert run(source, 1) == 0
    (source.parent / "out/n.preparing/plan.json").unlink()
    other = ("--vocab-size", "66000")
    assert [run(source, node, *other) for node in (1, 0)] == [0, 0]
    found = contents(source)
    shutil.rmtree(source.parent / "out")
    assert [run(source, node, *other) for node in (1, 0)] == [0, 0]
    assert contents(source) == found


def test_each_node_counts_its_own_share(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Progress] = []
    begun_with: list[int] = []

    class Noted(Progress):
        def __init__(self, total: int, documents: int = 0) -> None:
            super().__init__(total, documents)
            begun_with.append(total)
            seen.append(self)

    monkeypatch.setattr(pipeline, "Progress", Noted)
    size = source.stat().st_size
    assert run(source, 1) == 0
    assert begun_with == [size // 2]
    assert seen[0]._done == seen[0]._total < size * 3 / 5
    assert run(source, 0) == 0
    assert seen[0]._done + seen[1]._done == size
