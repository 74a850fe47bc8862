"""``llmctl data inspect``: counts, lengths, samples, and every kind of damage in one sentence."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.llmctl.documents import problems_of
from tests.trainer.data.token_files import describe, write, write_sequences
from tests.trainer.data.vocabularies import Vocabularies
from trainer.__main__ import main
from trainer.data.commands.preprocess import tokenize_documents
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.inspection import PERCENTS, inspect_dataset, measure_lengths
from trainer.data.tokenizers.tokenizer import Tokenizer

TEXTS = ["def f():\n    return 1\n", "", "計算ノード", "def g(self):\n    return 22\n", ""]


@pytest.fixture
def prepared(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenize_documents(TEXTS, tokenizer, tmp_path / "d")
    return tmp_path / "d"


def inspected(prefix: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, object], str]:
    """Exit status, the dataset in the JSON document, and the text on standard error."""
    status = main(["data", "inspect", str(prefix), "--json", *flags])
    said = capsys.readouterr()
    assert problems_of("data-inspect", json.loads(said.out)) == []
    (pair,) = json.loads(said.out)["pairs"]
    return status, pair, said.err


def test_counts_and_samples(
    prepared: Path, tokenizer: Tokenizer, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--tokenizer-model", str(tokenizer_file), "--verify")
    status, pair, said = inspected(prepared, capsys, *flags)
    lengths = [len(tokenizer.encode(text)) + 1 for text in TEXTS if text]
    assert (status, said, pair["problems"]) == (0, "", [])
    assert (pair["documents"], pair["empty_documents"], pair["sequences"]) == (5, 2, 3)
    assert (pair["tokens"], pair["dtype"]) == (sum(lengths), "uint16")
    assert [sample["document"] for sample in pair["samples"]] == [0, 2, 3]  # type: ignore[index]
    assert [sample["text"] for sample in pair["samples"]] == [text for text in TEXTS if text]  # type: ignore[index]
    assert pair["contents"]["ends"] == 3  # type: ignore[index]
    assert pair["contents"]["bin_sha256"] == pair["manifest"]["bin_sha256"]  # type: ignore[index]
    assert main(["data", "inspect", str(prepared.parent), *flags]) == 0
    shown = capsys.readouterr().out
    assert "documents   5, 2 of them empty" in shown
    assert '"計算ノード"' in shown
    assert "checksums   match the manifest" in shown


def test_without_a_manifest_or_tokenizer_ids_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "d", [[], list(range(100, 200)), [7]])
    assert main(["data", "inspect", str(tmp_path / "d.idx"), "--samples", "1", "--verify"]) == 0
    shown = capsys.readouterr().out
    assert "unknown: no manifest" in shown
    assert "document 1, 100 tokens\n    100 101 102" in shown
    assert "none in the manifest to compare with" in shown
    assert "token ids   7 to 199" in shown


def test_lengths_are_those_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.data.indexed.inspection._DENSE", 64)
    monkeypatch.setattr("trainer.data.indexed.inspection.CHUNK", 50)
    sizes = np.random.RandomState(3).lognormal(2, 2, 400).astype(int)
    halves = [[size // 2, size - size // 2] if size > 1 else [size] * bool(size) for size in sizes.tolist()]
    write_sequences(tmp_path / "d", [[[0] * half for half in document] for document in halves])
    with IndexedDataset(tmp_path / "d") as tokens:
        lengths, empty = measure_lengths(tokens)
    assert lengths is not None
    filled = sizes[sizes > 0]
    assert empty == 400 - len(filled) > 0
    assert (lengths.shortest, lengths.longest, lengths.mean) == (filled.min(), filled.max(), filled.mean())
    assert lengths.percentiles == {
        percent: np.percentile(filled, percent, method="inverted_cdf") for percent in PERCENTS
    }
    for part in lengths.ranges:
        inside = filled[(filled >= part.shortest) & (filled <= part.longest)]
        assert (part.documents, part.tokens) == (len(inside), inside.sum())
    assert sum(part.documents for part in lengths.ranges) == len(filled)


def test_a_dataset_without_tokens_can_be_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "d", [[], []])
    status, pair, _ = inspected(tmp_path / "d", capsys, "--verify")
    assert (status, pair["documents"], pair["lengths"], pair["samples"]) == (0, 2, None, [])
    assert main(["data", "inspect", str(tmp_path / "d"), "--verify"]) == 0


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_damage_is_one_sentence_each(prepared: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = prepared.with_name("d.bin")
    flip(binary, 0)
    status, pair, said = inspected(prepared, capsys)
    assert (status, pair["problems"], said) == (0, [], "")
    status, pair, said = inspected(prepared, capsys, "--verify")
    assert status == 3
    assert said == f"llmctl data inspect: {pair['problems'][0]}\n"  # type: ignore[index]
    assert "d.bin: is damaged: its SHA-256 begins with" in said
    binary.write_bytes(binary.read_bytes()[:-2])
    status, pair, said = inspected(prepared, capsys, "--verify")
    assert (status, pair["dtype"]) == (3, None)
    assert "one of the two files is truncated" in said and said.count("\n") == 1
    assert main(["data", "inspect", str(prepared)]) == 3
    assert "cannot be opened" in capsys.readouterr().out


def test_impossible_tokens_and_manifests_are_reported(tmp_path: Path, tokenizer: Tokenizer) -> None:
    describe(tmp_path / "d", [[1, 0], [2, 999], [3, 0]])
    assert inspect_dataset(tmp_path / "d").problems == ()
    (ends,) = inspect_dataset(tmp_path / "d", verify=True).problems
    assert "the end-of-document token occurs 2 times in 3 documents" in ends
    other, _ = inspect_dataset(tmp_path / "d", tokenizer, "mine", verify=True).problems
    assert "was tokenized with another tokenizer" in other and "mine" in other
    (tmp_path / "d.json").unlink()
    (wrong,) = inspect_dataset(tmp_path / "d", tokenizer, verify=True).problems
    assert wrong.endswith("d.bin: holds token 999; a vocabulary of 300 has 0 to 299")
    (tmp_path / "d.json").write_text("{}")
    (none,) = inspect_dataset(tmp_path / "d").problems
    assert "is not a manifest" in none


def test_manifests_without_checksums_are_read(tmp_path: Path) -> None:
    """Downgrade the manifests to schema 1."""
    describe(tmp_path / "d", [[1, 0]])
    path = tmp_path / "d.json"
    values = json.loads(path.read_text())
    del values["bin_sha256"], values["idx_sha256"]
    path.write_text(json.dumps({**values, "schema": 1}))
    found = inspect_dataset(tmp_path / "d", verify=True)
    assert found.problems == ()
    assert found.manifest is not None and found.contents is not None
    assert (found.manifest.eod, found.manifest.bin_sha256, found.contents.compared) == (0, None, False)


def test_empty_folders_and_wrong_tokenizers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(tmp_path)]) == 3
    assert "is a folder without .bin or .idx files" in capsys.readouterr().err
    write(tmp_path / "d", [[1]])
    assert main(["data", "inspect", str(tmp_path / "d"), "--tokenizer-model", str(tmp_path / "none.json")]) == 3
    assert "none.json: cannot read the tokenizer" in capsys.readouterr().err


def test_a_missing_decoder_is_one_sentence(
    tmp_path: Path, vocabularies: Vocabularies, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "d", [[1]])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    model = str(vocabularies.folder / "bpe.model")
    assert main(["data", "inspect", str(tmp_path / "d"), "--tokenizer-model", model]) == 3
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "bpe.model: needs the package sentencepiece; install it" in said.err


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_closed_pipe_is_no_error(prepared: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    read, written = os.pipe()
    os.close(read)
    with os.fdopen(written, "w") as closed_pipe:
        monkeypatch.setattr(sys, "stdout", closed_pipe)
        assert main(["data", "inspect", str(prepared), *flags]) == 0
        closed_pipe.flush()


@pytest.mark.parametrize("command", [["data", "inspect"], ["data", "merge", "--output-prefix", "out", "--input"]])
def test_an_interruption_is_one_sentence(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer.data.commands.inspect_command.inspect_dataset", interrupt)
    monkeypatch.setattr("trainer.data.commands.merge.merge_datasets", interrupt)
    assert main([*command, str(prepared)]) == 130
    assert capsys.readouterr().err == f"llmctl {' '.join(command[:2])}: interrupted\n"


def test_a_failing_disk_is_a_problem_of_its_dataset(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(prepared.with_name("d.bin")))

    monkeypatch.setattr("trainer.data.indexed.inspection._read_contents", fail)
    status, pair, said = inspected(prepared, capsys, "--verify")
    assert (status, pair["documents"], pair["contents"]) == (3, 5, None)
    assert said == f"llmctl data inspect: {prepared}.bin: reading failed: Input/output error\n"
