"""Merging datasets: Megatron-LM's bytes, summed manifests, and errors before any write."""

from __future__ import annotations

import os
import re
import signal
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.trainer.data.token_files import RECORDED, describe, files_end_at, unpack, write, write_joined
from trainer.__main__ import main
from trainer.data.commands.merge import merge_datasets
from trainer.data.errors import DataError
from trainer.data.indexed.manifest import read_manifest
from trainer.data.indexed.writer import IndexedDatasetWriter

DOCUMENTS = [[number] * (number % 5) for number in range(60)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_merged_bytes_are_megatrons(tmp_path: Path) -> None:
    for shard in ("a", "b", "c"):
        unpack(f"shard_{shard}", tmp_path)
    assert main(["data", "merge", "--input", str(tmp_path), "--output-prefix", str(tmp_path / "out/all")]) == 0
    with np.load(RECORDED / "formats.npz") as recorded:
        assert files(tmp_path / "out") == {
            f"all.{part}": recorded[f"merged.{part}"].tobytes() for part in ("bin", "idx")
        }


def test_merged_manifests_equal_those_of_the_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = describe(tmp_path / "whole", DOCUMENTS)
    cuts = (0, 13, 13, 60)
    for number, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        describe(tmp_path / f"part{number}", DOCUMENTS[start:stop])
    parts = [str(tmp_path / f"part{number}") for number in range(3)]
    assert main(["data", "merge", "--input", *parts, "--output-prefix", str(tmp_path / "all")]) == 0
    merged = read_manifest(tmp_path / "all")
    assert merged is not None
    assert merged.text_bytes == 30
    assert {**vars(merged), "text_bytes": 10} == vars(whole)
    assert (tmp_path / "all.idx").read_bytes() == (tmp_path / "whole.idx").read_bytes()
    assert "all.bin, .idx and .json: 3 datasets, 60 documents, 120 tokens" in capsys.readouterr().out


def test_a_folder_without_datasets_is_refused_and_tilde_is_expanded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "full/a", DOCUMENTS)
    (tmp_path / "empty").mkdir()
    merge = ["data", "merge", "--output-prefix", "~/out", "--input", "~/full"]
    assert main([*merge, str(tmp_path / "empty")]) == 3
    assert "empty: is a folder without .bin or .idx files" in capsys.readouterr().err
    assert main(merge) == 0
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "full/a.bin").read_bytes()


def test_a_dataset_named_by_all_its_files_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    describe(tmp_path / "a.b", DOCUMENTS)
    named = ["a.b.bin", "a.b.idx", "a.b.json", "./a.b", "."]
    assert main(["data", "merge", "--input", *named, "--output-prefix", "out"]) == 0
    assert "out.bin, .idx and .json: 1 dataset, 60 documents" in capsys.readouterr().out
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "a.b.bin").read_bytes()
    assert main(["data", "inspect", *named[:4], "--samples", "0"]) == 0
    assert capsys.readouterr().out.count("documents   60") == 1
    assert main(["data", "merge", "--input", "a.b", "a.b", "--output-prefix", "twice"]) == 0
    assert "2 datasets, 120 documents" in capsys.readouterr().out
    for path in tmp_path.glob("twice.*"):
        path.unlink()
    for output in ("new/", ".", "new/.."):
        assert main(["data", "merge", "--input", "a.b", "--output-prefix", output]) == 3
        assert capsys.readouterr().err.endswith("is a folder; append a dataset name\n")
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".bin", ".bin", ".idx", ".idx", ".json", ".json"]


