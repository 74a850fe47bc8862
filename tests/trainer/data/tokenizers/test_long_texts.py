"""The memory of a long text is limited, and reported before encoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.trainer.data.vocabularies import Vocabularies
from trainer.data.errors import DataError
from trainer.data.tokenizers import long_texts
from trainer.data.tokenizers.factory import open_tokenizer


@pytest.mark.parametrize(
    ("kind", "library", "each"), [("unigram", "sentencepiece", 45), ("wordpiece", "tokenizers", 190)]
)
def test_memory_of_a_long_text_is_reported_and_limited(
    vocabularies: Vocabularies,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    library: str,
    each: int,
) -> None:
    monkeypatch.setattr(long_texts, "WARNING_BYTES", 9000 * each)
    monkeypatch.setattr(long_texts, "MAX_BYTES", 90_000 * each)
    tokenizer = open_tokenizer(replace(vocabularies.settings(kind), engine=library))
    for letters, is_reported in ((3000, False), (3001, True), (6000, False), (6003, True), (30_000, True)):
        assert len(tokenizer.encode("語" * letters))
        line = f"GB of memory, because {library} encodes a whole document at a time"
        assert capfd.readouterr().err.count(line) == is_reported
    with pytest.raises(DataError, match=r"divide the document \(plain text: --text-document paragraph or line\)"):
        tokenizer.encode("語" * 30_001)
