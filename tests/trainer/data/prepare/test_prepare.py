"""Preparing data: Megatron-LM's bytes from any number of processes, also after a kill."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import waiting
from tests.waiting import HANG_S
from trainer.data.commands.preprocess import main
from trainer.data.prepare.part_file import PartFileWriter, open_part_file

ROOT = Path(__file__).parents[4]
RECORDED = ROOT / "tests" / "recorded" / "megatron_data"
PIECES = ["--tokenizer-type", "GPTSentencePieceTokenizer", "--tokenizer-model", str(RECORDED / "sentencepiece.model")]
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "70000", "--append-eod"]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_lists_of_sentences_are_megatrons(tmp_path: Path) -> None:
    """Plain texts are tested in test_megatron_text."""
    command = ["--input", str(RECORDED / "corpus.jsonl"), "--output-prefix", str(tmp_path / "sentencepiece")]
    flags = ["--append-eod", "--workers", "1", "--partitions", "1", "--json-keys", "text", "sentences"]
    assert main([*command, *flags, *PIECES]) == 0
    for key in ("text", "sentences"):
        for part in ("bin", "idx"):
            file = f"sentencepiece_{key}_document.{part}"
            assert (tmp_path / file).read_bytes() == (RECORDED / file).read_bytes(), file


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five megabytes of JSON lines, some documents empty."""
    path = tmp_path_factory.mktemp("numbers") / "in.jsonl"
    with path.open("w") as file:
        for number in range(4000):
            words = " ".join(str((number * 31 + place) % 70000) for place in range(number % 420))
            file.write(json.dumps({"text": words}) + "\n")
    return path


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, numbers: Path) -> dict[str, bytes]:
    """Output of two processes for ``numbers``."""
    folder = tmp_path_factory.mktemp("expected")
    assert main(["--input", str(numbers), "--output-prefix", str(folder / "n"), "--workers", "2", *NUMBERS]) == 0
    return contents(folder)


def test_more_processes_and_nodes_make_the_same_bytes(
    tmp_path: Path, numbers: Path, expected: dict[str, bytes]
) -> None:
    assert sorted(expected) == [f"n_text_document.{part}" for part in ("bin", "idx", "json")]
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), "--workers", "1", *NUMBERS]
    with preprocess(*command, "--nodes", "2", "--attempt", "a", "--node", "0") as process:
        assert main([*command, "--nodes", "2", "--attempt", "a", "--node", "1"]) == 0
        process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert contents(tmp_path) == expected


def preprocess(*arguments: str, **more: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trainer", "data", "prepare", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **more)


def wait_for(folder: Path, pattern: str) -> Path:
    return waiting.wait_for(lambda: list(folder.glob(pattern)), pattern, step_s=0.001)[0]


def with_other_tokens(part_file: Path) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Increase all tokens of ``part_file`` by one, with a valid checksum.

    Returns the tokens before and after.
    """
    dtype = np.dtype("<i4")
    with open_part_file(part_file, dtype) as (footer, blocks):
        found = list(blocks)
    with PartFileWriter(part_file, dtype, 1) as writer:
        for key, block in found:
            writer.add(key, replace(block, tokens=block.tokens + 1))
        writer.footer = footer
        writer.finish()
    before = np.concatenate([block.tokens for _, block in found])
    return before, before + 1


def test_a_killed_preparation_keeps_finished_parts(tmp_path: Path, numbers: Path, expected: dict[str, bytes]) -> None:
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), *NUMBERS]
    with preprocess(*command, "--workers", "2", start_new_session=True) as process:
        kept = wait_for(tmp_path / "n.preparing", "*/*.shard")
        os.killpg(process.pid, signal.SIGKILL)
    assert list(tmp_path.iterdir()) == [tmp_path / "n.preparing"]
    before, after = with_other_tokens(kept)
    assert main([*command, "--workers", "1"]) == 0
    found = contents(tmp_path)
    assert found["n_text_document.idx"] == expected["n_text_document.idx"]
    whole = expected["n_text_document.bin"]
    assert whole.count(before.tobytes()) == 1
    assert found["n_text_document.bin"] == whole.replace(before.tobytes(), after.tobytes())


@pytest.fixture
def stopped(tmp_path: Path, numbers: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Path, list[str]]:
    """An input with a broken last line, and a command that failed there."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(numbers.read_bytes() + b"{\n")
    command = ["--input", str(source), "--output-prefix", str(tmp_path / "out/n"), "--workers", "1", *NUMBERS]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert f"{source}:4001: is not a line of JSON" in said
    assert "parts are done and kept" in said
    return source, command


def test_another_plan_is_refused_and_changes_nothing(
    tmp_path: Path, stopped: tuple[Path, list[str]], expected: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    source, command = stopped
    folder = tmp_path / "out/n.preparing"
    before = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.shard")}
    assert before
    for more in ([], ["--check"]):
        assert main([*command, "--append-eod", "--json-keys", "other", *more]) == 3
        assert "was begun with a different --json-keys" in capsys.readouterr().err
    assert main([*command, "--json-keys", "other", "--restart", "--check"]) == 0
    assert main([*command, "--check"]) == 0
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.shard")} == before
    assert main([*command, "--on-error", "skip"]) == 0
    assert f"1 documents were skipped:\n  {source}:4001: " in capsys.readouterr().err
    assert contents(tmp_path / "out") == expected


def test_a_changed_input_is_refused_until_a_restart(
    tmp_path: Path,
    stopped: tuple[Path, list[str]],
    numbers: Path,
    expected: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, command = stopped
    source.write_bytes(numbers.read_bytes())
    assert main(command) == 3
    assert f"holds work that was begun with {source} before its last modification" in capsys.readouterr().err
    assert main([*command, "--restart"]) == 0
    assert contents(tmp_path / "out") == expected


def test_a_full_disk_is_one_sentence_and_leaves_the_old_dataset(
    tmp_path: Path, numbers: Path, expected: dict[str, bytes]
) -> None:
    """Part files stay below the kernel's limit on file sizes, the .bin does not."""
    for name in expected:
        (tmp_path / name).write_text("old")
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), "--workers", "1", *NUMBERS]
    limit = 1_500_000
    with preprocess(*command, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))) as process:
        said = process.communicate(timeout=HANG_S)[1].splitlines()
    assert process.returncode == 3
    assert said[-1].startswith(f"llmctl data prepare: {tmp_path}/n: cannot be written: File too large (")
    assert {path.read_text() for path in tmp_path.glob("n_*")} == {"old"}
    assert not list((tmp_path / "n.preparing").rglob("*.partial"))
    assert main(command) == 0
    assert contents(tmp_path) == expected


