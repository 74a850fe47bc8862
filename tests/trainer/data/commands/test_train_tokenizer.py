"""Training vocabularies: the same file from the same text, and refusal of impossible sizes."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pyarrow
import pytest
from pyarrow import parquet

from tests.trainer.data.vocabularies import TEXTS, Vocabularies
from tests.waiting import HANG_S
from trainer.config.data_flags import ENDINGS
from trainer.data import background
from trainer.data.commands import corpus, train_tokenizer
from trainer.data.commands.corpus import Corpus
from trainer.data.commands.train_sentencepiece import train_sentencepiece
from trainer.data.commands.train_tokenizer import main, train_byte_level_bpe
from trainer.data.commands.train_wordpiece import train_wordpiece
from trainer.data.errors import DataError
from trainer.data.prepare import progress
from trainer.data.prepare.inputs import find_inputs
from trainer.data.prepare.progress import Progress
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


@pytest.mark.parametrize(("name", "made", "size"), [("t.json", "tokenizer.json", 500), ("t.txt", "vocab.txt", 300)])
def test_training_is_the_same_on_any_number_of_threads(
    source: Path, vocabularies: Vocabularies, tmp_path: Path, name: str, made: str, size: int
) -> None:
    for threads in ("1", "4"):
        output = tmp_path / threads / name
        command = [sys.executable, "-m", "trainer", "data", "train-tokenizer", source, "--vocab-size", str(size)]
        subprocess.run(
            [*command, "--output", output],
            check=True,
            capture_output=True,
            env=os.environ | {"RAYON_NUM_THREADS": threads},
            timeout=HANG_S,
        )
        assert output.read_bytes() == (vocabularies.folder / made).read_bytes()


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_models_are_reproducible(
    source: Path, vocabularies: Vocabularies, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "t.model"
    arguments = ["--input", str(source), "--vocab-size", "460", "--output", str(output), "--model", kind]
    assert main([*arguments, "--special-tokens", "<CLS>", "<MASK>", "<pad>"]) == 0
    assert output.read_bytes() == (vocabularies.folder / f"{kind}.model").read_bytes()
    assert capsys.readouterr().out == f"{output}: 460 tokens\n"


def test_all_bytes_are_in_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 300
    single = {tuple(tokenizer.encode(chr(number))) for number in range(128)}
    assert len(single) == 128
    assert all(len(tokens) == 1 for tokens in single)


def test_further_special_tokens(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    train_byte_level_bpe(TEXTS, 300, path, ("<|endoftext|>", "<|mask|>", "<|mask|>"))
    found = open_tokenizer(TokenizerSettings(tokenizer_model=str(path)))
    assert (found.eod, found.specials.mask, found.vocab_size) == (0, 1, 300)


def test_impossible_sizes_and_names_are_refused(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="256 is below 257"):
        train_byte_level_bpe(TEXTS, 256, tmp_path / "t.json")
    with pytest.raises(DataError, match="yields only .* of the 100000 requested tokens"):
        train_byte_level_bpe(TEXTS, 100_000, tmp_path / "t.json")
    with pytest.raises(DataError, match="yields only .* of the 100000 requested tokens"):
        train_wordpiece(lambda: TEXTS, 100_000, True, [])
    wrong = ["--output", str(tmp_path / "t.json"), "--model", "bpe"]
    assert main(["--input", str(source), "--vocab-size", "400", *wrong]) == 3
    said = "t.json ends like byte-level-bpe, but bpe needs .model; rename it"
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_input_is_not_overwritten(tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(source.parent)
    before = source.read_bytes()
    output = str(tmp_path / "link" / source.name)
    assert main(["--input", str(source), "--output", output, "--vocab-size", "300"]) == 3
    assert "is an input, and would be lost; choose another name" in capsys.readouterr().err
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("kind", "smallest", "holds"),
    [
        ("byte-level-bpe", 258, "256 bytes and <|endoftext|>, <X>"),
        ("unigram", 263, "256 bytes, <unk>, <s>, </s>, <pad>, <X>, a space and one letter"),
        ("bpe", 263, "256 bytes, <unk>, <s>, </s>, <pad>, <X>, a space and one letter"),
        ("wordpiece", 8, "6 special tokens, and one letter at the start of words and within words"),
    ],
)
def test_sizes_that_no_text_fills_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, smallest: int, holds: str
) -> None:
    (tmp_path / "in.txt").write_text("a aaaa aa aaa aaaaaa")
    output = tmp_path / "new" / f"t{ENDINGS[kind]}"
    command = ["--input", str(tmp_path / "in.txt"), "--output", str(output), "--model", kind, "--special-tokens", "<X>"]
    for size in (-1, 5, smallest - 1):
        assert main([*command, "--vocab-size", str(size), "--check"]) == 3
        said = capsys.readouterr().err
        assert said == f"llmctl data train-tokenizer: --vocab-size: {size} is below {smallest}: {holds}; raise it\n"
    assert main([*command, "--vocab-size", str(1 << 31), "--check"]) == 3
    assert "is above 2147483647, the largest id; lower it" in capsys.readouterr().err
    assert main([*command, "--vocab-size", str(smallest), "--check"]) == 0
    assert not output.parent.exists()
    assert main([*command, "--vocab-size", str(smallest)]) == 0, capsys.readouterr().err
    assert (
        open_tokenizer(TokenizerSettings("BertWordPieceCase" if kind == "wordpiece" else None, str(output))).vocab_size
        == smallest
    )


@pytest.mark.parametrize(
    "name",
    [
        *("", "a", "the", "日", "12", "##a", "<0x41>", "\u2581", "<\u2581x>", "a b", "<x\ny>", "<\ud800>", "<<"),
        # Byte-level spellings of " the", " -" and a dash before punctuation.
        *("\u0120the", "\u0120-", "\u00e2\u0122\u0136-"),
        # GPT-2's contractions, and a prefix of one.
        *("'s", "'t", "'re", "'ll", "'v"),
    ],
)
def test_names_that_may_occur_in_encoded_text_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    command = ["--input", str(source), "--vocab-size", "400", "--output", str(tmp_path / "t.json"), "--check"]
    assert main([*command, "--special-tokens", "<X>", "[END]", "end_of_text", name]) == 3
    said = capsys.readouterr().err
    assert f"--special-tokens: {name!r} may occur as a token of text, or cannot be stored; choose letters and" in said
    assert said.count("\n") == 1
    assert main([*command, "--special-tokens", "<X>", "[END]", "end_of_text", "<終わり>", "<1>", "'S"]) == 0


@pytest.mark.parametrize("text", ["the quick brown fox", "a b c d e", "x", "日本語の文 日本 語", "aaa aa a"])
def test_the_size_advised_for_a_small_text_is_valid(text: str) -> None:
    with pytest.raises(DataError, match="the text yields only ") as caught:
        train_wordpiece(lambda: [text], 5000, True, [])
    (advised,) = re.findall(r"lower it to (\d+) or give more text", str(caught.value))
    found = train_wordpiece(lambda: [text], int(advised), True, []).splitlines()
    assert len(found) == int(advised)
    # No letter of the text is unknown.
    assert {letter for letter in text if not letter.isspace()} <= {*found}


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sizes_that_sentencepiece_refuses_come_with_a_valid_one(kind: Literal["unigram", "bpe"]) -> None:
    with pytest.raises(DataError, match="100000 requested tokens; lower it to") as caught:
        train_sentencepiece(TEXTS, 100_000, kind, [])
    (advised,) = re.findall(
        r"yields only (\d+) of the 100000 requested tokens; lower it to \1 or give more text", str(caught.value)
    )
    assert train_sentencepiece(TEXTS, int(advised), kind, [])
    with pytest.raises(
        DataError, match=r"270 is below \d+: .* and the letters of the text, except the rarest; raise it"
    ) as caught:
        train_sentencepiece(TEXTS, 270, kind, [])
    (advised,) = re.findall(r"270 is below (\d+)", str(caught.value))
    assert train_sentencepiece(TEXTS, int(advised), kind, [])


def test_a_text_without_letters_gets_no_invalid_advice() -> None:
    with pytest.raises(
        DataError, match=r"only 5 of the 300 requested tokens; give more text \(the smallest voc.* has 7:"
    ):
        train_wordpiece(lambda: [" "], 300, True, [])


def test_training_reports_progress_until_its_end(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_SECONDS", "_SECONDS"):
        monkeypatch.setattr(progress, name, 0.0)
    monkeypatch.setattr(background, "_BEAT_SECONDS", 0.0)
    is_reported = threading.Event()
    monkeypatch.setattr(progress, "say", lambda line: is_reported.set() if line.endswith(" so far") else None)

    def slow(texts: Iterable[str], *_: object) -> bytes:
        assert len(list(texts)) == len(TEXTS)
        assert is_reported.wait(60)
        return b"{}"

    monkeypatch.setattr(train_tokenizer, "learn_byte_level_bpe", slow)
    assert main(["--input", str(source), "--vocab-size", "300", "--output", str(tmp_path / "t.json")]) == 0


def test_a_sample_comes_from_all_parts_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_LEAST_PIECE", 100)
    lines = [f"line {number:05}\n" for number in range(3000)]
    (tmp_path / "a.txt").write_text("".join(lines[:1000]))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("".join(lines[1000:2000]).encode()))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines[2000:]))
    files = tuple(find_inputs([str(tmp_path)]))
    whole = Corpus(files, ("text",))
    assert "".join(whole.texts()) == "".join(lines)
    sample = Corpus(files, ("text",), whole.size // 10)
    taken = "".join(sample.texts()).splitlines(keepends=True)
    assert taken == "".join(sample.texts()).splitlines(keepends=True)
    assert {*taken} < {*lines}
    for first in range(0, 3000, 1000):
        numbers = [int(line[5:]) for line in taken if first <= int(line[5:]) < first + 1000]
        assert 50 < len(numbers) < 200
        assert first in range(numbers[0] - 100, numbers[0] + 1)
        assert numbers[-1] > first + 850


def test_plain_text_is_read_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PIECE", 64)
    text = "".join(f"{number} 日本\r\n\n" for number in range(50)) + "no end"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    pieces = [*Corpus(tuple(find_inputs([str(tmp_path)])), ("text", "other")).texts()]
    assert "".join(pieces) == text
    assert max(map(len, pieces)) < 100
    assert all(piece.endswith("\n") for piece in pieces[:-1])


def test_sampling_is_reported_and_a_check_writes_nothing(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--input", str(source), "--vocab-size", "300", "--output", str(tmp_path / "new/t.json")]
    assert main([*arguments, "--check"]) == 0
    assert main([*arguments, "--check", "--output", str(tmp_path)]) == 3
    assert f"--output: {tmp_path} is a folder; append a file name" in capsys.readouterr().err
    assert main([*arguments, "--check", "--output", str(source / "t.json")]) == 3
    assert "t.json: cannot be written: " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert main([*arguments, "--sample-bytes", "0.009M"]) == 0
    said = capsys.readouterr().err
    assert "training on about 0 of 0 MB of text, spread evenly over the files; change the amount with --sam" in said


def test_tilde_is_expanded_and_progress_is_shown(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(Progress, "still", lambda _: None)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name, reads in (("t.json", 1), ("t.txt", 2)):
        monkeypatch.setattr(progress, "_SECONDS", 0.0)
        assert main(["--input", str(source), "--vocab-size", "300", "--output", f"~/new/{name}"]) == 0
        said = capsys.readouterr()
        assert said.out == f"{tmp_path}/new/{name}: 300 tokens\n"
        lines = said.err.splitlines()
        assert [f"{len(TEXTS) * number} texts, " in line for number, line in enumerate(lines[:-1], 1)] == [True] * reads
        assert "(100%)" in lines[-2] and lines[-1] == "all text is read; training 300 tokens"
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_input_without_text_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").touch()
    command = ["--input", str(tmp_path / "in.jsonl"), "--vocab-size", "257", "--output", str(tmp_path / "t.json")]
    assert main(command) == 3
    assert "--input: holds no text; give other files, or other --json-keys" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("suffix", [".json", ".txt", ".model"])
def test_errors_of_the_text_name_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, "\ud800 alone"])
    (tmp_path / "in.jsonl").write_text(lines + "{\n")
    command = ["--input", str(tmp_path / "in.jsonl"), "--vocab-size", "400", "--output", str(tmp_path / f"t{suffix}")]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert f"llmctl data train-tokenizer: {tmp_path}/in.jsonl:{len(TEXTS) + 2}: is not a line of JSON: " in said
    assert said.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(
    ("suffix", "package"), [(".json", "tokenizers"), (".txt", "tokenizers"), (".model", "sentencepiece")]
)
def test_a_missing_library_is_reported_before_anything_is_read(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    suffix: str,
    package: str,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    command = ["--input", str(source), "--vocab-size", "400", "--output", str(tmp_path / f"t{suffix}"), "--check"]
    assert main(command) == 3
    said = capsys.readouterr().err
    assert f"needs the package {package}; install it" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("size", ["infG", "nanM", "M", "", "0"])
def test_a_sample_is_a_number_of_bytes(source: Path, capsys: pytest.CaptureFixture[str], size: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--input", str(source), "--vocab-size", "400", "--output", "t.json", "--sample-bytes", size])
    said = capsys.readouterr().err
    assert f"{size!r} is not a number of bytes such as 500M or 2G" in said or f"{size} is less than 1" in said


_DEAF = """
import sys, time
from trainer import __main__
from trainer.data.commands import train_tokenizer

