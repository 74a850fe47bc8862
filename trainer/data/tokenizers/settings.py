"""What a tokenizer is opened from, under Megatron-LM's names, and the flags that say it."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from trainer.data.command_parser import Refused, WithoutEffect
from trainer.megatron_flags import NOT_OF_TEXT, NOT_OF_TEXT_SAID, REFUSED, WITHOUT_EFFECT, TokenizerType

if TYPE_CHECKING:
    from trainer.config import DataConfig

TOKENIZER_TYPES: tuple[str, ...] = get_args(TokenizerType)
_TOLD = "unset: told from the files"
_PADDED = "vocabularies are padded for a model, by its config"
_PASSED_OVER = (
    "use-gigatoken",
    "tokenizer-hf-use-fast",
    "tokenizer-hf-no-use-fast",
    "legacy-tokenizer",
    "trust-remote-code",
    "tokenizer-sentencepiece-legacy",
    "null-tokenizer-pad-id",
)
_REFUSED = (
    "tokenizer-metadata",
    "chat-template",
    "null-tokenizer-eod-id",
    "no-tokenizer-sentencepiece-ignore-extra-whitespaces",
    "disable-tokenizer-sentencepiece-ignore-extra-whitespaces",
)


@dataclass(frozen=True)
class TokenizerSettings:
    """All that decides how a tokenizer works, except the files' content.

    Attributes:
        tokenizer_type: one of TOKENIZER_TYPES; None: told from the files.
        tokenizer_model: the file, or a folder that holds the files.
        vocab_file: vocab.json of a GPT-2 BPE, or vocab.txt of a WordPiece.
        merge_file: merges.txt of a GPT-2 BPE.
        vocab_size: how many numbers a NullTokenizer takes, or how many ids a TikTokenizer's list is cut to.
        vocab_extra_ids: number of <extra_id_i>, added after the vocabulary where it does not have them.
        tokenizer_special_tokens: further names, added likewise; text never becomes one of them.
        tiktoken_pattern: name of a way to cut text into words, or a regular expression that does it; None: told from
            the file.
        tiktoken_num_special_tokens: ids before the first rank of a TikTokenizer's list.
        tokenizer_hf_include_special_tokens: add what a tokenizer.json puts around a text, and read names of special
            tokens in it as those tokens.
        eod_token: name of the token that ends a document; None: told from the files.
        engine: name of the library that encodes; None: the fastest that is installed and agrees with the reference.
    """

    tokenizer_type: str | None = None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None
    vocab_extra_ids: int = 0
    tokenizer_special_tokens: tuple[str, ...] = ()
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tokenizer_hf_include_special_tokens: bool = False
    eod_token: str | None = None
    engine: str | None = None

    @property
    def is_set(self) -> bool:
        """Whether a tokenizer is named at all."""
        return self.has_files or self.tokenizer_type == "NullTokenizer"

    @property
    def has_files(self) -> bool:
        """Whether files are named, and not only numbers."""
        return bool(self.tokenizer_model or self.vocab_file)

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return self.tokenizer_model or self.vocab_file or self.tokenizer_type or "no tokenizer"


def settings_of(data: DataConfig, vocab_size: int | None = None) -> TokenizerSettings:
    """The settings that a config's data section asks for; ``vocab_size`` is the model's."""
    return TokenizerSettings(
        tokenizer_type=data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=vocab_size,
        vocab_extra_ids=data.vocab_extra_ids,
        tokenizer_special_tokens=tuple(data.tokenizer_special_tokens),
        tiktoken_pattern=data.tiktoken_pattern,
        tiktoken_num_special_tokens=data.tiktoken_num_special_tokens,
        tokenizer_hf_include_special_tokens=data.tokenizer_hf_include_special_tokens,
        eod_token=data.eod_token,
    )


def add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of a command that tokenizes, under Megatron-LM's names."""
    group = parser.add_argument_group("tokenizer")
    group.add_argument("--tokenizer-type", type=_type, metavar="TYPE", help=f"{', '.join(TOKENIZER_TYPES)}; {_TOLD}")
    group.add_argument(
        "--tokenizer-model",
        type=Path,
        metavar="FILE",
        help="tokenizer.json, SentencePiece .model, .tiktoken ranks, or a folder that holds a tokenizer's files",
    )
    group.add_argument("--vocab-file", type=Path, metavar="FILE", help="vocab.json (GPT-2) or vocab.txt (BERT)")
    group.add_argument("--merge-file", type=Path, metavar="FILE", help="merges.txt (GPT-2)")
    group.add_argument("--vocab-size", type=int, metavar="N", help="how many numbers a NullTokenizer takes")
    group.add_argument("--vocab-extra-ids", type=_number, default=0, metavar="N", help="T5: number of <extra_id_i>")
    group.add_argument(
        "--tokenizer-special-tokens",
        "--tiktoken-special-tokens",
        nargs="+",
        default=[],
        metavar="NAME",
        help="tokens to add after the vocabulary",
    )
    group.add_argument(
        "--tiktoken-pattern", metavar="PATTERN", help="r50k, p50k, cl100k, o200k, v1, v2 or a regular expression"
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=_number,
        default=1000,
        metavar="N",
        help="ids before the first rank of a list",
    )
    group.add_argument(
        "--tokenizer-hf-include-special-tokens",
        action="store_true",
        help="add what a tokenizer.json puts around a text, and read special tokens in it, as Megatron-LM does",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        dest="tokenizer_hf_include_special_tokens",
        action="store_false",
        help="text is only text: the default",
    )
    group.add_argument("--eod-token", metavar="NAME", help="name of the token that ends a document, if not told")
    _add_megatrons(parser)


