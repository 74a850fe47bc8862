"""Kill a preparation at each critical point: before each rename and each removal."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from trainer.data.commands.preprocess import main
from trainer.data.prepare import chunks, merge
from trainer.data.prepare.encoding import Block
from trainer.data.prepare.part_file import DamagedPartFileError, PartFileWriter, open_part_file

CHANGES = ("os.rename", "os.remove", "os.rmdir")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Command for two chunks, each of which is merged and saved individually."""
    monkeypatch.setattr(chunks, "SMALLEST_CHUNK", 4096)
    monkeypatch.setattr(merge, "SAVE_BYTES", 0)
    source = tmp_path / "in.jsonl"
    lines = (json.dumps({"text": f"{number} 1 2 3", "title": f"{number}"}) + "\n" for number in range(200))
    source.write_text("".join(lines))
    numbers = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000", "--append-eod"]
    return ["--input", str(source), *numbers]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run_and_die(arguments: Sequence[str], place: int) -> None:
    """Run a preparation that is killed just before change number ``place``."""
    seen = 0

    def look(event: str, _: object) -> None:
        nonlocal seen
        if event in CHANGES:
            if seen == place:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(look)
    sys.exit(main(arguments))


def is_killed(arguments: Sequence[str], place: int) -> bool:
    process = multiprocessing.get_context("fork").Process(target=run_and_die, args=(arguments, place))
    process.start()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def begin(arguments: Sequence[str], folder: Path) -> Path:
    """Kill a preparation soon after its first part file exists; return the part file."""
    place = 0
    while not (part_files := list(folder.glob("*/*.shard"))):
        assert is_killed(arguments, place)
        place += 1
    return part_files[0]


def check_whole_or_none(key: str, found: dict[str, bytes], *pairs: dict[str, bytes]) -> None:
    """Check that index and tokens, and manifest and index, come from the same preparation."""
    index, tokens, manifest = (f"n_{key}_document.{part}" for part in ("idx", "bin", "json"))
    whole = next((pair for pair in pairs if pair[index] == found.get(index)), None)
    if whole is None:
        assert index not in found
    else:
        assert found[tokens] == whole[tokens]
        assert found.get(manifest) in (None, whole[manifest])


@pytest.mark.parametrize("keys", [("text",), ("text", "title")])
def test_a_kill_before_any_change_resumes_to_the_same_bytes(
    tmp_path: Path, command: list[str], keys: tuple[str, ...]
) -> None:
    old, new, out = (tmp_path / name for name in ("old", "new", "out"))
    arguments = [*command, "--json-keys", *keys, "--output-prefix"]
    assert main([*arguments, str(new / "n")]) == 0
    assert main([*(word for word in arguments if word != "--append-eod"), str(old / "n")]) == 0
    wanted, before = contents(new), contents(old)
    arguments += [str(out / "n")]
    place = 0
    while True:
        shutil.copytree(old, out)
        if not is_killed(arguments, place):
            break
        for key in keys:
            check_whole_or_none(key, contents(out), before, wanted)
        assert main(arguments) == 0
        assert contents(out) == wanted
        shutil.rmtree(out)
        place += 1
    assert place > 12
    assert contents(out) == wanted


def test_a_kill_during_a_restart_mixes_nothing(tmp_path: Path, command: list[str]) -> None:
    """Remaining part files of another recipe are rejected or removed."""
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    other = [*command[:-1], "--output-prefix", str(tmp_path / "out/n")]
    assert main([*command, "--output-prefix", str(tmp_path / "new/n")]) == 0
    begin(other, tmp_path / "out/n.preparing")
    shutil.copytree(tmp_path / "out", tmp_path / "begun")
    for place in range(6):
        assert is_killed([*arguments, "--restart"], place)
        assert main(arguments) == 0 or main([*arguments, "--restart"]) == 0
        assert contents(tmp_path / "out") == contents(tmp_path / "new")
        shutil.rmtree(tmp_path / "out")
        shutil.copytree(tmp_path / "begun", tmp_path / "out")


