"""Small vocabularies, trained once per session on text made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.train_tokenizer import train_byte_level_bpe
from tests.trainer.data.masked.masked_corpus import RECORDED
from tests.trainer.data.vocabularies import Vocabularies, make_vocabularies
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer

TEXTS = [f"def f{number}(self):\n    return {number} * self.value  # number {number}\n" for number in range(200)]


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_byte_level_bpe(TEXTS, 300, path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_file: Path) -> Tokenizer:
    return open_tokenizer(TokenizerSettings(tokenizer_model=str(tokenizer_file)))


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Vocabularies:
    """Vocabularies of every kind: at most 500 tokens, for English, Japanese, Korean and Python."""
    return make_vocabularies(tmp_path_factory.mktemp("vocabularies"))


@pytest.fixture(scope="session")
def recorded_masks() -> dict[str, Any]:
    """BERT's and T5's mappings and samples, recorded from Megatron-LM."""
    with np.load(RECORDED) as file:
        return dict(file)
