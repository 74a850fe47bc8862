"""``preprocess`` writes the same bytes as Megatron-LM's preprocess_data.py for the same text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.data.token_files import RECORDED
from trainer.data.commands.preprocess import main
from trainer.data.indexed.manifest import read_manifest


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    """GPT-2's vocabulary, with fillers for the unused tokens, which are not recorded."""
    vocabulary = json.loads((RECORDED / "gpt2_vocab.json").read_text(encoding="utf-8"))
    known = set(vocabulary.values())
    vocabulary |= {f"<filler {number}>": number for number in range(max(known)) if number not in known}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (tmp_path / "merges.txt").write_bytes((RECORDED / "gpt2_merges.txt").read_bytes())
    return tmp_path


@pytest.mark.parametrize(("name", "vocab_size", "eod"), [("gpt2_bpe", 50_257, 50_256), ("sentencepiece", 640, 2)])
def test_prepared_text_is_megatrons(tmp_path: Path, gpt2: Path, name: str, vocab_size: int, eod: int) -> None:
    if name == "gpt2_bpe":
        tokenizer = ["--tokenizer-type", "GPT2BPETokenizer"]
        tokenizer += ["--vocab-file", str(gpt2 / "vocab.json"), "--merge-file", str(gpt2 / "merges.txt")]
    else:
        tokenizer = ["--tokenizer-type", "GPTSentencePieceTokenizer"]
        tokenizer += ["--tokenizer-model", str(RECORDED / "sentencepiece.model")]
    arguments = ["--input", str(RECORDED / "corpus.jsonl"), "--output-prefix", str(tmp_path / name), "--append-eod"]
    assert main([*arguments, *tokenizer]) == 0
    checksums = json.loads((RECORDED / "checksums.json").read_text())
    prefix = tmp_path / f"{name}_text_document"
    for part in ("bin", "idx"):
        file = f"{prefix.name}.{part}"
        assert (tmp_path / file).read_bytes() == (RECORDED / file).read_bytes()
    manifest = read_manifest(prefix)
    assert manifest is not None
    assert (manifest.vocab_size, manifest.eod, manifest.documents) == (vocab_size, eod, 17)
    assert manifest.bin_sha256 == checksums[f"{prefix.name}.bin"]
    assert manifest.idx_sha256 == checksums[f"{prefix.name}.idx"]