def _add_megatrons(parser: argparse.ArgumentParser) -> None:
    """Its flags that scripts give, and that change nothing here or cannot be."""
    accepted = parser.add_argument_group("tokenizer: accepted and without effect")
    for name in _PASSED_OVER:
        flag = WITHOUT_EFFECT[name]
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=flag.values, help=flag.reason)
    accepted.add_argument("--no-pad-vocab-size", "--disable-pad-vocab-size", action=WithoutEffect, help=_PADDED)
    for name in ("padded-vocab-size", "make-vocab-size-divisible-by"):
        accepted.add_argument(f"--{name}", action=WithoutEffect, nargs=1, help=_PADDED)
    for name in _REFUSED:
        parser.add_argument(f"--{name}", action=Refused, const=REFUSED[name])


def _number(word: str) -> int:
    if not re.fullmatch(r"\d+", word, re.ASCII):
        raise argparse.ArgumentTypeError(f"{word!r} is no number of tokens, 0 or more")
    return int(word)


def _type(name: str) -> str:
    if name in NOT_OF_TEXT:
        raise argparse.ArgumentTypeError(f"{name}: {NOT_OF_TEXT_SAID}")
    if name not in TOKENIZER_TYPES:
        raise argparse.ArgumentTypeError(f"{name!r} is not available here; there are {', '.join(TOKENIZER_TYPES)}")
    return name


def settings_from_flags(options: argparse.Namespace) -> TokenizerSettings:
    """What the flags of ``add_tokenizer_flags`` say."""
    return TokenizerSettings(
        tokenizer_type=options.tokenizer_type,
        tokenizer_model=_text(options.tokenizer_model),
        vocab_file=_text(options.vocab_file),
        merge_file=_text(options.merge_file),
        vocab_size=options.vocab_size,
        vocab_extra_ids=options.vocab_extra_ids,
        tokenizer_special_tokens=tuple(options.tokenizer_special_tokens),
        tiktoken_pattern=options.tiktoken_pattern,
        tiktoken_num_special_tokens=options.tiktoken_num_special_tokens,
        tokenizer_hf_include_special_tokens=options.tokenizer_hf_include_special_tokens,
        eod_token=options.eod_token,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
