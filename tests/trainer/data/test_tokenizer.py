"""Tokenizers: every text comes back, the same text gives the same file, and refusals in one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trainer.data.conftest import TEXTS
from trainer.config import DataConfig
from trainer.data.errors import DataError
from trainer.data.tokenizer import HuggingFaceTokenizer, NullTokenizer, load_tokenizer
from trainer.data.train_tokenizer import train_byte_level_bpe


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ["a <|endoftext|> b", "\r\n\t  x", " 日本語 한국어 🏳️‍🌈", "\x00\x7f", "  "])
def test_awkward_texts_come_back(tokenizer: HuggingFaceTokenizer, text: str) -> None:
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eod not in tokens
    assert tokenizer.encode_batch([text, "x"]) == [tokens, tokenizer.encode("x")]


def test_all_bytes_are_in_the_vocabulary(tokenizer: HuggingFaceTokenizer) -> None:
    assert tokenizer.vocab_size == 300
    single = {tuple(tokenizer.encode(chr(number))) for number in range(128)}
    assert len(single) == 128
    assert all(len(tokens) == 1 for tokens in single)


def test_training_is_the_same_on_any_number_of_threads(tokenizer_file: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for threads in ("1", "4"):
        command = [sys.executable, "-m", "trainer", "train-tokenizer", "--input", source, "--vocab-size", "300"]
        subprocess.run(
            [*command, "--output", tmp_path / f"{threads}.json"],
            check=True,
            capture_output=True,
            env=os.environ | {"RAYON_NUM_THREADS": threads},
            timeout=60,
        )
        assert (tmp_path / f"{threads}.json").read_bytes() == tokenizer_file.read_bytes()


def test_vocabulary_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="256 is below 257"):
        train_byte_level_bpe(TEXTS, 256, tmp_path / "t.json")
    with pytest.raises(DataError, match="yields only .* of the 100000 asked for"):
        train_byte_level_bpe(TEXTS, 100_000, tmp_path / "t.json")
    assert not list(tmp_path.iterdir())


def test_folder_and_its_end_of_document(tokenizer_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    assert load_tokenizer(DataConfig(tokenizer_model=str(tmp_path))).eod == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "x"}}')
    assert HuggingFaceTokenizer(tmp_path).eod == HuggingFaceTokenizer(tokenizer_file).encode("x")[0]
    with pytest.raises(DataError, match="has no token '</s>' to end a document with"):
        HuggingFaceTokenizer(tmp_path, "</s>")


def test_unusable_tokenizers_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    for name, says in (("none.json", "cannot read the tokenizer"), ("bad.json", "is not a tokenizer.json")):
        with pytest.raises(DataError, match=f"{name}: {says}") as caught:
            load_tokenizer(DataConfig(tokenizer_model=str(tmp_path / name)))
        assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="data.tokenizer_model: is unset"):
        load_tokenizer(DataConfig())


def test_null_tokenizer_is_megatrons() -> None:
    tokenizer = NullTokenizer(10)
    assert (tokenizer.vocab_size, tokenizer.eod) == (11, 10)
    assert tokenizer.encode(" 1 2\n9") == [1, 2, 9]
    assert tokenizer.decode([1, 2, 10]) == "1 2"
    for text in ("10", "-1", "x"):
        with pytest.raises(DataError, match="NullTokenizer"):
            tokenizer.encode(text)
    assert load_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 10).sha256 == tokenizer.sha256