def test_a_damaged_part_file_is_made_again(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    assert main([*command, "--output-prefix", str(tmp_path / "new/n")]) == 0
    part_file = begin(arguments, tmp_path / "out/n.preparing")
    content = bytearray(part_file.read_bytes())
    content[-30] ^= 1
    part_file.write_bytes(content)
    capsys.readouterr()
    assert main(arguments) == 3
    assert f"{part_file}: is damaged, and was removed; run the same command again" in capsys.readouterr().err
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_any_damage_of_a_part_file_is_detected_before_its_use(tmp_path: Path) -> None:
    path = tmp_path / "0.shard"
    dtype = np.dtype("<u2")
    with PartFileWriter(path, dtype, 1) as writer:
        ends = np.array([1, 2], np.int64)
        writer.add(0, Block(np.arange(5, dtype=np.int32), np.array([2, 3], np.int64), ends, 9))
        writer.finish()
    whole = path.read_bytes()
    with open_part_file(path, dtype) as (footer, blocks):
        (block,) = [block for _, block in blocks]
        assert (footer.text_bytes, footer.largest, block.tokens.tolist()) == ([9], [4], [0, 1, 2, 3, 4])
    for place in range(len(whole)):
        flipped = bytes([whole[place] ^ 1])
        for damaged in (whole[:place] + flipped + whole[place + 1 :], whole[:place]):
            path.write_bytes(damaged)
            with pytest.raises(DamagedPartFileError, match="is damaged"), open_part_file(path, dtype):
                pass


def test_merged_part_files_are_removed_so_that_the_disk_holds_their_tokens_once(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    assert main([*command, "--output-prefix", str(tmp_path / "new/n")]) == 0
    left: list[list[str]] = []
    save = merge.Merger.save

    def noting(self: merge.Merger) -> None:
        save(self)
        left.append(sorted(path.name for path in (tmp_path / "out").glob("n.preparing/*/*.shard")))

    monkeypatch.setattr(merge.Merger, "save", noting)
    assert main(arguments) == 0
    # After each chunk, and at the end.
    assert left == [["00000001.shard"], [], []]
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_a_full_disk_during_the_merge_keeps_finished_parts(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    assert main([*command, "--output-prefix", str(tmp_path / "new/n")]) == 0
    flush, calls = merge.flush_to_disk, 0

    def full(file: BinaryIO) -> None:
        nonlocal calls
        calls += 1
        # After three tables and the state of one chunk, and one table of the next.
        if calls == 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(file)

    monkeypatch.setattr(merge, "flush_to_disk", full)
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert f"{tmp_path}/out/n: cannot be written: No space left on device; free space on its disk (2 pa" in said
    assert [path.name for path in (tmp_path / "out").glob("n.preparing/*/*.shard")] == ["00000001.shard"]
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


def test_bad_documents_of_merged_parts_are_not_forgotten(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{\n" + source.read_text())
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    skip = [*arguments, "--on-error", "skip"]
    with monkeypatch.context() as patch:
        patch.setattr(merge.Merger, "finish", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "no disk")))
        assert main(skip) == 3
    assert not list((tmp_path / "out").glob("n.preparing/*/*.shard"))
    capsys.readouterr()
    assert main(arguments) == 3
    assert f"{source}:1: is not a line of JSON" in capsys.readouterr().err
    assert main(skip) == 0
    assert f"1 documents were skipped:\n  {source}:1: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["joined-0.bin", "joined-0.lengths", "joined-0.documents", "joined.json"])
def test_modified_merged_parts_are_refused(
    tmp_path: Path,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    arguments = [*command, "--output-prefix", str(tmp_path / "out/n")]
    with monkeypatch.context() as patch:
        patch.setattr(merge, "put_in_place", lambda *_: None)
        patch.setattr("trainer.data.prepare.assembly.put_in_place", lambda *_: None)
        patch.setattr("trainer.data.prepare.journal.Journal.remove", lambda _: None)
        assert main(arguments) == 0
    (path,) = (tmp_path / "out").glob(f"n.preparing/*/{name}")
    path.write_bytes(path.read_bytes()[:-1])
    capsys.readouterr()
    assert main(arguments) == 3
    said = capsys.readouterr().err
    assert f"{path}: is " in said
    assert f"remove {tmp_path}/out/n.preparing to start over" in said
    assert main([*arguments, "--restart"]) == 0