def test_a_worker_that_is_killed_is_one_sentence(tmp_path: Path, numbers: Path) -> None:
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), "--workers", "1", *NUMBERS]
    with preprocess(*command) as process:
        partial = wait_for(tmp_path / "n.preparing", "*/*.shard.*.partial")
        os.kill(int(partial.suffixes[-2][1:]), signal.SIGKILL)
        said = process.communicate(timeout=HANG_S)[1].splitlines()
    assert process.returncode == 3
    assert "a worker process was ended by signal 9 (SIGKILL) while it encoded" in said[-1]
    assert "run again with fewer --workers" in said[-1]


def test_workers_end_when_their_parent_is_killed_alone(
    tmp_path: Path, numbers: Path, expected: dict[str, bytes]
) -> None:
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), *NUMBERS]
    with preprocess(*command, "--workers", "2") as process:
        partial = wait_for(tmp_path / "n.preparing", "*/*.shard.*.partial")
        children = waiting.children_of(process.pid)
        os.kill(int(partial.suffixes[-2][1:]), signal.SIGSTOP)  # it would not end by itself
        process.kill()
    assert len(children) >= 2
    waiting.wait_for_ends(children)
    assert main([*command, "--workers", "1"]) == 0
    assert contents(tmp_path) == expected


def test_two_preparations_at_once_do_not_mix(
    tmp_path: Path, numbers: Path, expected: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--input", str(numbers), "--output-prefix", str(tmp_path / "n"), "--workers", "1", *NUMBERS]
    with preprocess(*command) as process:
        wait_for(tmp_path / "n.preparing", "*/*.partial")
        process.send_signal(signal.SIGSTOP)
        assert main(command) == 3
        holder = f"process {process.pid} on {os.uname().nodename}"
        said = capsys.readouterr().err
        assert f"the same output is being prepared by {holder}; wait for the end, or end it" in said
        process.send_signal(signal.SIGCONT)
        process.communicate(timeout=HANG_S)
    assert contents(tmp_path) == expected


@pytest.mark.parametrize(
    ("prefix", "key", "says"),
    [
        (".", "text", "--output-prefix: . is a folder; append a beginning for the file names in it"),
        ("a/..", "text", "--output-prefix: a/.. is a folder"),
        ("n" * 200, "k" * 60, "would have 274 bytes, but a file name at most 255"),
        ("n", "taken", "n_taken_document.idx is a folder; remove it, or choose another prefix"),
    ],
)
def test_an_impossible_output_is_refused_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prefix: str,
    key: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "n_taken_document.idx").mkdir()
    (tmp_path / "in.jsonl").write_text(json.dumps({key: "1"}))
    for more in ([], ["--check"]):
        assert main(["--input", "in.jsonl", "--output-prefix", prefix, "--json-keys", key, *NUMBERS, *more]) == 3
        said = capsys.readouterr().err
        assert says in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "n_taken_document.idx"]
