"""Inputs of every kind give the same documents at any cut, or one error."""

from __future__ import annotations

import bz2
import errno
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.commands.preprocess import main
from trainer.data.errors import DataError
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import read_manifest
from trainer.data.prepare.chunks import TextDocument, cut_chunks
from trainer.data.prepare.documents import BadDocument, SpanReader, Text
from trainer.data.prepare.inputs import find_inputs

TEXTS = [
    "one two",
    "",
    "two\n\nthree",
    "日本語の文",
    "x" * 300,
    *(f"text {number} " * (number % 9) for number in range(60)),
]
SKIPPED_FRAME = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"
"""A skippable frame of a .zst file, which a reader ignores (RFC 8878, section 3.1.2)."""
NUMBERS = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda content: gzip.compress(content[:99]) + gzip.compress(content[99:]),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: zstandard.compress(content[:99]) + SKIPPED_FRAME + zstandard.compress(content[99:]),
}


def json_lines(texts: list[Any]) -> bytes:
    return "".join(json.dumps({"text": text, "number": 1}, ensure_ascii=False) + "\n" for text in texts).encode()


def documents(path: Path, size: int, text_document: TextDocument = "file") -> list[Text | BadDocument]:
    """Return all documents of chunks of ``size`` bytes."""
    found: list[Text | BadDocument] = []
    for number, chunk in enumerate(cut_chunks(find_inputs([str(path)]), size, text_document)):
        assert chunk.number == number
        for span in chunk.spans:
            reader = SpanReader(span, ["text"], text_document, chunk.content)
            found += [document[0] if isinstance(document, tuple) else document for document in reader]
    return found


def _paragraphs(text: str) -> list[str]:
    """Independent definition of paragraphs: text between blank lines."""
    return [part.rstrip("\r\n") for part in re.split(r"(?:^|(?<=\n))(?:[^\S\n]*\n)+", f"{text}\n") if part.strip()]


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.sampled_from(TEXTS) | st.text(st.sampled_from("ab \t\n\r日"), max_size=12), max_size=9),
    kind=st.sampled_from(["jsonl", "file", "paragraph", "line"]),
    suffix=st.sampled_from(sorted(PACKERS)),
    line_end=st.sampled_from(["\n", "\r\n"]),
    is_ended=st.booleans(),
    size=st.integers(1, 400),
)
def test_chunks_hold_all_documents_wherever_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    kind: str,
    suffix: str,
    line_end: str,
    is_ended: bool,
    size: int,
) -> None:
    if kind == "jsonl":
        content, expected = json_lines(texts).decode(), texts
    else:
        content = "\n".join(text.replace("\r", "") for text in texts)
    content = content.removesuffix("\n") + "\n" * is_ended
    content = content.replace("\n", line_end)
    if kind == "file":
        expected = [content]
    elif kind == "line":
        expected = [line.rstrip("\r") for line in content.split("\n") if line.strip()]
    elif kind == "paragraph":
        expected = _paragraphs(content)
    path = tmp_path_factory.mktemp("in") / f"in.{'jsonl' if kind == 'jsonl' else 'txt'}{suffix}"
    path.write_bytes(PACKERS[suffix](content.encode()))
    assert documents(path, size, "file" if kind == "jsonl" else cast(TextDocument, kind)) == expected