def deaf(*_):
    print("begun", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass

train_tokenizer.learn_byte_level_bpe = deaf
sys.exit(__main__.main(sys.argv[1:]))
"""


def test_an_interrupt_ends_training_at_once(source: Path, tmp_path: Path) -> None:
    words = ["data", "train-tokenizer", str(source), "--vocab-size", "300", "--output", str(tmp_path / "t.json")]
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _DEAF, *words], stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=HANG_S)[1]
        finally:
            process.kill()
    assert (process.returncode, said) == (130, "llmctl data train-tokenizer: interrupted\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("row_group", [30_000, 2000])
def test_a_sample_of_a_table_comes_from_all_parts_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int
) -> None:
    monkeypatch.setattr(corpus, "_LEAST_PIECE", 1000)
    texts = [f"line {number:05}\n" for number in range(30_000)]
    # The other column of the table is not text.
    table = pyarrow.table({"text": texts, "other": [os.urandom(20) for _ in texts]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=row_group)
    whole = Corpus(tuple(find_inputs([str(tmp_path)])), ("text",))
    assert [*whole.texts()] == texts
    assert whole.text_bytes == pytest.approx(len("".join(texts)), rel=0.2)
    done: list[int] = []
    sample = Corpus(whole.files, ("text",), whole.text_bytes // 10)
    taken = [int(text[5:]) for text in sample.texts(lambda _, number: done.append(number))]
    assert taken == sorted({*taken})
    assert sum(done) == len(taken)
    assert 2400 < len(taken) < 3600
    assert all(
        200 < len([number for number in taken if first <= number < first + 5000]) < 900
        for first in range(0, 30_000, 5000)
    )


def test_a_sample_of_compressed_text_has_about_the_requested_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE", 1000)
    monkeypatch.setattr(corpus, "_LEAST_PIECE", 1000)
    text = "".join(f"line {number:05}\n" for number in range(30_000))
    (tmp_path / "in.txt.gz").write_bytes(gzip.compress(text.encode()))
    sample = Corpus(tuple(find_inputs([str(tmp_path)])), ("text",), 50_000)
    assert 30_000 < len("".join(sample.texts())) < 80_000