def test_leftovers_of_a_killed_merge_are_removed_and_a_running_merge_is_not_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def left() -> int:
        return sum(path.stat().st_size for path in tmp_path.glob("out.*"))

    monkeypatch.setattr(
        "trainer.data.commands.merge.shutil.disk_usage", lambda _: SimpleNamespace(free=2_000_000 - left())
    )
    write(tmp_path / "a", DOCUMENTS)
    begun = os.fork()
    if begun == 0:
        writer = IndexedDatasetWriter(tmp_path / "out", 8)
        writer.append(np.ones(1_000_000, np.uint16), np.array([1_000_000]), np.array([1]))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(begun, 0)
    assert left() > 1_999_000
    holder = f"process {os.getpid()} on {os.uname().nodename} is writing this dataset; wait for its end"
    with IndexedDatasetWriter(tmp_path / "out", 8), pytest.raises(DataError, match=re.escape(holder)):
        merge_datasets([tmp_path / "a"], tmp_path / "out")
    assert not left()
    (tmp_path / "out.bin.partial").write_bytes(bytes(2_000_000))
    merge_datasets([tmp_path / "a"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx"]
    assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "a.bin").read_bytes()


def test_incompatible_datasets_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    describe(tmp_path / "a", DOCUMENTS)
    describe(tmp_path / "other", DOCUMENTS, tokenizer_sha256="cd" * 32)
    describe(tmp_path / "endless", DOCUMENTS, eod=None)
    write(tmp_path / "plain", DOCUMENTS)
    write(tmp_path / "wide", DOCUMENTS, 70_000)
    write(tmp_path / "cut", DOCUMENTS)
    (tmp_path / "cut.bin").write_bytes(b"")
    before = files(tmp_path)
    refusals = {
        ("a", "other"): r"other: was prepared with tokenizer_sha256 cdcdcdcdcdcd but .*a with abababababab",
        ("a", "endless"): r"endless: was prepared with eod None but .*a with 0",
        ("a", "plain"): r"plain: has no manifest, but .*a has one",
        ("plain", "wide"): r"wide: has int32 tokens but .*plain has uint16",
        ("plain", "cut"): r"cut\.bin: has 0 bytes",
        ("plain", "out"): r"out\.bin and .*out\.idx: no such file",
        (): r"no \.bin/\.idx dataset to merge",
    }
    for names, says in refusals.items():
        with pytest.raises(DataError, match=says):
            merge_datasets([tmp_path / name for name in names], tmp_path / "out")
    with pytest.raises(DataError, match="is one of the datasets to merge"):
        merge_datasets([tmp_path / "plain"], tmp_path / "plain")
    (tmp_path / "same").symlink_to(tmp_path)
    with pytest.raises(DataError, match="is one of the datasets to merge"):
        merge_datasets([tmp_path / "plain"], tmp_path / "same" / "plain")
    (tmp_path / "same").unlink()
    assert files(tmp_path) == before


def test_damage_that_only_a_checksum_shows_is_not_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    describe(tmp_path / "a", DOCUMENTS)
    describe(tmp_path / "out", DOCUMENTS[:5])
    content = bytearray((tmp_path / "a.bin").read_bytes())
    content[17] ^= 4
    (tmp_path / "a.bin").write_bytes(content)
    before = files(tmp_path)
    assert main(["data", "merge", "--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "out")]) == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "a.bin: is damaged: its SHA-256 differs from its manifest's" in said
    assert files(tmp_path) == before


def test_a_source_truncated_during_the_merge_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    write(tmp_path / "b", [[2, 3]])

    def cut(_: int, __: int) -> None:
        (tmp_path / "b.bin").write_bytes(b"123")

    with pytest.raises(DataError, match=r"b\.bin: its size of 3 bytes is not a multiple of the token size"):
        merge_datasets([tmp_path / "a", tmp_path / "b"], tmp_path / "out", cut)
    assert not list(tmp_path.glob("out*"))


def test_a_manifest_of_other_data_is_refused(tmp_path: Path) -> None:
    describe(tmp_path / "a", DOCUMENTS)
    write(tmp_path / "a", DOCUMENTS[:20])
    with pytest.raises(DataError, match=r"a\.json: states 60 documents \(there are 20\) and 48 sequences"):
        merge_datasets([tmp_path / "a"], tmp_path / "out")


def test_a_full_disk_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", [[1] * 1000] * 5)
    before = files(tmp_path)
    with files_end_at(4000):
        status = main(["data", "merge", "--input", str(tmp_path / "a"), "--output-prefix", str(tmp_path / "out")])
    assert status == 3
    assert capsys.readouterr().err == f"llmctl data merge: {tmp_path}/out: cannot be used: File too large\n"
    assert files(tmp_path) == before


def test_a_disk_that_is_too_small_is_detected_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", DOCUMENTS)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("trainer.data.commands.merge.shutil.disk_usage", lambda _: usage)
    with pytest.raises(DataError, match=r"has 0\.0 GB free, but .*new/out takes 0\.0 GB"):
        merge_datasets([tmp_path / "a"], tmp_path / "new/out")
    assert not (tmp_path / "new").exists()


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    write_joined(tmp_path / "a", np.ones(32_000_000, np.uint16), np.full(16_000, 2000))
    tracemalloc.start()
    try:
        merge_datasets([tmp_path / "a"] * 2, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "out.bin").stat().st_size == 128_000_000
    assert peak < 40_000_000
