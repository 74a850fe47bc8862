"""``llmctl data prepare``: its output, the same bytes each time, and its errors."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from examples.python_corpus import LARGEST_FILE, MAX_BYTES, standard_library_files
from trainer.data.commands.preprocess import main
from trainer.data.indexed.indexed_dataset import IndexedDataset
from trainer.data.indexed.manifest import read_manifest
from trainer.data.tokenizers.tokenizer import Tokenizer


def documents(prefix: Path) -> list[list[int]]:
    with IndexedDataset(prefix) as dataset:
        return [dataset[i].tolist() for i in range(len(dataset))]


def test_json_lines_by_key(tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer) -> None:
    lines = [{"title": "one", "body": "text of one"}, {"title": "", "body": "two\r\n"}]
    plain, packed = tmp_path / "in.jsonl", tmp_path / "in.json.gz"
    plain.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    options = ["--json-keys", "title", "body", "--tokenizer-model", str(tokenizer_file), "--append-eod"]
    assert main(["--input", str(plain), str(packed), "--output-prefix", str(tmp_path / "out/a.b"), *options]) == 0
    bodies = [tokenizer.encode(line["body"]) + [0] for line in lines]
    assert documents(tmp_path / "out/a.b_body_document") == bodies * 2
    titles = tmp_path / "out/a.b_title_document"
    assert documents(titles) == [tokenizer.encode("one") + [0]] * 2
    manifest = read_manifest(titles)
    assert manifest is not None
    assert (manifest.documents, manifest.sequences, manifest.text_bytes, manifest.eod) == (4, 2, 6, 0)
    assert manifest.tokenizer_sha256 == tokenizer.sha256
    first = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(first) == 6
    assert main(["--input", str(plain), str(packed), "--output-prefix", str(tmp_path / "out/a.b"), *options]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == first


def test_plain_files_are_one_document_each(tmp_path: Path, tokenizer_file: Path, tokenizer: Tokenizer) -> None:
    texts = ["def f():\n    pass\n", "ä\r\nö"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    inputs = [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]
    prefix = str(tmp_path / "out")
    assert main(["--input", *inputs, "--output-prefix", prefix, "--tokenizer-model", str(tokenizer_file)]) == 0
    assert [tokenizer.decode(tokens) for tokens in documents(tmp_path / "out_text_document")] == texts


def test_numbers(tmp_path: Path) -> None:
    (tmp_path / "n.jsonl").write_text('{"text": "1 2 3"}\n{"text": ""}\n{"text": "70000"}\n')
    options = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100000", "--append-eod"]
    assert main(["--input", str(tmp_path / "n.jsonl"), "--output-prefix", str(tmp_path / "n"), *options]) == 0
    assert documents(tmp_path / "n_text_document") == [[1, 2, 3, 100_000], [70_000, 100_000]]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": "a"}\n{"text": \n', "in.jsonl:2: is not a line of JSON"),
        (b'{"text": "a"}\n{"txt": "b"}\n', "in.jsonl:2: the line has no text under the key 'text'"),
        (b'["text"]\n', "in.jsonl:1: the line is not a JSON object with texts"),
        (b'{"text": "\xff"}\n', "in.jsonl:1: is not UTF-8 text: byte 0xff at position 11"),
        (None, "in.jsonl: cannot be read: No such file"),
    ],
)
def test_bad_input_is_named_and_leaves_nothing(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, says: str
) -> None:
    if content is not None:
        (tmp_path / "in.jsonl").write_bytes(content)
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out" / "p")]
    assert main([*arguments, "--tokenizer-model", str(tokenizer_file)]) == 3
    message = capsys.readouterr().err
    assert says in message
    assert message.count("\n") == 1
    assert not list(tmp_path.glob("out/*"))


def test_outputs_that_cannot_be_written_are_one_sentence(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.txt").write_text("some text\n" * 20)
    (tmp_path / "file").touch()
    place = str(tmp_path / "file" / "out")
    arguments = ["--input", str(tmp_path / "in.txt"), "--output-prefix", place]
    assert main([*arguments, "--tokenizer-model", str(tokenizer_file)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"llmctl data prepare: {place}: cannot be written: ")


def test_the_standard_library_is_about_ten_megabytes_in_a_fixed_order() -> None:
    files = standard_library_files()
    sizes = [file.path.stat().st_size for file in files]
    assert [file.name for file in files] == [file.name for file in standard_library_files()]
    assert 4_000_000 < sum(sizes) <= MAX_BYTES
    assert max(sizes) <= LARGEST_FILE
    assert {"argparse.py", "asyncio/base_events.py"} & {file.name for file in files}
