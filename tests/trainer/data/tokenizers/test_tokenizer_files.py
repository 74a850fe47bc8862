"""Unusable tokenizer files: each error is one sentence with the file and the problem."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.data.vocabularies import Vocabularies
from trainer.config.sections.data import DataConfig
from trainer.data.commands.preprocess import tokenize_documents
from trainer.data.errors import DataError
from trainer.data.tokenizers.factory import load_tokenizer, open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings


def refused(says: str, **chosen: Any) -> None:
    with pytest.raises(DataError, match=says) as caught:
        settings = TokenizerSettings(**{k: str(v) if isinstance(v, Path) else v for k, v in chosen.items()})
        raise AssertionError(open_tokenizer(settings).engine)
    assert "\n" not in str(caught.value)


def test_missing_and_wrong_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.tokenizer_model: is unset; name a tokenizer.json"):
        load_tokenizer(DataConfig())
    with pytest.raises(DataError, match=r"vocab_size: NullTokenizer needs it, from 1 to \d+; set model.vocab_size"):
        load_tokenizer(DataConfig(tokenizer_type="NullTokenizer"))
    refused("valid are HuggingFaceTokenizer", tokenizer_type="x")
    for name in ("none.json", "none.model", "none.tiktoken"):
        refused(f"{name}: cannot read the tokenizer", tokenizer_model=tmp_path / name)
    refused(
        r"openai/gpt2: cannot read .*; download a model of the Hugging Face Hub first: `hf download openai/gpt2 ",
        tokenizer_model="openai/gpt2",
    )
    refused("holds no tokenizer.json, vocab.json", tokenizer_model=tmp_path)
    refused(r"holds no tokenizer.model or \*.model", tokenizer_model=tmp_path, tokenizer_type="Llama2Tokenizer")
    refused("vocab.json: cannot be read", tokenizer_model=tmp_path, tokenizer_type="GPT2BPETokenizer")
    refused("tokenizer_model: SentencePieceTokenizer needs it", vocab_file="v", tokenizer_type="SentencePieceTokenizer")
    for name in ("a.model", "b.model"):
        (tmp_path / name).touch()
    refused("holds a.model and b.model; name the file", tokenizer_model=tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("t.json", b"{}", "is not a valid tokenizer.json: it has no model"),
        ("t.json", b"{", "is not a valid tokenizer.json: Expecting"),
        ("t.json", b'{"model": {"type": "BPE", "vocab": {"a": "b"}}}', "its vocabulary has no ids"),
        ("t.json", b'{"model": {"type": "BPE", "vocab": {}}}', "its vocabulary is empty"),
        ("t.json", b'{"model": {"vocab": {"a": 0, "b": 0}}}', "gives id 0 to 'a' and 'b'"),
        ("t.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0, "content": "b"}]}', "id 0 to 'a' and"),
        ("t.json", b'{"model": {"vocab": {"a": 0}, "dropout": 0.1}}', "drops merges at random"),
        ("t.json", b'{"model": {"type": "Mystery", "vocab": {"a": 0}}}', "is not a valid tokenizer.json"),
        ("t.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": 1}', "1 is not an added token"),
        ("t.json", b'{"model": {"vocab": {"a": 0}, "merges": [["a", 1]]}}', r"\['a', 1\] is not a merge of two pieces"),
        (
            "t.json",
            b'{"model": {"vocab": {"a": 0}, "continuing_subword_prefix": "##", "merges": [["a", "a"]]}}',
            r"the second piece of merge \['a', 'a'\] does not begin with model.continuing_subword_prefix, '##'",
        ),
        ("t.json", b'{"model": {"vocab": [["a", 0.5], []]}}', r"\[\] is not a piece and score"),
        ("t.json", b"[" * 100_000, "is not a valid tokenizer.json"),
        ("t.model", b"\x0a\x03\x0a\x01a\x12\x02\x1a\x00", "is not a SentencePiece model: field 3 is not a number"),
        ("t.model", b"\x0a\x04\x0a\x01a\x1a\x00", "is not a SentencePiece model"),
        ("t.model", b"not a model", "is not a SentencePiece model"),
        ("t.model", b"", "is not a SentencePiece model: it has no pieces"),
        ("r50k_base.tiktoken", b"IQ== 0\nIg==\n", "r50k_base.tiktoken:2: is not base64 and rank"),
        ("r50k_base.tiktoken", b"IQ== 0\nIg== 0\n", "gives b'\"' the rank 0, but one of the two is already in use"),
        ("r50k_base.tiktoken", b"IQ== 0\n", "ends at rank 0, but a file of this name continues to 50256; it is trunc"),
        ("tekken.json", b'[{"rank": 0, "token_bytes": "AA=="}]', "has no token for 255 of the 256 bytes"),
        ("tekken.json", b'{"config": {}}', "is neither a list of ranks nor a tekken.json"),
        ("tekken.json", b"[", "is not JSON"),
        (
            "tekken.json",
            b'{"config": {"default_vocab_size": "x"}, "vocab": []}',
            "config.default_vocab_size is 'x', but",
        ),
        ("tekken.json", b'{"config": {}, "vocab": [], "special_tokens": [{"rank": 0}]}', "has no rank and token_str"),
        ("tekken.json", b'{"config": {"default_vocab_size": 5}, "vocab": []}', "leave no room in 5 ids"),
        ("tekken.json", b'{"config": {}, "vocab": [{"rank": 1, "token_bytes": "AA=="}]}', "entry 0 has rank 1"),
        ("tekken.json", b'{"config": {}, "vocab": [{"rank": 0}]}', "entry 0 has no rank and token_bytes"),
        ("vocab.txt", b"[UNK]\na\n\nb\n", "vocab.txt:3: is empty, so that id 2 has no token"),
        ("vocab.txt", b"[UNK]\na\na\n", "vocab.txt:3: 'a' is already in line 2"),
        ("vocab.txt", b"a\n", r"has no \[UNK\]"),
        ("vocab.txt", b"\xff\n", "is not UTF-8 text"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    kind = "BertWordPieceCase" if name == "vocab.txt" else None
    refused(says, tokenizer_model=tmp_path / name, tokenizer_type=kind)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _drop_id(path: Path) -> None:
    vocabulary = json.loads(path.read_text())
    vocabulary.pop(max(vocabulary, key=vocabulary.__getitem__))
    vocabulary = {piece: token + (token > 300) for piece, token in vocabulary.items()}
    path.write_text(json.dumps(vocabulary))


def _drop_merges(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-9]))


def _drop_byte(path: Path) -> None:
    vocabulary = json.loads(path.read_text())
    vocabulary["\u0120\u0120\u0120"] = vocabulary.pop("\u0120")
    path.write_text(json.dumps(vocabulary))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        ("vocab.json", _cut, "vocab.json: is not JSON"),
        ("vocab.json", _drop_id, "has 499 tokens, but none with id 301"),
        ("vocab.json", _drop_byte, "has no token for 1 of the 256 bytes"),
        ("vocab.json", lambda path: path.write_text("[]"), "is not an object of tokens and their ids"),
        ("merges.txt", lambda path: path.write_text("#version: 0.2\na b c\n"), "merges.txt:2: is not a pair of tokens"),
        ("merges.txt", lambda path: path.write_text("a zzz\n"), "merges.txt:1: merges to or from 'zzz', which .*json"),
        ("merges.txt", lambda path: path.unlink(), "merges.txt: cannot be read"),
        ("merges.txt", _drop_merges, "merges.txt: does not make 9 of the 500 tokens of .*vocab.json; it is truncated"),
    ],
)
def test_damaged_gpt2(
    vocabularies: Vocabularies, tmp_path: Path, name: str, damage: Callable[[Path], Any], says: str
) -> None:
    for file in ("vocab.json", "merges.txt"):
        (tmp_path / file).write_bytes((vocabularies.folder / "gpt2" / file).read_bytes())
    damage(tmp_path / name)
    refused(says, vocab_file=tmp_path / "vocab.json", merge_file=tmp_path / "merges.txt")


def test_wrong_kinds(vocabularies: Vocabularies) -> None:
    model, ranks = vocabularies.folder / "unigram.model", vocabularies.folder / "ranks.tiktoken"
    refused("unigram.model: is not a valid tokenizer.", tokenizer_model=model, tokenizer_type="HuggingFaceTokenizer")
    refused(r"unigram.model:\d+: is not base64 and rank", tokenizer_model=model, tokenizer_type="TikTokenizer")
    refused("is not a SentencePiece model", tokenizer_model=ranks, tokenizer_type="SentencePieceTokenizer")
    refused("ranks.tiktoken: does not define how text is split into words", tokenizer_model=ranks)
    refused("tiktoken_pattern is not a regular expression", tokenizer_model=ranks, tiktoken_pattern="(")
    refused("no tokenizer_config.json with do_lower_case", tokenizer_model=vocabularies.folder / "vocab.txt")


def test_truncated_sentencepiece_model(vocabularies: Vocabularies, tmp_path: Path) -> None:
    content = (vocabularies.folder / "bpe.model").read_bytes()
    (tmp_path / "t.model").write_bytes(content[: len(content) // 2])
    refused("t.model: is not a SentencePiece model: it ends at byte", tokenizer_model=tmp_path / "t.model")


def test_damaged_settings_beside_the_vocabulary(vocabularies: Vocabularies, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((vocabularies.folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("{")
    refused("tokenizer_config.json: cannot be read as JSON", tokenizer_model=tmp_path)


def test_documents_without_an_end(vocabularies: Vocabularies, tmp_path: Path) -> None:
    refused(
        r"has no token '</s>' to end a document with", tokenizer_model=vocabularies.folder / "gpt2", eod_token="</s>"
    )
    bare = [f"{base64.b64encode(bytes([value])).decode()} {value}\n" for value in range(256)]
    (tmp_path / "bytes.tiktoken").write_text("".join(bare))
    settings = TokenizerSettings(tokenizer_model=str(tmp_path / "bytes.tiktoken"), tiktoken_pattern="r50k")
    with pytest.raises(DataError, match=r"--append-eod: the tokenizer has no end-of-document token; name a token with"):
        tokenize_documents(["a"], open_tokenizer(settings), tmp_path / "d")