@pytest.mark.parametrize("size", [1, 400, 1_000_000])
def test_rows_of_tables(tmp_path: Path, size: int) -> None:
    path = tmp_path / "in.parquet"
    table = pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS})
    parquet.write_table(table, path, row_group_size=7)
    assert documents(path, size) == TEXTS
    spans = [chunk.spans[0] for chunk in cut_chunks(find_inputs([str(path)]), size, "file")]
    groups = [group for span in spans for group in range(span.row_group or 0, (span.row_group or 0) + span.row_groups)]
    assert groups == list(range(-(-len(TEXTS) // 7)))
    assert len(spans) == {1: len(groups), 1_000_000: 1}.get(size, len(spans))
    assert 1 < len(spans) < len(groups) or size != 400


def test_missing_texts_are_empty_and_rows_are_numbered_in_the_whole_table(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    columns = {"text": [["a"], None, ["b", None], ["c"]] * 2, "n": range(8)}
    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)
    found = documents(path, 1)
    assert found[:2] == [["a"], ""]
    bad = [document.problem for document in found if isinstance(document, BadDocument)]
    says = "has no text under the key 'text' of --json-keys, but a list with null"
    assert bad == [f"row {row} {says}" for row in (2, 6)]


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_padding_between_members_is_skipped(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in.jsonl{suffix}"
    packed = PACKERS[suffix](json_lines(["1 2"]))
    for padding in (0, 4, 4096, 8192):
        path.write_bytes(packed + bytes(padding) + packed + bytes(padding))
        assert documents(path, 1 << 20) == ["1 2", "1 2"]


@pytest.mark.parametrize("name", ["in.parquet", "in.jsonl.zst"])
def test_a_missing_package_is_reported_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    package = {"in.parquet": "pyarrow", "in.jsonl.zst": "zstandard"}[name]
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    assert main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "o"), *NUMBERS]) == 3
    said = capsys.readouterr().err
    assert f"{name}: needs the package {package}; install it (pip install {package})" in said
    assert said.count("\n") == 1


def test_files_of_patterns_and_folders_are_sorted_by_name(tmp_path: Path) -> None:
    names = ["b/2.jsonl", "b/10.jsonl.gz", "b/deep/x.txt", "b/not.py", "b/README.md", "a.md", "c/3.jsonl", "c/4.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).touch()
    inputs = [str(tmp_path / "b"), str(tmp_path / "c/**/*.jsonl"), str(tmp_path / "b/not.py"), str(tmp_path / "?.md")]
    found = [str(Path(file.path).relative_to(tmp_path)) for file in find_inputs(inputs)]
    assert found == ["b/10.jsonl.gz", "b/2.jsonl", "b/deep/x.txt", "c/3.jsonl", "b/not.py", "a.md"]
    (tmp_path / "link").symlink_to(tmp_path / "b")
    for again in (tmp_path / "b/2.jsonl", tmp_path / "b/../**/2.*", tmp_path / "link"):
        with pytest.raises(DataError, match=r"--input: .* matches .* again; its documents would be in the "):
            find_inputs([str(tmp_path / "b"), str(again)])


def test_files_of_prepared_data_are_no_input(tmp_path: Path) -> None:
    left = ("o.preparing/plan.json", "o_text_document.json", "o_text_document.bin", "cache/description.txt")
    for name in ("in.json", "o.txt", "o_text_document.idx", *left):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for word in (tmp_path, tmp_path / "**/*"):
        assert [Path(file.path).name for file in find_inputs([str(word)])] == ["in.json", "o.txt"]
    named = tmp_path / "o_text_document.json"
    assert [file.path for file in find_inputs([str(named)])] == [str(named)]
    # A name alone does not make a file prepared data, nor does a folder above the named folder.
    (tmp_path / "cache/more").mkdir()
    (tmp_path / "cache/more/a.jsonl").touch()
    (tmp_path / "o.preparing/b.jsonl").touch()
    for pattern in ("cache/more", "cache/*/*.jsonl", "**/a.*"):
        assert [Path(file.path).name for file in find_inputs([str(tmp_path / pattern)])] == ["a.jsonl"]
    assert [Path(file.path).name for file in find_inputs([str(tmp_path / "o.preparing/b*")])] == ["b.jsonl"]


def test_files_left_out_of_a_folder_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.txt", "1.rst", "2.rst.gz", "b.py", "LICENSE", ".hidden", ".git/config", "o.bin", "o.idx"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    command = ["--output-prefix", str(tmp_path / "new/o"), *NUMBERS, "--check", "--input"]
    assert main([*command, str(tmp_path)]) == 0
    assert capsys.readouterr().err == (
        f"llmctl data prepare: --input: {tmp_path}: 4 files of other endings (2 .rst, 1 .py, 1 without an ending) are "
        "left out; to read them, name them or give a pattern\n"
    )
    for word in ("a.txt", "*.txt", "*.rst"):
        assert main([*command, str(tmp_path / word)]) == 0
        assert capsys.readouterr().err == ""


def test_links_left_out_of_a_folder_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("1")
    (tmp_path / "in/more").symlink_to(tmp_path)
    command = ["--output-prefix", str(tmp_path / "o"), *NUMBERS, "--check", "--input"]
    assert main([*command, str(tmp_path / "in")]) == 0
    assert ": 1 link to a folder is left out; to read them, name" in capsys.readouterr().err
    (tmp_path / "in/b.txt").symlink_to("nothing")
    for word in ("in", "in/*.txt", "in/b.txt"):
        assert main([*command, str(tmp_path / word)]) == 3
        assert "in/b.txt: cannot be read: No such file or directory; it is a broken link" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "a.txt").touch()
    scandir = os.scandir

    def refuse(path: str) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="closed: cannot be read: Permission denied"):
        find_inputs([str(tmp_path)])


def test_an_output_within_the_input_folder_is_repeated_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.json").write_bytes(json_lines(["1 2"] * 100_000) + b"{\n")
    command = ["--input", str(tmp_path), "--output-prefix", str(tmp_path / "in"), "--workers", "1", *NUMBERS]
    assert main(command) == 3
    assert "parts are done and kept" in capsys.readouterr().err
    for _ in range(2):
        assert main([*command, "--on-error", "skip"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.json",
        *(f"in_text_document.{part}" for part in ("bin", "idx", "json")),
    ]


def test_prompts_and_answers_are_lists_under_a_key(tmp_path: Path) -> None:
    lines = [{"turns": ["1 2", "3"]}, {"turns": ["4", "5 6", "7", "8"]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o"), "--json-keys", "turns"]
    assert main([*command, "--append-eod", *NUMBERS]) == 0
    with IndexedDataset(tmp_path / "o_turns_document") as dataset:
        assert dataset.document_indices.tolist() == [0, 2, 6]
        assert [dataset[number].tolist() for number in range(6)] == [[1, 2], [3, 1000], [4], [5, 6], [7], [8, 1000]]


def test_sentences_are_sequences_and_the_last_gets_the_end(tmp_path: Path) -> None:
    lines = [{"text": text} for text in ("1 2. 3? 4", "", " ", "5。6！7")] + [{"text": ["8 9", "", "10"]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = tmp_path / "vocab.txt"
    tokenizer.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *map(str, range(1, 11)), *".?。！"]))
    command = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o"), "--split-sentences"]
    command += ["--append-eod", "--tokenizer-type", "BertWordPieceCase", "--vocab-file", str(tokenizer)]
    assert main([*command, "--eod-token", "[SEP]"]) == 0
    with IndexedDataset(tmp_path / "o_text_sentence") as dataset:
        assert dataset.document_indices.tolist() == [0, 3, 3, 3, 6, 8]
        assert [dataset[number].tolist() for number in range(8)] == [
            [5, 6, 15],
            [7, 16],
            [8, 3],
            [9, 17],
            [10, 18],
            [11, 3],
            [12, 13],
            [14, 3],
        ]
    manifest = read_manifest(tmp_path / "o_text_sentence")
    assert manifest is not None
    assert (manifest.documents, manifest.sequences, manifest.tokens, manifest.eod) == (5, 8, 17, 3)
