"""Small vocabularies of every kind, trained on text made here."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sentencepiece import SentencePieceTrainer
from tokenizers import Tokenizer as Library
from tokenizers import models, trainers

from examples.train_tokenizer import train_byte_level_bpe
from trainer.data.tokenizers.byte_level import bytes_of
from trainer.data.tokenizers.factory import open_tokenizer
from trainer.data.tokenizers.settings import TokenizerSettings
from trainer.data.tokenizers.tokenizer import Tokenizer
from trainer.data.tokenizers.wordpiece import SPECIAL, wordpiece_content

_LINES = (
    "def value_{0}(self):\n    return {0} * self.value  # the number {0}, and it's done\n",
    "日本語の文章は空白がありません。番号{0}です。漢字とひらがな、カタカナ。\n",
    "한국어 문장입니다. 번호는 {0}이고, 값은 {0}입니다.\n",
    "The naïve café served {0} crêpes; they weren't unbelievable, they're the usual ones.\n",
)
_PARTS = ("ka", "to", "mi", "ren", "sol", "ban", "ver", "di", "lu", "pex")


def _names(number: int) -> str:
    parts = [_PARTS[number * step // 2 % len(_PARTS)] for step in (2, 3, 7, 5, 11, 13, 4, 9)]
    return " ".join("".join(parts[first : first + 4]) for first in range(5)) + "\n"


TEXTS = [text for number in range(60) for text in (*(line.format(number) for line in _LINES), _names(number))]


@dataclass(frozen=True)
class Vocabularies:
    """Files of each kind of vocabulary."""

    folder: Path

    def settings(self, kind: str) -> TokenizerSettings:
        known = {
            "huggingface": TokenizerSettings(tokenizer_model=str(self.folder / "tokenizer.json")),
            "gpt2": TokenizerSettings(tokenizer_model=str(self.folder / "gpt2")),
            "unigram": TokenizerSettings(tokenizer_model=str(self.folder / "unigram.model")),
            "bpe": TokenizerSettings(tokenizer_model=str(self.folder / "bpe.model")),
            "ranks": TokenizerSettings(
                tokenizer_model=str(self.folder / "ranks.tiktoken"),
                tiktoken_pattern="cl100k",
                tokenizer_special_tokens=("<|endoftext|>",),
            ),
            "list": TokenizerSettings("TikTokenizer", str(self.folder / "list.json"), tiktoken_num_special_tokens=10),
            "wordpiece": TokenizerSettings("BertWordPieceLowerCase", vocab_file=str(self.folder / "vocab.txt")),
        }
        return known[kind]

    def open(self, kind: str) -> Tokenizer:
        return open_tokenizer(self.settings(kind))


def train_sentencepiece(texts: Iterable[str], vocab_size: int, kind: str) -> bytes:
    """A .model that does not normalise text and spells rare letters in bytes."""
    content = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.splitlines()),
        model_writer=content,
        vocab_size=vocab_size,
        model_type=kind,
        control_symbols=["<CLS>", "<MASK>"],
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        pad_id=3,
        num_threads=1,
        minloglevel=2,
    )
    return content.getvalue()


def train_wordpiece(texts: Iterable[str], vocab_size: int) -> str:
    """A lower-case vocab.txt."""
    parts = Library.from_str(json.dumps(wordpiece_content({name: token for token, name in enumerate(SPECIAL)}, True)))
    tokenizer = Library(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = parts.normalizer, parts.pre_tokenizer
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=[*SPECIAL], limit_alphabet=60)
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = tokenizer.get_vocab()
    return "".join(f"{piece}\n" for piece in sorted(vocabulary, key=vocabulary.__getitem__))


LOSSLESS = ("huggingface", "gpt2", "unigram", "bpe", "ranks", "list")
KINDS = (*LOSSLESS, "wordpiece")


def make_vocabularies(folder: Path) -> Vocabularies:
    train_byte_level_bpe(TEXTS, 500, folder / "tokenizer.json")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (folder / "gpt2" / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)[1:]
    # In tokenizer.json the byte letters come first, ordered by letter; ranks need them ordered by byte.
    spelled = [bytes([value]) for value in range(256)] + [bytes_of(piece) or b"" for piece in pieces[256:]]
    coded = [base64.b64encode(piece).decode() for piece in spelled]
    (folder / "ranks.tiktoken").write_text("".join(f"{piece} {rank}\n" for rank, piece in enumerate(coded)))
    entries = [{"rank": rank, "token_bytes": piece, "token_str": None} for rank, piece in enumerate(coded)]
    (folder / "list.json").write_text(json.dumps(entries))
    for kind in ("unigram", "bpe"):
        (folder / f"{kind}.model").write_bytes(train_sentencepiece(TEXTS, 460, kind))
    (folder / "vocab.txt").write_text(train_wordpiece(TEXTS, 300))
    return Vocabularies(folder)
