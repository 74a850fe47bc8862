"""A small vocabulary, trained once per session on text made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.data.tokenizer import HuggingFaceTokenizer
from trainer.data.train_tokenizer import train_byte_level_bpe

TEXTS = [f"def f{number}(self):\n    return {number} * self.value  # number {number}\n" for number in range(200)]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(TEXTS, 300, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(tokenizer_file)
