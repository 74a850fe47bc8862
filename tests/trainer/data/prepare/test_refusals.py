"""Every unusable input is one sentence, and leaves nothing behind."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest
import zstandard

from tests.trainer.data.prepare.test_inputs import NUMBERS, PACKERS, TEXTS, json_lines
from trainer.data.commands.preprocess import main
from trainer.data.indexed.indexed_dataset import IndexedDataset


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_damaged_member_after_a_valid_one_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    """Otherwise the rest of the file would be lost silently."""
    path = tmp_path / f"in.jsonl{suffix}"
    first, second = (PACKERS[suffix](json_lines(["1 2"])) for _ in range(2))
    path.write_bytes(first + b"X" + second[1:])
    assert main(["--input", str(path), "--output-prefix", str(tmp_path / "o"), *NUMBERS]) == 3
    said = capsys.readouterr().err
    assert f"{path}: cannot be read: " in said
    assert f"it is damaged, truncated, or not {suffix}: get it again, or rename it" in said
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("in.jsonl", b"\xff\xfe{\x00", "in.jsonl: is UTF-16, not UTF-8"),
        (
            "in.jsonl",
            b'[\n{"text": "a"}\n]\n',
            "in.jsonl:1: is not a line of JSON: Expecting value at character 3; write each",
        ),
        (
            "in.jsonl",
            b'{"text": ' + b"1" * 5000 + b"}",
            "in.jsonl:1: is not a readable line of JSON: a number has too many digits",
        ),
        ("in.jsonl", b"[" * 100_000, "in.jsonl:1: is not a readable line of JSON: it is nested too deeply"),
        *(
            (
                "in.jsonl",
                line,
                f"in.jsonl:1: the line has no text under the key 'text' of --json-keys, but {instead};",
            )
            for line, instead in (
                (b'{"text": ["a", 1]}', "a list with a number"),
                (b'{"text": [["a"]]}', "a list with a list"),
                (b'{"text": [[]]}', "a list with a list"),
                (b'{"text": null}', "null"),
                (b'{"text": {"en": "a"}}', "an object"),
                (b'{"text": false}', "true or false"),
                (b'{"body": "a", "b": 1}', "has only 'body', 'b'"),
                (b"{}", "the object has no keys"),
                (b'{"text.en": 1}', "has only 'text.en'"),
            )
        ),
        (
            "in.jsonl",
            b'[{"text": "a"}]',
            "as {\"text\": ...}; write each document on its own line, for example with `jq -c '.[]'",
        ),
        ("in.jsonl", b'{"text": "a"}{"text": "b"}', "at character 14; write each document on its own line"),
        ("in.jsonl", b'{"text": "a"}\r{"text": "b"}', "end lines with LF or CR LF, not with CR alone"),
        (
            "in.jsonl",
            b'{"text": "1"}\n' + b"\0" * 99,
            "in.jsonl:2: is not a line of JSON: it holds only NUL bytes, like",
        ),
        ("in.jsonl", '{"text": "a"}'.encode("utf-16-be"), "is UTF-16BE, not UTF-8; convert it, for example with iconv"),
        ("in.txt", "a line".encode("utf-16-le"), "in.txt: is UTF-16LE, not UTF-8"),
        ("in.txt", "a line".encode("utf-32"), "in.txt: is UTF-32, not UTF-8"),
        ("in.jsonl", '{"text": "a"}'.encode("utf-32"), "in.jsonl: is UTF-32, not UTF-8"),
        ("in.jsonl", b"{", "in.jsonl:1: is not a line of JSON"),
        (
            "in.jsonl",
            b'{"text": "a\rb"}',
            "JSON: Invalid control character at character 12; skip such documents with --on-error skip",
        ),
        ("in.txt", "caf\xe9 au lait".encode("latin-1"), "for example with iconv -f LATIN1 -t UTF-8"),
        ("in.parquet", b"PAR1", "is damaged, truncated, or not Parquet: get it again, or rename it"),
        ("in.parquet.gz", b"", "in.parquet.gz: is a Parquet file compressed as a whole, which cannot be read in parts"),
        ("in.txt", b"", "there is no text in the input: all documents of "),
        ("in.md", b"text\n\0", "in.md: is not text, because it holds NUL bytes; valid are"),
        ("in.txt.gz", gzip.compress(b"a\0", mtime=0), "in.txt.gz: is not text, because it holds NUL bytes"),
        ("in.tar.gz", b"", "in.tar.gz: is an archive of files; unpack it, and name the resulting folder"),
        ("in.zip", b"", "in.zip: is an archive of files"),
        (
            "in.jsonl",
            b'{"text": "1 ' + b"9" * 70 + b'"}',
            "in.jsonl:1: NullTokenizer takes the numbers 0 to 999, not 9",
        ),
        ("in.txt", b"text\xff", "in.txt:1: is not UTF-8 text: byte 0xff at position 5"),
        (
            "in.jsonl.gz",
            gzip.compress(json_lines(TEXTS), mtime=0)[:-20],
            "in.jsonl.gz: cannot be read: Compressed file ended",
        ),
        ("in.jsonl.gz", b"text", "in.jsonl.gz: cannot be read: Not a gzipped file"),
        (
            "in.jsonl.zst",
            zstandard.compress(json_lines(TEXTS))[:-9],
            "in.jsonl.zst: cannot be read: the file ends within compressed data; it is damaged, truncated, or not .zst",
        ),
        ("in.jsonl.xz", b"text", "in.jsonl.xz: cannot be read: Input format not supported"),
    ],
)
def test_bad_files_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["--input", str(tmp_path / name), "--output-prefix", str(tmp_path / "out/o"), *NUMBERS]) == 3
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--input", "nothing/*.jsonl"], "--input: nothing/*.jsonl matches no file"),
        (["--input", "empty"], "--input: empty holds no file that ends in .jsonl"),
        (["--input", "nothing.txt"], "nothing.txt: cannot be read: No such file"),
        (["--input", "in.txt", "--nodes", "2", "--node", "2"], "--node: 2 is not valid for --nodes 2"),
        (["--input", "in.txt", "--nodes", "2", "--restart"], "--restart: not possible with several nodes"),
        (
            ["--input", "in.txt", "lines"],
            "lines: begins like JSON lines, but only .jsonl, .json and .ndjson are read as JSON lines",
        ),
        (
            ["--input", "in.txt", "--output-prefix", "taken"],
            "taken.preparing is a file, but unfinished work is kept in a",
        ),
        (["--input", "in.txt", "--output-prefix", "a\0b"], "--output-prefix: 'a\\x00b' holds a NUL byte"),
        (["--input", "in.txt", "--vocab-size", "2147483647"], "vocab_size: NullTokenizer needs it, from 1 to"),
        (["--input", "in.txt", "--output-prefix", "o/"], "--output-prefix: o/ is a folder; append a beginning for"),
        (["--input", "in.txt", "--json-keys", "a", "b/c"], "--json-keys: 'b/c' cannot be part of a file name"),
        (["--input", "in.txt", "--check", "--output-prefix", "in.txt/o"], "in.txt/o: cannot be written"),
        (["--input", ""], "--input: is empty; give files, patterns or folders"),
        (["--input", "pipe"], "pipe: is a pipe or device, but text is read only from files"),
        (["--input", "-"], "-: cannot be read: No such file or directory; standard input and pipes are not read"),
        (["--input", "s3://b/a.jsonl"], "s3://b/a.jsonl: cannot be read: No such file or directory; a URL is not a"),
        (["--input", "o_text_document.json"], "o_text_document.json is an input, and would be lost; choose"),
        (["--input", "./in.txt", "o_text_document.json", "--check"], "o_text_document.json is an input, and would"),
        (["--input", "large.txt", "--check"], "large.txt: is plain text of 300 MB, and would be one document; choose"),
    ],
)
def test_impossible_arguments_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for name in ("in.txt", "taken.preparing"):
        (tmp_path / name).touch()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "o_text_document.json").write_text('{"text": "1"}\n')
    (tmp_path / "lines").write_text('{"body": "a"}\n')
    with (tmp_path / "large.txt").open("wb") as file:
        file.write(b"text " * 1000)
        file.truncate(300_000_000)
    assert main(["--output-prefix", "o", *NUMBERS, *arguments]) == 3
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "empty",
        "in.txt",
        "large.txt",
        "lines",
        "o_text_document.json",
        "pipe",
        "taken.preparing",
    ]


def test_bad_documents_are_skipped_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = json_lines(["1 2"])
    (tmp_path / "a.jsonl").write_bytes(good + b"\n{\n" + good + b'{"text": "1 x"}\n')
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + good + b"\xff\n" * 9)
    inputs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    assert main(["--input", *inputs, "--output-prefix", str(tmp_path / "o"), "--on-error", "skip", *NUMBERS]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said.pop(0).endswith("(--text-document paragraph cuts a text file at blank lines)")
    assert said[0] == "llmctl data prepare: 11 documents were skipped:"
    assert [line.split(": ")[0].strip() for line in said[1:6]] == [
        *(f"{inputs[0]}:{line}" for line in (3, 5)),
        *(f"{inputs[1]}:{line}" for line in (2, 3, 4)),
    ]
    assert said[2].endswith(":5: NullTokenizer reads decimal ids separated by spaces, not 'x'")
    assert said[6] == "  and 6 more"
    with IndexedDataset(tmp_path / "o_text_document") as dataset:
        assert [dataset[number].tolist() for number in range(len(dataset))] == [[1, 2]] * 3


@pytest.mark.parametrize("content", [b"", b'{"txt": "1"}\n{\n'])
def test_an_output_without_documents_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    (tmp_path / "in.jsonl").write_bytes(content)
    (tmp_path / "o_text_document.bin").write_text("as it was")
    command = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "o"), "--on-error", "skip"]
    assert main([*command, *NUMBERS]) == 3
    said = capsys.readouterr().err
    assert "there is no text in the input" in said
    assert ("2 documents were skipped, the first is " in said) == bool(content)
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "o_text_document.bin"]
